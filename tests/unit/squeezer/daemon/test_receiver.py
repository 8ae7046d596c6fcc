"""How a daemon is woken, and what it leaves."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from squeezer.daemon.receiver import Receiver

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


@pytest.mark.parametrize("instead", ["nothing", "a directory", "no directory"])
def test_what_others_have_put_in_the_sockets_place_is_left_alone(instead: str) -> None:
    with tempfile.TemporaryDirectory(prefix="bsq-", dir="/tmp") as made:
        folder = Path(made) / "run"
        folder.mkdir()
        receiver = Receiver(folder / "socket", pytest.fail)
        (folder / "socket").unlink()
        if instead == "a directory":
            (folder / "socket").mkdir()
        elif instead == "no directory":
            folder.rmdir()
            folder.touch()
        receiver.close()
        assert (folder / "socket").is_dir() is (instead == "a directory")


def test_the_socket_is_for_its_user_alone() -> None:
    """Even where others may enter the directory."""
    with tempfile.TemporaryDirectory(prefix="bsq-", dir="/tmp") as made:
        receiver = Receiver(Path(made) / "socket", pytest.fail)
        assert (Path(made) / "socket").stat().st_mode & 0o077 == 0
        receiver.close()
