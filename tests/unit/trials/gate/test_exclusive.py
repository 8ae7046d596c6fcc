"""The gate of a device without a main job."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from trials.gate import base
from trials.gate.base import GATE_SIGNALS, HOST_UNIT, ExclusiveGate, StopRequested


@pytest.fixture
def asked() -> Iterator[None]:
    """This process is asked to end, and has not looked yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GATE_SIGNALS)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # other threads do not block it
    yield
    assert signal.sigtimedwait(GATE_SIGNALS, 0) is not None
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("asked")
def test_what_goes_on_is_finished_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    gate = ExclusiveGate()
    gate.finishes = True
    gate.enter(0)
    now_s += base.EXCLUSIVE_FINISHES_S - 1
    gate.enter(HOST_UNIT)
    now_s += 2
    with pytest.raises(StopRequested):
        gate.enter(0)


@pytest.mark.usefixtures("asked")
def test_nothing_else_begins() -> None:
    gate = ExclusiveGate()
    assert gate.is_alone()
    with pytest.raises(StopRequested):
        gate.enter(0)


def test_it_is_open_and_counts_for_a_process_that_was_forked_before() -> None:
    gate = ExclusiveGate()
    reads_fd, writes_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reads_fd, 1)
        os._exit(gate.entered())
    for unit in range(3):
        gate.enter(unit)
    os.write(writes_fd, b" ")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    os.close(reads_fd)
    os.close(writes_fd)
