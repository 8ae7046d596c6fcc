"""Fences stand where the protocol's rules need an order, on processors that keep little of it by themselves."""

import importlib
import os
import signal
import subprocess
from array import array
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from ds_hooks import side_process
from ds_hooks.clock import cpu as clock
from ds_hooks.clock import cuda as cuda_clock
from ds_hooks.shared.page import memory_order, plan
from ds_hooks.shared.page.layout import PAGE_BYTES, ClockKind, Field, SideActivity
from ds_hooks.shared.processes.identity import start_time
from ds_hooks.shared.processes.signals import WAKE_SIGNAL
from squeezer.daemon import side_task_supervisor
from trials.gate import bubble_watch
from trials.gate import cpu as gate

LIGHT, FULL = "light fence", "full fence"


class Words(list[int]):
    """Words that note each access."""

    def __init__(self, log: list[object]) -> None:
        super().__init__([0] * (PAGE_BYTES // 8))
        self.log = log

    def __getitem__(self, at: Any) -> Any:
        self.log.append(("read", at.start if isinstance(at, slice) else at))
        found = super().__getitem__(at)
        return array("q", found) if isinstance(at, slice) else found

    def __setitem__(self, at: Any, value: Any) -> None:
        self.log.append(("write", at))
        super().__setitem__(at, value)

    def announced(self, field: int) -> list[object]:
        """The fences between the last write of `field` and the next look at the bubble word."""
        last = len(self.log) - 1 - self.log[::-1].index(("write", field))
        return between(self.log[last:], ("write", field), ("read", Field.BUBBLE))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found: list[object] = []
    for module in (clock, cuda_clock, plan, gate, bubble_watch, side_process, side_task_supervisor):
        for name, fence in (("light_fence", LIGHT), ("full_fence", FULL)):
            monkeypatch.setattr(module, name, lambda fence=fence: found.append(fence), raising=False)
    return found


def between(log: list[object], first: tuple[str, int], then: tuple[str, int]) -> list[object]:
    """The fences between the first `first` and the next `then`."""
    begin = log.index(first)
    return [each for each in log[begin : log.index(then, begin)] if each in (LIGHT, FULL)]


def test_a_bubble_is_announced_after_its_words_and_before_the_look_at_the_side_task(log: list[object]) -> None:
    words: Any = Words(log)
    found = clock.CpuClock(type("Page", (), {"words": words})(), lambda: 5)
    log.clear()
    found.open(1, 2, 1000)
    for field in (Field.STEP, Field.SLOT, Field.BUBBLE_START_NS, Field.PLAN_BASE_NS, Field.PERMIT_UNTIL_NS):
        assert between(log, ("write", field), ("write", Field.BUBBLE)), field
    assert log[-1] == FULL
    log.clear()
    found.close()
    assert between(log, ("write", Field.BUBBLE), ("write", Field.BUBBLE_END_NS)) == [FULL]


def test_a_plan_is_written_in_order_and_read_in_order(log: list[object]) -> None:
    words: Any = Words(log)
    plan.plan_steps(words, 3, 9)
    assert between(log, ("write", Field.PLAN_UNTIL_STEP), ("write", Field.PLAN_FROM_STEP))
    assert between(log, ("write", Field.PLAN_FROM_STEP), ("write", Field.PLAN_UNTIL_STEP))
    log.clear()
    plan.planned_permit(words, 5, 0)
    assert between(log, ("read", Field.PLAN_UNTIL_STEP), ("read", Field.PLAN_FROM_STEP))
    assert between(log, ("read", Field.PLAN_FROM_STEP), ("read", Field.PERMITS))
    log.clear()
    assert plan.is_planned(words, 5)
    assert between(log, ("read", Field.PLAN_UNTIL_STEP), ("read", Field.PLAN_FROM_STEP))
    log.clear()
    plan.next_permit_ns(words, 5, -1)
    assert between(log, ("read", Field.PLAN_UNTIL_STEP), ("read", Field.PERMITS))


def test_a_side_task_says_then_looks(log: list[object]) -> None:
    words: Any = Words(log)
    made = gate.CpuGate(type("Page", (), {"words": words})())
    made.use(["only"], 1)
    words[Field.BUBBLE], words[Field.PERMIT_UNTIL_NS] = 3, 2**62
    log.clear()
    made.enter(0)
    assert words[Field.SIDE_ACTIVITY] == SideActivity.UNIT
    assert FULL in between(log, ("write", Field.SIDE_ACTIVITY), ("read", Field.BUBBLE))
    assert between(log, ("read", Field.BUBBLE), ("read", Field.PERMIT_UNTIL_NS))
    last = len(log) - 1 - log[::-1].index(("read", Field.BUBBLE))
    permit = log.index(("read", Field.PERMIT_UNTIL_NS))
    assert permit < last and LIGHT in log[permit:last], "the word is the same after the others were read"


def test_a_side_task_that_goes_to_sleep_or_is_woken_says_so_and_looks_again(
    log: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    words: Any = Words(log)
    made = gate.CpuGate(type("Page", (), {"words": words})())
    made.use(["only"], 1)

    def woken(*_: object) -> SimpleNamespace:
        assert words[Field.SIDE_ACTIVITY] == SideActivity.ASLEEP
        assert FULL in words.announced(Field.SIDE_ACTIVITY), "a bubble that began meanwhile has woken nobody"
        words[Field.BUBBLE], words[Field.PERMIT_UNTIL_NS] = 3, 2**62
        return SimpleNamespace(si_signo=WAKE_SIGNAL)

    monkeypatch.setattr(gate, "block_signals", lambda: None)  # in this process they stay as they are
    monkeypatch.setattr(signal, "sigtimedwait", woken)
    made.enter(0)
    assert words[Field.SIDE_ACTIVITY] == SideActivity.UNIT
    assert FULL in words.announced(Field.SIDE_ACTIVITY), "a bubble that ended meanwhile has stopped nobody"


def test_on_cuda_the_gate_is_read_and_written_in_order(log: list[object]) -> None:
    words: Any = Words(log)
    words[Field.CLOCK_KIND] = ClockKind.CUDA
    watch = bubble_watch.BubbleWatch(words, lambda: 5)
    words[Field.BUBBLE], words[Field.PERMIT_LENGTH_NS] = 3, 1000
    log.clear()
    assert watch.look()
    assert between(log, ("read", Field.BUBBLE), ("read", Field.SLOT))
    log.clear()
    watch.left_ns(0)
    assert between(log, ("read", Field.PERMIT_LENGTH_NS), ("read", Field.BUBBLE))
    work: SimpleQueue[Any] = SimpleQueue()
    work.put((1, [(Field.PERMIT_LENGTH_NS, 7), (Field.BUBBLE, 5)]))
    work.put(None)
    driver, done = SimpleNamespace(is_done=lambda event: True), SimpleQueue[int]()
    thread: Any = SimpleNamespace(_work=work, _driver=driver, _looked_at=done)
    log.clear()
    cuda_clock.PolledCudaClock._serve(thread, words)
    assert between(log, ("write", Field.PERMIT_LENGTH_NS), ("write", Field.BUBBLE))


def test_a_side_task_is_named_after_what_belongs_to_it_and_read_in_that_order(log: list[object]) -> None:
    words: Any = Words(log)
    other = subprocess.Popen(["sleep", "60"], process_group=0)
    side_task_supervisor.announce(words, other.pid)
    for field in (Field.SIDE_ACTIVITY, Field.SIDE_PROCESS_START):
        assert between(log, ("write", field), ("write", Field.SIDE_PROCESS)), field
    assert words[Field.SIDE_PROCESS_START] == start_time(other.pid) != 0
    words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP  # else it would be stopped
    side = side_process.SideProcess(words)
    log.clear()
    assert not side.halt([SideActivity.UNIT])
    assert between(log, ("read", Field.SIDE_PROCESS), ("read", Field.SIDE_PROCESS_START))
    side.leave()
    other.kill()
    other.wait()


@pytest.fixture
def on_arm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    here = os.uname()
    arm = os.uname_result((here.sysname, here.nodename, here.release, here.version, "aarch64"))
    with monkeypatch.context() as context:
        context.setattr(os, "uname", lambda: arm)
        importlib.reload(memory_order)
    yield
    importlib.reload(memory_order)


def taken(monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a full fence takes its lock."""
    made = MagicMock()
    with monkeypatch.context() as context:
        context.setattr(memory_order, "allocate_lock", made)
        memory_order.full_fence()
    assert made.call_count == 1, "its own: nobody waits for it"
    return int(made.return_value.__enter__.call_count)


def test_only_processors_that_need_it_pay_for_the_light_fence(on_arm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not memory_order.KEEPS_STORE_ORDER
    assert memory_order.light_fence is memory_order.full_fence
    assert taken(monkeypatch) == 2, "to take the lock again comes after it was released, and that after all before"
    importlib.reload(memory_order)  # as the fixture does at the end
    assert (memory_order.light_fence is memory_order.full_fence) is not memory_order.KEEPS_STORE_ORDER
