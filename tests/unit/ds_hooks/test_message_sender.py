"""The hooks' socket: whatever becomes of its sender, no garbage collection of the training waits for it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_hooks import connection
from ds_hooks.message_sender import MessageSender
from ds_hooks.shared.cuda_driver import DriverError
from ds_hooks.shared.page.file import make_private_dir

HANGS_AFTER_S = 60
LOST_IN_A_CYCLE = """
import gc, sys, zmq
from ds_hooks.message_sender import MessageSender
sender = MessageSender(zmq, sys.argv[1])
sender.cycle = sender
del sender
gc.collect()
"""


def test_a_sender_that_is_lost_in_a_cycle_is_collected_at_once(tmp_path: Path) -> None:
    """As one of an exception is, with the frames in which it was made."""
    command = [sys.executable, "-c", LOST_IN_A_CYCLE, f"ipc://{tmp_path / 'socket'}"]
    done = subprocess.run(command, timeout=HANGS_AFTER_S, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_hooks_that_cannot_connect_keep_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    senders: list[MessageSender] = []
    made: Any = MessageSender

    def noted(*args: Any) -> MessageSender:
        senders.append(made(*args))
        return senders[-1]

    def refuse(*_: Any) -> None:
        raise DriverError("refused on purpose")

    monkeypatch.setattr(connection, "MessageSender", noted)
    monkeypatch.setattr(connection, "clock_for", refuse)
    with pytest.raises(DriverError):
        connection.connect(make_private_dir(tmp_path / "run"), 0, "cpu", 0)
    assert senders[0]._socket.closed and senders[0]._context.closed
    assert list((tmp_path / "run").iterdir()) == []
