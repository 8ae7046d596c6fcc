"""The plan on the page: which permit a bubble gets, and what a reader sees while the plan changes."""

from typing import Any

import pytest

from ds_hooks.shared.page.layout import PAGE_BYTES, PLANNED_SLOTS, RENEWALS_PER_SLOT, Field
from ds_hooks.shared.page.plan import clear_plan, find_renewal, plan_slot, plan_steps, planned_permit


@pytest.fixture
def words() -> "memoryview[int]":
    return memoryview(bytearray(PAGE_BYTES)).cast("q")


def test_a_plan_counts_for_its_slots_and_steps_alone(words: "memoryview[int]") -> None:
    plan_slot(words, 7, 1000)
    plan_slot(words, PLANNED_SLOTS - 1, 2000)
    plan_slot(words, PLANNED_SLOTS, 3000)
    shut = (0, 0)
    assert planned_permit(words, 5, 7) == shut, "for no step yet"
    plan_steps(words, 5, 8)
    assert [planned_permit(words, step, 7) for step in range(4, 9)] == [shut, *[(1000, 0)] * 3, shut]
    last = PLANNED_SLOTS - 1
    assert [planned_permit(words, 5, slot) for slot in (6, last, last + 1)] == [shut, (2000, 0), shut]
    clear_plan(words)
    plan_steps(words, 5, 8)
    assert [planned_permit(words, 5, slot) for slot in (7, PLANNED_SLOTS - 1)] == [shut, shut]


def test_a_plan_keeps_microseconds_and_the_longest_that_there_are(words: "memoryview[int]") -> None:
    plan_steps(words, 1, 2)
    for permit_ns, opens_before_ns in ((60 * 10**9, 0), (60 * 10**9, 50 * 10**9), (3_000, 2_000_000)):
        plan_slot(words, 4, permit_ns, (), opens_before_ns)
        assert planned_permit(words, 1, 4) == (permit_ns, opens_before_ns)
    plan_slot(words, 4, 1)
    assert planned_permit(words, 1, 4) == (1000, 0), "the shortest permit is one"
    plan_slot(words, 4, 2**70, (), 2**70)
    assert planned_permit(words, 1, 4) == ((2**31 - 1) * 1000,) * 2


class Words:
    """A plan's words, and a look at them after every write."""

    def __init__(self) -> None:
        self.values: dict[int, int] = {Field.PLAN_FROM_STEP: 0, Field.PLAN_UNTIL_STEP: 0}
        self.held: list[set[int]] = []

    def __getitem__(self, field: int) -> int:
        return self.values[field]

    def __setitem__(self, field: int, value: int) -> None:
        self.values[field] = value
        self.held.append(set(range(self.values[Field.PLAN_FROM_STEP], self.values[Field.PLAN_UNTIL_STEP])))


def test_a_renewal_is_found_by_what_is_left_of_it(words: "memoryview[int]") -> None:
    plan_slot(words, 5, 2_000_000, ((3_000_000, 4_000_000), (6_000_000, 2**70)))
    first, last = (3_000_000, 4_000_000), (6_000_000, (2**31 - 1) * 1000)
    for elapsed_ms, needs_ms, found in (
        (0, 0.9, first),
        (3.0, 1, first),
        (3.2, 0.8, first),
        (3.2, 0.9, last),
        (0, 1.1, last),
        (60_000, 1000, last),
    ):
        assert find_renewal(words, 5, int(elapsed_ms * 1e6), needs_ms * 1e6) == found
    assert find_renewal(words, 5, 0, 2**60) is None, "nothing is so long"
    assert find_renewal(words, 4, 0, 1) is find_renewal(words, 6, 0, 1) is None, "of other slots"
    assert find_renewal(words, PLANNED_SLOTS, 0, 1) is None
    plan_slot(words, 5, 2_000_000)
    assert find_renewal(words, 5, 0, 1) is None
    plan_slot(words, PLANNED_SLOTS - 1, 1, ((1000, 2000),) * RENEWALS_PER_SLOT)
    plan_slot(words, PLANNED_SLOTS, 1, ((1000, 2000),))
    assert find_renewal(words, PLANNED_SLOTS - 1, 0, 1000) == (1000, 2000)


@pytest.mark.parametrize("before", [(0, 0), (4, 8), (20, 24)])
@pytest.mark.parametrize("after", [(0, 0), (4, 8), (5, 9), (20, 24)])
def test_no_step_is_planned_while_a_plan_changes_that_neither_has(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    words: Any = Words()
    plan_steps(words, *before)
    words.held.clear()
    plan_steps(words, *after)
    assert words.held[-1] == set(range(*after))
    assert all(held <= set(range(*before)) | set(range(*after)) for held in words.held)
