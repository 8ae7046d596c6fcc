"""ds_squeeze is ended from outside while its daemons have hardly any time to clear up: nothing of the run stays."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.jobs import STARTING_S, ds_squeeze, environment, pretrain, short_directory
from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_a_terminated_launcher_leaves_nothing_though_its_daemons_starve_and_it_is_told_twice(tmp_path: Path) -> None:
    config, run = tmp_path / "squeezer.toml", tmp_path / "run"
    config.write_text(f'[side]\nstudy = "{ROOT}/examples/digits.py"\n[run]\ndirectory = "{run}"\ncalibrate_s = 0.0\n')
    hogs: list[subprocess.Popen[bytes]] = []
    with short_directory() as directory:
        command = ds_squeeze(config, *pretrain(tmp_path / "losses", 1_000_000))
        job = subprocess.Popen(command, env=environment(directory), cwd=tmp_path, stdout=subprocess.DEVNULL)
        try:
            deadline_s = time.monotonic() + STARTING_S
            while not all('"r":"step"' in log(run, rank) for rank in range(2)):
                assert job.poll() is None and time.monotonic() < deadline_s
                time.sleep(0.1)
            hogs += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
            job.send_signal(signal.SIGTERM)
            time.sleep(2.0)  # it is clearing up
            job.send_signal(signal.SIGTERM)
            for hog in hogs:
                hog.kill()
            assert job.wait(STARTING_S) == 128 + signal.SIGTERM
            assert not list(directory.rglob("*"))
        finally:
            for process in (*hogs, job):
                process.kill()
                process.wait()


def log(run: Path, rank: int) -> str:
    path = run / f"rank{rank}.events.jsonl"
    return path.read_text(encoding="utf-8") if path.exists() else ""
