"""What is left behind is found and ended, wherever it has gone: real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sandbox import is_alive

ADOPTS = """
import os, subprocess, sys, time
from ds_hooks.shared.processes.parent import adopt_orphans
from squeezer.daemon.side_processes.orphans import end_orphans

adopt_orphans()
spared = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
says, hears = os.pipe()
if os.fork() == 0:
    for goes in (lambda: None, os.setsid, lambda: os.setpgid(0, 0)):
        if os.fork() == 0:
            goes()
            if os.fork() == 0:
                os.write(hears, f"{os.getpid()} ".encode())
                time.sleep(60)
            os._exit(0)
        os.wait()
    os._exit(0)
os.wait()
left = b""
while left.count(b" ") < 3:
    left += os.read(says, 100)
print(left.decode(), end_orphans([spared.pid]), spared.poll(), flush=True)
spared.kill()
"""


def test_all_that_is_left_in_whatever_group_or_session_is_ended_but_what_is_spared() -> None:
    done = subprocess.run([sys.executable, "-c", ADOPTS], capture_output=True, text=True, timeout=60, check=True)
    *left, ended, spared = done.stdout.split()
    assert len(left) == 3 and not any(is_alive(int(pid)) for pid in left)
    assert (ended, spared) == ("3", "None")


SHARES = """
import os, signal
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from ds_hooks.shared.processes.parent import adopt_orphans
from squeezer.daemon.side_processes.orphans import end_orphans

adopt_orphans()
says, hears = os.pipe()
sharer = os.fork()
if sharer == 0:
    os.setpgid(0, 0)
    name = SharedMemory(create=True, size=1).name
    os.kill(resource_tracker._resource_tracker._pid, signal.SIGSTOP)  # as at a bubble's end
    if os.fork():
        os.write(hears, name.encode())
    signal.pause()
name = os.read(says, 100).decode()
os.kill(sharer, signal.SIGKILL)
os.waitpid(sharer, 0)
end_orphans()
print(name, flush=True)
"""


def test_what_they_have_in_shared_memory_is_removed_by_those_whose_task_that_is() -> None:
    done = subprocess.run([sys.executable, "-c", SHARES], capture_output=True, text=True, timeout=60, check=True)
    left = Path("/dev/shm", done.stdout.strip())
    was_left = left.is_file()
    if was_left:
        left.unlink()
    assert not was_left


WAITS = """
import os, subprocess, sys
import psutil
from squeezer.daemon.side_processes import orphans

lasting = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
looks, look, kill = [], psutil.Process.children, os.kill
psutil.Process.children = lambda self, **which: looks.append(1) or look(self, **which)
os.kill = lambda pid, number: None  # a process that has no time to end
orphans.PATIENCE_S = 0.5
print(orphans.end_orphans(), len(looks), flush=True)
kill(lasting.pid, 9)
"""


def test_who_waits_for_one_that_does_not_end_leaves_it_the_core() -> None:
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "2"], "one for those that clear up"


KEEPS = """
import os, subprocess, sys, time
from squeezer.daemon import daemon_keeper

daemon_keeper.RESTART_AFTER_S = 0
side = "import os, sys, time; parent = os.getppid(); print(os.getpid(), flush=True)\\n"
side += "while os.getppid() == parent: time.sleep(0.01)\\n"
side += "time.sleep(0.3 if sys.argv[3] == 'ends' else 600); open(sys.argv[1], 'w').close()"

def serve(ended):
    if ended is not None:
        print(os.path.exists(sys.argv[1]), flush=True)
        return 0
    words = [sys.argv[1], "--page", sys.argv[3], "--device", sys.argv[2]]
    task = subprocess.Popen([sys.executable, "-c", side, *words], process_group=0, stdout=subprocess.PIPE)
    task.stdout.readline()
    os.kill(os.getpid(), 9)

from squeezer.daemon.side_processes import orphans
if sys.argv[2:] == ["cuda", "hangs"]:
    daemon_keeper.await_gated = lambda: orphans.await_gated(0.5)
print(daemon_keeper.keep(serve, os.getpid()), flush=True)
"""


@pytest.mark.parametrize(
    ("device", "then", "has_ended_itself"),
    [("cuda", "ends", "True"), ("cuda", "hangs", "False"), ("cpu", "hangs", "False")],
)
def test_a_killed_daemons_side_task_on_a_gpu_is_not_killed_before_it_has_ended_its_work(
    tmp_path: Path, device: str, then: str, has_ended_itself: str
) -> None:
    command = [sys.executable, "-c", KEEPS, str(tmp_path / "drained"), device, then]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [has_ended_itself, "0"], done.stderr
