"""How a daemon is woken."""

import subprocess
import sys

STORM = """
import os, signal
from squeezer.daemon.receiver import has_signal, wakeup_on_signals
wakeup = wakeup_on_signals()
for _ in range(2000):
    os.kill(os.getpid(), signal.SIGTERM)
assert has_signal(wakeup)
"""


def test_a_storm_of_signals_is_noticed_and_prints_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", STORM], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
