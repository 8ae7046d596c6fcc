"""The plan: how long the side task may run in the bubbles of each slot, and for which steps.

The daemon writes it ahead of time. The main job reads a bubble's permit from it when the bubble opens, the side task
the renewals. Times are whole µs: a slot's first word holds `opens_before << 32 | permit`, each of its renewals
`from << 32 | until`.
"""

from collections.abc import Sequence

from ds_hooks.shared.page.layout import PLANNED_SLOTS, RENEWALS_PER_SLOT, Field
from ds_hooks.shared.page.memory_order import light_fence

_LONGEST_US = 2**31 - 1
_PERMIT = 0xFFFFFFFF
"""The part of a slot's word that holds its permit."""


def planned_permit(words: "memoryview[int]", step: int, slot: int) -> tuple[int, int]:
    """Look up a bubble in the plan.

    Args:
        words: of the page.
        step: of the bubble.
        slot: of the bubble.

    Returns:
        (permit, opens before) in ns, as given to `plan_slot`; (0, 0): it stays shut.
    """
    # this order: while the plan changes, the old one, the new one or none is read, never a mixture
    until_step = words[Field.PLAN_UNTIL_STEP]
    light_fence()
    if until_step > step >= words[Field.PLAN_FROM_STEP] and slot < PLANNED_SLOTS:
        light_fence()
        word = words[Field.PERMITS + slot]
        return (word & _PERMIT) * 1000, (word >> 32) * 1000
    return 0, 0


def is_planned(words: "memoryview[int]", step: int) -> bool:
    """Whether any bubble of `step` may be opened."""
    until_step = words[Field.PLAN_UNTIL_STEP]  # first, as in `planned_permit`
    light_fence()
    return words[Field.PLAN_FROM_STEP] <= step < until_step


def next_permit_ns(words: "memoryview[int]", step: int, slot: int) -> int:
    """Look up the permit of the next bubble that the plan opens; 0: there is none.

    Args:
        words: of the page.
        step: of the last bubble that was open.
        slot: of that bubble.
    """
    from_step, until_step = words[Field.PLAN_FROM_STEP], words[Field.PLAN_UNTIL_STEP]
    light_fence()
    later = _first_permit_ns(words, slot + 1) if from_step <= step < until_step else 0
    return later or (_first_permit_ns(words, 0) if max(step + 1, from_step) < until_step else 0)


def _first_permit_ns(words: "memoryview[int]", slot: int) -> int:
    """The permit of the first slot from `slot` on that has one, without those that `opens_before_ns` can keep shut."""
    while slot < PLANNED_SLOTS:
        ahead = words[Field.PERMITS + slot : Field.RENEWALS].tobytes()
        slot += (len(ahead) - len(ahead.lstrip(b"\0"))) // 8
        if slot < PLANNED_SLOTS and words[Field.PERMITS + slot] <= _PERMIT:
            return words[Field.PERMITS + slot] * 1000
        slot += 1
    return 0


def plan_steps(words: "memoryview[int]", from_step: int, until_step: int) -> None:
    """Make the plan hold for the steps from `from_step` until before `until_step`. Only the daemon calls this."""
    words[Field.PLAN_UNTIL_STEP] = min(until_step, words[Field.PLAN_UNTIL_STEP])
    light_fence()
    words[Field.PLAN_FROM_STEP] = from_step
    light_fence()
    words[Field.PLAN_UNTIL_STEP] = until_step


def plan_slot(
    words: "memoryview[int]",
    slot: int,
    permit_ns: int,
    renewals: Sequence[tuple[int, int]] = (),
    opens_before_ns: int = 0,
) -> None:
    """Plan the bubbles of one slot. Only the daemon calls this.

    Args:
        words: of the page.
        slot: its number.
        permit_ns: how long the side task may run from the bubble's start on; 0: not at all.
        renewals: (from, until) in ns after the bubble's start: when it may run again, if the bubble lasts that long.
        opens_before_ns: if not 0, all times count from the end of the bubble before, and a bubble that begins this
            long after that end, or later, stays shut.
    """
    if slot >= PLANNED_SLOTS:
        return
    permit_us, opens_before_us = (min(-(-ns // 1000), _LONGEST_US) for ns in (permit_ns, opens_before_ns))
    # one word each, so that nobody reads half of a pair
    words[Field.PERMITS + slot] = opens_before_us << 32 | permit_us
    first = Field.RENEWALS + RENEWALS_PER_SLOT * slot
    for at in range(RENEWALS_PER_SLOT):
        from_us, until_us = (min(ns // 1000, _LONGEST_US) for ns in renewals[at]) if at < len(renewals) else (0, 0)
        words[first + at] = from_us << 32 | until_us


def clear_plan(words: "memoryview[int]") -> None:
    """Keep every bubble shut from now on. Only the daemon calls this."""
    plan_steps(words, 0, 0)
    for slot in range(PLANNED_SLOTS):
        words[Field.PERMITS + slot] = 0


def find_renewal(words: "memoryview[int]", slot: int, elapsed_ns: int, needs_ns: float) -> tuple[int, int] | None:
    """Find the first renewal of a bubble's permit in which work of length `needs_ns` still fits.

    Args:
        words: of the page.
        slot: of the bubble.
        elapsed_ns: time since `PLAN_BASE_NS`, from which the plan counts.
        needs_ns: how long the work takes.

    Returns:
        (from, until) in ns after `PLAN_BASE_NS`; `from` may lie ahead. None: nothing fits any more.
    """
    if slot >= PLANNED_SLOTS:
        return None
    first = Field.RENEWALS + RENEWALS_PER_SLOT * slot
    for at in range(first, first + RENEWALS_PER_SLOT):
        word = words[at]
        from_ns, until_ns = (word >> 32) * 1000, (word & 0xFFFFFFFF) * 1000
        if max(elapsed_ns, from_ns) + needs_ns <= until_ns:
            return from_ns, until_ns
    return None
