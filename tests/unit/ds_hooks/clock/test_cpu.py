"""The order in which a CPU's clock writes the page's words: what a reader relies on."""

import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ds_hooks.clock.cpu import CpuClock
from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import PROCESS_WORDS, Field


class Words(dict[int, int]):
    """Remembers the order of writes, and of looks at the clock."""

    def __init__(self) -> None:
        super().__init__({Field.BUBBLE: 41 << 1, Field.BUBBLE_END_NS: 100})
        self.order: list[int | str] = []

    def __setitem__(self, field: int, value: int) -> None:
        super().__setitem__(field, value)
        self.order.append(field)


def test_all_words_of_a_bubble_are_there_before_it_opens_and_the_end_is_read_after_it_has_closed() -> None:
    words = Words()
    times = itertools.count(200, 100)

    def clock_ns() -> int:
        words.order.append("clock")
        return next(times)

    page: Any = SimpleNamespace(words=words)
    clock = CpuClock(page, clock_ns)
    words.order.clear()
    assert clock.open(7, 3, 50) == 200
    assert words.order == [
        *("clock", Field.STEP, Field.SLOT, Field.BUBBLE_START_NS, Field.PLAN_BASE_NS, Field.PERMIT_UNTIL_NS),
        Field.BUBBLE,
    ]
    assert (words[Field.BUBBLE], words[Field.PERMIT_UNTIL_NS], words[Field.PLAN_BASE_NS]) == (42 << 1 | 1, 250, 200)
    words.order.clear()
    assert clock.close() == 300
    assert words.order == [Field.BUBBLE, "clock", Field.BUBBLE_END_NS]


def burner() -> tuple[int, int]:
    """(process id, where to write how many ms of CPU time it is to use); 0 ends it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reader)
        return pid, writer
    os.close(writer)
    try:
        while any(order := os.read(reader, 1)):  # nothing: the test has failed
            end_s = time.process_time() + order[0] / 1e3
            while time.process_time() < end_s:
                pass
    finally:
        os._exit(0)


def burn(pid: int, writer: int, ms: int) -> None:
    """Have it use as much, and wait for that."""
    clock = ~pid << 3 | 2
    until_ns = time.clock_gettime_ns(clock) + ms * 1_000_000
    os.write(writer, bytes([ms]))
    while time.clock_gettime_ns(clock) < until_ns:
        time.sleep(0.001)


def test_the_side_tasks_own_processes_count_and_what_they_used_stays_counted(tmp_path: Path) -> None:
    page = Page.open(page_path(tmp_path / "pages", 0))
    words = page.words
    clock = CpuClock(page, time.monotonic_ns)
    assert clock.side_cpu_ns() == 0
    side, forked, found = burner(), burner(), burner()
    for each in (forked, found):
        burn(*each, 50)
    words[Field.SIDE_PID] = side[0]
    assert clock.side_cpu_ns() < 40e6
    words[Field.FORKED_PROCESSES + 3], words[Field.SIDE_FORKS] = forked[0], 3
    words[Field.FOUND_PROCESSES] = found[0]
    first_ns = clock.side_cpu_ns()
    assert 50e6 < first_ns < 90e6, "one that was found late begins now"
    burn(*found, 50)
    second_ns = clock.side_cpu_ns()
    assert 50e6 < second_ns - first_ns < 90e6
    for pid, writer in (forked, found):
        os.write(writer, b"\0")
        os.waitpid(pid, 0)
    assert clock.side_cpu_ns() >= second_ns
    words[Field.FOUND_PROCESSES] = 0
    assert clock.side_cpu_ns() >= second_ns
    os.write(side[1], b"\0")
    os.waitpid(side[0], 0)
    page.close()


def test_of_processes_that_come_and_go_no_more_are_remembered_than_are_named(tmp_path: Path) -> None:
    page = Page.open(page_path(tmp_path / "pages", 0))
    words = page.words
    clock = CpuClock(page, time.monotonic_ns)
    words[Field.SIDE_PID] = os.getpid()
    reader, writer = os.pipe()
    waiting = []
    for number in range(1, 4 * PROCESS_WORDS):
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        waiting.append(pid)
        words[Field.FORKED_PROCESSES + number % PROCESS_WORDS], words[Field.SIDE_FORKS] = pid, number
        clock.side_cpu_ns()
    assert len(clock._side_clock._counted_ns) <= 2 * PROCESS_WORDS + 1
    os.close(writer)
    os.close(reader)
    for pid in waiting:
        os.waitpid(pid, 0)
    page.close()
