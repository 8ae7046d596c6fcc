"""Hooks in a process that may open no more files or start no more threads: the training goes on."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq

from ds_hooks.shared.page.file import page_path, socket_path
from tests.support.paths import ROOT
from tests.support.sandbox import Child, Sandbox, is_alive, wait_for
from tests.support.stranger import needs_second_user

pytestmark = pytest.mark.integration
OTHER = 54321
"""A user without processes, as in the script; limits do not count for root."""

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


FORBIDS_ITSELF_ALL_FILES = """
import resource, sys, zmq
from pathlib import Path
from ds_hooks import attach
from tests.support.hooked_engine import Engine

directory = Path(sys.argv[1])
engine = Engine(directory / "none")
handle = attach(engine, directory=directory, local_rank=0)
assert handle._connection.sender._socket.poll(60_000, zmq.POLLOUT), "never connected"
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
print([engine.train_batch() for _ in range(1000)] == [0.5] * 1000, handle.enabled, flush=True)
"""


def test_a_process_that_forbids_itself_all_files_trains_on() -> None:
    """Then even `poll` fails, and ZeroMQ would end the process, when it sends as when it is closed."""
    with tempfile.TemporaryDirectory(prefix="bsq-", dir="/tmp") as place, zmq.Context() as context:
        with context.socket(zmq.PULL) as daemon:
            daemon.bind(f"ipc://{socket_path(Path(place), 0)}")
            command = [sys.executable, "-c", FORBIDS_ITSELF_ALL_FILES, place]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "True False\n"), (done.stdout, done.stderr)
        assert "training continues without squeezing: this process may have no file any more" in done.stderr
        assert not page_path(Path(place), 0).exists()


@needs_second_user
@pytest.mark.parametrize(
    ("processes", "says", "status"),
    [
        (1, "no daemon, so nothing is squeezed; the main job continues alone", 1),
        (2, "no room for 16 files and 2 threads more: can't start new thread", 2),
        (4, "no side task runs: ", 0),
    ],
)
def test_a_daemon_whose_user_may_start_few_processes_says_so(
    sandbox: Sandbox, processes: int, says: str, status: int
) -> None:
    os.chown(sandbox.directory, OTHER, OTHER)
    job: Child = sandbox.start(Child, "-c", "input()")
    config = sandbox.config("tiny.py")
    command = [sys.executable, "-m", "squeezer", "daemon", "--config", str(config), "--job-pid", str(job.pid)]
    become = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups"]
    become += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]  # Python may lie in root's home
    limited = ["prlimit", f"--nproc={processes}", *become, *command]
    execute = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
    daemon: Child = sandbox.start(Child, "-c", execute, *limited, OPENBLAS_NUM_THREADS="1")
    wait_for(lambda: says in daemon.said() or not is_alive(daemon.pid), says)
    assert job.process.stdin is not None
    job.process.stdin.close()
    assert daemon.ended() == status and says in daemon.said() and "Traceback" not in daemon.said(), daemon.said()
