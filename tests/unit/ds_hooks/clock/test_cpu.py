"""The order in which a CPU's clock writes the page's words: what a reader relies on."""

import itertools
from types import SimpleNamespace
from typing import Any

from ds_hooks.clock.cpu import CpuClock
from ds_hooks.shared.page import Field


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
