"""Keeps the main job's slowdown within its budget while it runs. Pure: steps in, decisions out.

Blocks of steps are left alone at random (`alone_steps`), and each is compared with the squeezed steps beside it
(`slowdown`). A sequential test (`evidence`) decides by these comparisons: the gate is shut when the slowdown is surely
above the budget. No rhythm, drift or slow phase of job and machine can pass for a slowdown, because they do not know
the draw.

Three times are tested this way: the steps; the *gaps* between them, such as loading, in proportion to a step; and *long
gaps*, such as evaluations and checkpoints, which are compared with each other. A side task's overruns are exact
evidence, and need no test (`margins`).

The gate stays shut for a number of steps, twice as many each time. Then squeezing is tried again, and judged anew.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from squeezer.policy.evidence import Evidence, Finding
from squeezer.policy.margins import RECENT_STEPS, Change, Margins

LONGEST_DOUBLINGS = 5
LONG_GAP_TIMES = 5.0
"""A gap of this many usual ones, and of half a step at least, is long."""
LEAST_USUAL = 4
"""Fewer gaps than this do not show what is usual."""
UNKNOWN_HALVINGS = 1
"""So often the draw may be halved while little is known of long gaps that take a notable part of the time. They are
few: were one in 80 alone, hardly any job would ever have two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the guard decided, and why.

    Attributes:
        step: the main job's step that had just ended.
        what: `shut`, `retry` (the gate may open again), `widen` or `narrow` (a slot's margin).
        cause: `steps`, `gaps`, `long_gaps` or `overrun`; of a retry, that for which the gate was shut; else `""`.
        figures: the numbers behind it, named with units.
    """

    step: int
    what: str
    cause: str
    figures: dict[str, Any] = field(default_factory=dict)


class Guard:
    """The guard of one device.

    Args:
        budget: the slowdown that is allowed, such as 0.01; infinite switches the guard off.
        retry_steps: for how many steps the gate stays shut after the budget was first broken.
        margin_ns: permits end at least this long before a bubble's forecast end.
    """

    def __init__(self, budget: float, retry_steps: int, margin_ns: int) -> None:
        self._budget = budget
        self._retry_steps = retry_steps
        self._margins = Margins(budget, margin_ns)
        self.forget()

    def forget(self) -> None:
        """Another job begins: learn everything anew."""
        self._margins.forget()
        self._steps, self._gaps, self._long_gaps = (Evidence(self._budget) for _ in range(3))
        self._durations_ns: deque[int] = deque(maxlen=RECENT_STEPS)
        self._usual_gaps_ns: deque[int] = deque(maxlen=RECENT_STEPS)
        self._long_gap = self._long_ns = self._all_ns = 0
        self._shut_steps = 0  # how many are left
        self._doublings = 0
        self._good_steps = 0
        self._cause = ""

    @property
    def allows(self) -> bool:
        """Whether the gate may open."""
        return not self._shut_steps

    @property
    def wants_more(self) -> bool:
        """Whether the draw should be dense: little is known, or something is suspicious."""
        if math.isinf(self._budget):
            return False
        return self._steps.is_learning or any(each.is_suspicious for each in self._evidence)

    @property
    def halvings(self) -> int:
        """How often the draw may be halved: the more, the more closely the slowdown is known, also of long gaps.

        Of these it does not matter while they take so little time that they could be twice as long within the budget.
        """
        halvings = self._steps.halvings
        if self._long_ns > self._budget * self._all_ns:
            halvings = min(halvings, max(UNKNOWN_HALVINGS, self._long_gaps.halvings))
        return 0 if self.wants_more else halvings

    @property
    def _evidence(self) -> tuple[Evidence, ...]:
        return self._steps, self._gaps, self._long_gaps

    def margin_ns(self, slot: int) -> int:
        """How long before the forecast end of a bubble of `slot` its permit must end."""
        return self._margins.margin_ns(slot)

    def overran(self, step: int, slot: int, overrun_ns: int) -> list[Decision]:
        """An opened bubble of `slot` has ended, and the side task used `overrun_ns` of CPU time after it."""
        return self._decided(step, self._margins.overran(slot, overrun_ns), overrun_ns)

    def kept_shut(self, step: int, slot: int) -> list[Decision]:
        """Nothing fitted into a bubble of `slot`, such as because its margin is too wide."""
        return self._decided(step, self._margins.kept_shut(slot), 0)

    def side_became_ready(self) -> None:
        """Forget how far it ran on while it started: it did not ask the gate."""
        self._margins.forget()

    def _decided(self, step: int, change: Change | None, overrun_ns: int) -> list[Decision]:
        if change is None:
            return []
        figures = {
            "slot": change.slot,
            "margin_ms": change.margin_ns / 1e6,
            "overrun_ms": overrun_ns / 1e6,
            "mean_overrun_ms": change.mean_overrun_ns / 1e6,
        }
        what, cause = ("widen", "overrun") if change.wider else ("narrow", "")
        return [Decision(step=step, what=what, cause=cause, figures=figures)]

    def step_ended(self, step: int, duration_ns: int, squeezed: bool | None) -> list[Decision]:
        """A step of the main job has ended.

        Args:
            step: its number.
            duration_ns: how long it took.
            squeezed: True; False if the draw left it alone; None if it was neither.
        """
        overrun_share = self._margins.step_ended(duration_ns, squeezed)
        if math.isinf(self._budget):
            return []
        self._durations_ns.append(duration_ns)
        self._all_ns += duration_ns
        if not self.allows:
            return self._wait(step)
        if overrun_share is not None:
            return self._shut(step, "overrun", {"overrun_share": overrun_share})
        if squeezed:
            self._good_steps += 1
            if self._good_steps > self._retry_steps << self._doublings:
                self._good_steps = 0
                self._doublings = max(0, self._doublings - 1)
        return self._judge(step, "steps", self._steps.add(step, duration_ns, squeezed))

    def next_began(self, step: int, gap_ns: int, squeezed: bool | None) -> list[Decision]:
        """The step after `step` has begun, `gap_ns` after that one's end; `squeezed`: as for `step_ended`."""
        if math.isinf(self._budget) or not self.allows or not self._durations_ns:
            return []
        step_ns, usual_gap_ns = median(self._durations_ns), median(self._usual_gaps_ns) if self._usual_gaps_ns else 0
        if len(self._usual_gaps_ns) >= LEAST_USUAL and gap_ns > max(LONG_GAP_TIMES * usual_gap_ns, step_ns / 2):
            self._long_gap += 1
            self._long_ns += gap_ns
            self._all_ns += gap_ns
            found = self._judge(step, "long_gaps", self._long_gaps.add(self._long_gap, gap_ns, squeezed))
            gap_ns = round(usual_gap_ns)  # for the other test, as if there had been none
            if found:
                return found
        else:
            self._usual_gaps_ns.append(gap_ns)
        return self._judge(step, "gaps", self._gaps.add(step, step_ns + gap_ns, squeezed))

    def _judge(self, step: int, cause: str, found: Finding | None) -> list[Decision]:
        if found is None:
            return []
        figures = {"slowdown": math.expm1(found.mean), "at_least": math.expm1(found.low), "pairs": found.pairs}
        return self._shut(step, cause, figures)

    def _shut(self, step: int, cause: str, figures: Mapping[str, Any]) -> list[Decision]:
        self._shut_steps = steps = self._retry_steps << self._doublings
        self._doublings = min(self._doublings + 1, LONGEST_DOUBLINGS)
        self._good_steps = 0
        self._cause = cause
        self._margins.forget_steps()
        for each in self._evidence:
            each.begin_anew()
        return [Decision(step=step, what="shut", cause=cause, figures={**figures, "for_steps": steps})]

    def _wait(self, step: int) -> list[Decision]:
        self._shut_steps -= 1
        return [Decision(step=step, what="retry", cause=self._cause)] if self.allows else []
