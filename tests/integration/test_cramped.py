"""Hooks in a process that may open no more files or start no more threads: the training goes on."""

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.stranger import needs_second_user

pytestmark = pytest.mark.integration

TRAIN = """
import os, resource, shutil, sys, tempfile
from pathlib import Path
from ds_hooks import attach
from ds_hooks.shared.processes.identity import start_time, own_namespaces
from tests.support.hooked_engine import Engine

own_namespaces(), start_time(1)  # what Python loads when it is first needed is out of another user's reach
what, left = sys.argv[1], int(sys.argv[2])
directory = Path(tempfile.mkdtemp(prefix="bsq-", dir="/tmp"))
files = []
if what == "files":
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    try:
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for file in files[:left]:
            os.close(file)
else:
    os.chown(directory, 54321, 54321)  # a user without processes; the limit does not count for root
    resource.setrlimit(resource.RLIMIT_NPROC, (1 + left, 1 + left))
    os.setresuid(54321, 54321, 54321)
engine = Engine(directory / "none")
handle = attach(engine, directory=directory, local_rank=0)
print(handle.enabled, engine.train_batch(), handle.fault)
handle.detach()
for file in files[left:]:
    os.close(file)
shutil.rmtree(directory)
"""


def train(what: str, left: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TRAIN, what, str(left)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("left", range(1, 14))
def test_a_process_that_may_open_few_more_files_trains_on(left: int) -> None:
    done = train("files", left)
    assert (done.returncode, done.stdout[:9]) == (0, "False 0.5"), (done.stdout, done.stderr)


@needs_second_user
@pytest.mark.parametrize("left", range(2))
def test_a_process_that_may_start_few_more_threads_trains_on(left: int) -> None:
    done = train("threads", left)
    assert (done.returncode, done.stdout[:9]) == (0, "False 0.5"), (done.stdout, done.stderr)
    assert "no room for 16 files and 2 threads more: can't start new thread" in done.stderr


def test_with_room_enough_they_work() -> None:
    assert train("files", 30).stdout == "True 0.5 None\n"
