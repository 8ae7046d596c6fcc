"""What a daemon's processes are given, and how they end: real ones, with a made-up program in place of ours."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_hooks.shared import statuses
from ds_hooks.shared.page.layout import PAGE_BYTES
from ds_hooks.shared.secrets import STORAGE_VARIABLE
from squeezer.config import DeviceTable, SideTable
from squeezer.daemon.side_processes import spawner
from squeezer.device import CpuDevice
from tests.support.control_groups import a_parent_group
from tests.support.paths import ROOT
from tests.support.sandbox import is_alive, wait_for

PASSWORD = "s3cr3t"
URL = f"postgresql://me:{PASSWORD}@host/studies"
OF_THE_JOB = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "0"}
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")

NOTES = """
import json, os, sys, time
led = [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getsid(os.getppid())]
found = json.dumps({"environment": dict(os.environ), "arguments": sys.argv, "led": led}) + "\\n"
os.write(os.open(os.environ["NOTED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), found.encode())
print('{"work_per_s": 1.0}', flush=True)
if "--page" in sys.argv:
    time.sleep(600)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that Python finds."""
    made = tmp_path / "modules"
    made.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(made), str(ROOT)]))
    return made


def test_none_learns_which_rank_it_is_nor_is_given_a_password_that_others_can_read(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (modules / "notes.py").write_text(NOTES)
    noted, run = tmp_path / "noted", tmp_path / "run"
    monkeypatch.setattr(statuses, "SIDE_TASK", "notes")
    monkeypatch.setattr(spawner, "RELEASE", "notes")
    monkeypatch.setattr(spawner, "end_orphans", lambda spare: 0)  # this process's children are not its
    for name, value in {**OF_THE_JOB, "TRITON_CACHE_DIR": "/of/the/rank", "NOTED": str(noted)}.items():
        monkeypatch.setenv(name, value)
    device = CpuDevice(memoryview(bytearray(PAGE_BYTES)).cast("q"), DeviceTable(), 0)
    files = spawner.SideFiles(page=tmp_path, run=run, rank=0, storage=URL, studies=tmp_path, units_bytes=0)
    made = spawner.Spawner(SideTable(study=tmp_path), device, files)
    made.start()
    wait_for(lambda: noted.exists() and noted.read_text(), "the side task")
    made.end(0.0, beside_main=False)
    made.reap()
    assert made.release_trials(died=False, idle=False).wait(60) == 0
    assert made.measure_dedicated(1.0, 2, 60.0, lambda: "") == {"work_per_s": 1.0}
    lines = noted.read_text().splitlines()
    assert len(lines) == 3, "side task, release, measurement"
    for found in map(json.loads, lines):
        environment = found["environment"]
        assert not OF_THE_JOB.keys() & environment.keys()
        assert environment[STORAGE_VARIABLE] == URL and PASSWORD not in " ".join(found["arguments"])
        assert all(Path(environment[name]).is_relative_to(run) for name in CACHES), "a rank waits for no lock of theirs"
    assert json.loads(lines[0])["led"] == [True, True], "a group of its own, but no session"
    assert (run / "caches").stat().st_mode & 0o077 == 0


LEAVES = """
import json, os, time

def fork(do):
    pid = os.fork()
    if pid == 0:
        do()
        os._exit(0)
    return pid

def leave():
    os.setsid()
    os.write(hears, fork(lambda: time.sleep(600)).to_bytes(4, "big"))

says, hears = os.pipe()
child = fork(lambda: time.sleep(600))
os.waitpid(fork(leave), 0)
stray = int.from_bytes(os.read(says, 4), "big")
parent = int(open(f"/proc/{stray}/stat").read().rpartition(")")[2].split()[1])
found = {"own": [os.getpid(), child, stray], "adopted": parent == os.getpid()}
print(json.dumps(found), flush=True)
time.sleep(600)
"""
DAEMON = """
import json, sys
from pathlib import Path
from ds_hooks.shared import statuses
from ds_hooks.shared.page.layout import PAGE_BYTES
from ds_hooks.shared.processes.parent import adopt_orphans
from squeezer.config import DeviceTable, SideTable
from squeezer.daemon.side_processes import spawner
from squeezer.daemon.side_processes.parent_group import NoGroupError
from squeezer.device import CpuDevice

def no_group(most_bytes):
    raise NoGroupError("")

statuses.SIDE_TASK = "leaves"
if sys.argv[2] == "without a group":
    spawner.make_side_group = no_group
else:
    spawner.end_orphans = lambda spare: 0  # the group has them all
adopt_orphans()
place = Path(sys.argv[1])
device = CpuDevice(memoryview(bytearray(PAGE_BYTES)).cast("q"), DeviceTable(), 0)
files = spawner.SideFiles(page=place, run=place, rank=0, storage="", studies=place, units_bytes=0)
made = spawner.Spawner(SideTable(study=place), device, files)
made.start()
sys.stdin.readline()
group = made.group
print(json.dumps([] if group is None else [str(group.path), *group.processes()]), flush=True)
sys.stdin.readline()
made.end(0.0, beside_main=False)
made.reap()
"""


class Started:
    """A daemon, and what its side task has noted."""

    def __init__(self, place: Path, how: str) -> None:
        self.how = how
        command = [sys.executable, "-c", DAEMON, str(place), how]
        self.daemon = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.found: dict[str, Any] = json.loads(self._line())
        self.goes_on()
        self.group: list[Any] = json.loads(self._line())

    def goes_on(self) -> None:
        assert self.daemon.stdin is not None
        self.daemon.stdin.write("\n")
        self.daemon.stdin.flush()

    def _line(self) -> str:
        assert self.daemon.stdout is not None
        return self.daemon.stdout.readline()


@pytest.fixture
def started(modules: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Started]:
    (modules / "leaves.py").write_text(LEAVES)
    if request.param == "in a group":
        a_parent_group()
    made = Started(tmp_path, request.param)
    yield made
    made.daemon.kill()
    for pid in made.found["own"]:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    made.daemon.communicate()


HOW = pytest.mark.parametrize("started", ["without a group", "in a group"], indirect=True)


@HOW
def test_all_that_it_has_started_is_its_own_and_ends_with_it(started: Started) -> None:
    own = started.found["own"]
    assert started.found["adopted"], "so that it is found"
    assert set(started.group[1:]) == (set(own) if started.how == "in a group" else set())
    started.goes_on()
    assert started.daemon.wait(60) == 0
    assert not any(map(is_alive, own))
    assert not started.group or not Path(started.group[0]).exists()


@pytest.mark.parametrize("started", ["without a group"], indirect=True)
def test_it_ends_with_a_daemon_that_is_killed_before_it_has_asked_for_that(started: Started) -> None:
    started.daemon.kill()
    wait_for(lambda: not is_alive(started.found["own"][0]), "its end", patience_s=30)
