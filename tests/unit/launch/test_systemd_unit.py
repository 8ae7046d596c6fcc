"""The systemd unit of a standing daemon: it gives way to the job, and starts what the command line knows."""

import shlex
from argparse import ArgumentParser
from configparser import RawConfigParser

from squeezer.cli import COMMANDS
from tests.support.paths import ROOT


def test_it_gives_way_and_starts_a_standing_daemon() -> None:
    unit = RawConfigParser()
    unit.read(ROOT / "launch" / "squeezer-daemon@.service")
    service = unit["Service"]
    assert (service["CPUWeight"], service["OOMScoreAdjust"]) == ("idle", "1000")
    assert (service["RuntimeDirectoryMode"], service["Delegate"]) == ("0700", "yes")
    program, name, *words = shlex.split(service["ExecStart"].replace("%i", "1"))
    (command,) = (each for each in COMMANDS if each.name == name)
    assert program.endswith("/bin/squeezer") and name == "daemon"
    parser = ArgumentParser()
    command.add_arguments(parser)
    parsed = parser.parse_args(words)
    assert (parsed.local_rank, parsed.job_pid) == (1, None), "one for each device, which serves job after job"
