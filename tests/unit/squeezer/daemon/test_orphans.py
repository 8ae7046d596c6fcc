"""What is left behind is found and ended, wherever it has gone: real processes."""

import subprocess
import sys

from tests.support.sandbox import is_alive

ADOPTS = """
import os, subprocess, sys, time
from ds_hooks.shared.parent import adopt_orphans
from squeezer.daemon.orphans import end_orphans

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
