"""The hooks' socket: what finds no daemon, and that no garbage collection of the training waits for it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from ds_hooks import connection
from ds_hooks.message_sender import MessageSender
from ds_hooks.shared.cuda_driver import DriverError
from ds_hooks.shared.page.file import make_private_dir
from ds_hooks.shared.wire import Hello, StepEnd, StepStart, decode

HANGS_AFTER_S = 60
LOST_IN_A_CYCLE = """
import gc, sys, zmq
from ds_hooks.message_sender import MessageSender
sender = MessageSender(zmq, sys.argv[1])
sender.cycle = sender
del sender
gc.collect()
"""

HELLO, OTHER_HELLO = (Hello(4711, rank, 2, rank, 2, 4, 0) for rank in (0, 1))


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path / 'socket'}"


@pytest.fixture
def sender(endpoint: str) -> Iterator[MessageSender]:
    made = MessageSender(zmq, endpoint.encode())
    yield made
    made.close(linger_ms=0)


def heard_by_a_later_daemon(sender: MessageSender, endpoint: str) -> list[Any]:
    with ExitStack() as at_the_end:
        context = at_the_end.enter_context(zmq.Context())
        daemon = at_the_end.enter_context(context.socket(zmq.PULL))
        daemon.bind(endpoint)
        assert sender._socket.poll(1000 * HANGS_AFTER_S, zmq.POLLOUT), "never connected"
        assert sender.flush() and daemon.poll(1000 * HANGS_AFTER_S)
        return [decode(part).message for part in daemon.recv_multipart()]


def test_a_first_step_that_begins_before_the_connection_is_there_is_heard_of(
    sender: MessageSender, endpoint: str
) -> None:
    sender.hello(1, HELLO)
    sender.send_later(2, StepStart(1))
    assert not sender.flush(), "as in the first bubble"
    sender.send_later(3, StepEnd(1, sender.dropped, 0))
    assert heard_by_a_later_daemon(sender, endpoint) == [HELLO, StepStart(1), StepEnd(1, 0, 0)]


def test_a_later_daemon_gets_nothing_that_two_flushes_could_not_send(sender: MessageSender, endpoint: str) -> None:
    sender.hello(1, HELLO)
    for step in range(1, 5):
        sender.send_later(step, StepStart(step))
        assert not sender.flush()
        assert sender.dropped == step - 1
    assert heard_by_a_later_daemon(sender, endpoint) == [HELLO, StepStart(4)]


def test_what_a_former_engine_could_not_send_is_not_taken_for_the_next_ones(
    sender: MessageSender, endpoint: str
) -> None:
    sender.hello(1, HELLO)
    sender.send_later(2, StepStart(1))
    sender.hello(3, OTHER_HELLO)
    sender.send_later(4, StepStart(2))
    assert heard_by_a_later_daemon(sender, endpoint) == [OTHER_HELLO, StepStart(2)] and sender.dropped == 1


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


def test_its_threads_take_the_core_from_nobody(tmp_path: Path) -> None:
    """Else a main job waits for them, and for the daemon that they wake, before it asks for what it needs next."""
    before, own = set(os.listdir("/proc/self/task")), os.sched_getscheduler(0)
    sender = MessageSender(zmq, f"ipc://{tmp_path}/daemon.sock".encode())
    try:
        threads = set(os.listdir("/proc/self/task")) - before
        assert threads and {os.sched_getscheduler(int(thread)) for thread in threads} == {os.SCHED_BATCH}
        assert os.sched_getscheduler(0) == own
    finally:
        sender.close(linger_ms=0)
