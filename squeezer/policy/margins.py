"""How long before a bubble's forecast end its permit ends: overruns widen a slot's margin, quiet bubbles narrow it.

Pure, like the guard. An overrun is the side task's own CPU time outside bubbles: exact evidence, which has no other
cause.
"""

from collections import deque
from dataclasses import dataclass
from statistics import fmean

RECENT_STEPS = 50
"""The side task's overruns must keep the budget over this many squeezed steps."""
LEAST_STEPS = 4
"""Fewer steps than this prove nothing."""
MOST_OVERRUN_NS = 1_000_000
"""A larger overrun widens its slot's margin at once."""
OVERRUN_MEMORY = 16
"""A slot's mean overrun is taken over this many bubbles."""
NARROW_AFTER = 64
"""A slot's margin narrows again after this many quiet bubbles, or bubbles into which nothing fits before it."""
MARGIN_DOUBLINGS = 6
LEAST_MARGIN_NS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A slot's margin has become wider or narrower. Times in ns."""

    slot: int
    wider: bool
    margin_ns: int
    overrun_ns: int
    mean_overrun_ns: float


@dataclass(slots=True)
class _Margin:
    doublings: int = 0
    quiet: int = 0
    mean_overrun_ns: float = 0.0


class Margins:
    """The margins of one device's slots, and its overruns.

    Args:
        budget: the share of the squeezed steps' time that overruns may take.
        margin_ns: the least margin.
    """

    def __init__(self, budget: float, margin_ns: int) -> None:
        self._budget = budget
        self._margin_ns = margin_ns
        self.forget()

    def forget(self) -> None:
        """Another job or side task begins to be squeezed."""
        self._margins: dict[int, _Margin] = {}
        self._mean_overruns_ns = 0.0  # of all slots
        self._step_overrun_ns = 0
        self.forget_steps()

    def forget_steps(self) -> None:
        """Judge overruns by the steps that follow."""
        self._overruns_ns: deque[int] = deque(maxlen=RECENT_STEPS)
        self._durations_ns: deque[int] = deque(maxlen=RECENT_STEPS)

    def margin_ns(self, slot: int) -> int:
        """How long before the forecast end of a bubble of `slot` its permit must end."""
        margin = self._margins.get(slot)
        if margin is None or not margin.doublings:
            return self._margin_ns
        return max(self._margin_ns, LEAST_MARGIN_NS) << margin.doublings

    def overran(self, slot: int, overrun_ns: int) -> Change | None:
        """An opened bubble of `slot` has ended, and the side task used `overrun_ns` of CPU time after it."""
        self._step_overrun_ns += overrun_ns
        margin = self._margins.setdefault(slot, _Margin())
        before_ns = self.margin_ns(slot)
        change_ns = (overrun_ns - margin.mean_overrun_ns) / OVERRUN_MEMORY
        margin.mean_overrun_ns += change_ns
        self._mean_overruns_ns += change_ns
        mean_ns = margin.mean_overrun_ns
        wider = overrun_ns > MOST_OVERRUN_NS or (overrun_ns > 0 and self._overruns_most(margin))
        if wider:
            self._mean_overruns_ns -= mean_ns
            margin.quiet, margin.mean_overrun_ns = 0, 0.0
            margin.doublings = min(margin.doublings + 1, MARGIN_DOUBLINGS)
        else:
            margin.quiet += 1
            if margin.quiet < NARROW_AFTER or not margin.doublings:
                return None
            margin.quiet = 0
            margin.doublings -= 1
        after_ns = self.margin_ns(slot)
        if after_ns == before_ns:
            return None
        return Change(slot=slot, wider=wider, margin_ns=after_ns, overrun_ns=overrun_ns, mean_overrun_ns=mean_ns)

    def kept_shut(self, slot: int) -> Change | None:
        """Nothing fitted into a bubble of `slot`. Where its margin is wide, it counts as quiet, or it stayed shut."""
        margin = self._margins.get(slot)
        return self.overran(slot, 0) if margin is not None and margin.doublings else None

    def step_ended(self, duration_ns: int, squeezed: bool | None) -> float | None:
        """A step has ended. Returns the share of overruns in the last squeezed steps, if it breaks the budget."""
        overrun_ns, self._step_overrun_ns = self._step_overrun_ns, 0
        if not squeezed:
            return None
        self._durations_ns.append(duration_ns)
        self._overruns_ns.append(overrun_ns)
        spent_ns = sum(self._durations_ns)
        if len(self._durations_ns) < LEAST_STEPS or spent_ns <= 0:
            return None
        share = sum(self._overruns_ns) / spent_ns
        return share if share > self._budget else None

    def _overruns_most(self, margin: _Margin) -> bool:
        """Whether a step's bubbles together overrun by more than half the budget, and this slot's the most."""
        if len(self._durations_ns) < LEAST_STEPS:
            return False
        if self._mean_overruns_ns < self._budget / 2 * min(self._durations_ns):
            return False  # runs for every bubble, and nearly always ends here
        means_ns = [each.mean_overrun_ns for each in self._margins.values()]
        allowed_ns = self._budget / 2 * fmean(self._durations_ns)
        return sum(means_ns) > allowed_ns and margin.mean_overrun_ns == max(means_ns)
