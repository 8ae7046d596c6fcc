"""Keeps the main job's slowdown within its budget while it runs. Pure: steps in, decisions out.

Five tests watch for a broken budget:

- *overrun*: the side task's own CPU time outside bubbles. It is exact, and nothing else causes it.
- *mean*: the last squeezed steps against the alone steps before them.
- *cusum*: a few squeezed steps in a row that are much longer.
- *tail*: squeezed steps that are longer than nearly every alone step.
- *windows*: each squeezed window against the alone windows on both sides. It is slow, but finds a small slowdown.

The main job or the machine can cause *mean* and *cusum* too, so a check comes first: a few steps are left alone. If
these are just as slow, squeezing may not be the cause. Then short windows decide, squeezed and alone in turn.

A broken budget shuts the gate for a number of steps, twice as many each time. Then squeezing is tried again.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import fmean, quantiles
from typing import Any

from squeezer.policy.cusum import Cusum
from squeezer.policy.sprt import Sprt, WindowPairs, relative_variance

RECENT_STEPS = 50
"""The budget must hold over this many steps."""
WARM_UP_STEPS = 2
"""The first steps of a job do not count."""
LEAST_STEPS = 4
"""Fewer steps than this prove nothing."""
CHECK_STEPS = 6
"""A check leaves this many steps alone. The first still shows the effects of the one before."""
TAIL_STEPS = 100
TAIL_QUANTILE = 0.95
TAIL_MOST = 0.2
"""At most this share of squeezed steps may be longer than 95% of the alone steps. Chance does not reach it."""
SURE = 3.0
"""In standard errors: further above the budget than chance explains."""
LONGEST_DOUBLINGS = 5
MOST_OVERRUN_NS = 1_000_000
"""A larger overrun widens its slot's margin at once."""
OVERRUN_MEMORY = 16
"""A slot's mean overrun is taken over this many bubbles."""
NARROW_AFTER = 64
"""A slot's margin narrows again after this many quiet bubbles."""
MARGIN_DOUBLINGS = 6
LEAST_MARGIN_NS = 100_000


class Breaker(Enum):
    """Whether the guard lets the gate open."""

    CLOSED = "squeezing"
    CHECKING = "a few steps are left alone: are they as slow?"
    COMPARING = "they were as slow: short windows, squeezed and alone in turn, decide"
    OPEN = "the budget was broken: no squeezing for a while"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the guard decided, and why.

    Attributes:
        step: the main job's step that had just ended.
        what: `check`, `compare`, `shut`, `go_on` (after any of these), `widen` or `narrow` (a slot's margin).
        cause: `overrun`, `mean`, `cusum`, `shorter` (a check: the baseline is stale), `tail`, `windows`, or `""`.
        figures: the numbers behind it, named with units.
    """

    step: int
    what: str
    cause: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Margin:
    doublings: int = 0
    quiet: int = 0
    mean_overrun_ns: float = 0.0


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
        self._margin_ns = margin_ns
        self._cusum = Cusum(budget)
        self.forget()

    def forget(self) -> None:
        """Another job begins: learn everything anew."""
        self.breaker = Breaker.CLOSED
        self._shut_until = 0
        self._doublings = 0
        self._good_steps = 0
        self._cause = ""
        self._steps = 0
        self._label: bool | None = None
        self._alone_ns: deque[float] = deque(maxlen=3 * LEAST_STEPS)
        self._baseline_ns = 0.0
        self._alone_ratios: deque[float] = deque(maxlen=2 * TAIL_STEPS)
        self._squeezed_ratios: deque[float] = deque(maxlen=TAIL_STEPS)
        self._squeezed_ns: deque[float] = deque(maxlen=RECENT_STEPS)
        self._overruns_ns: deque[int] = deque(maxlen=RECENT_STEPS)
        self._durations_ns: deque[float] = deque(maxlen=RECENT_STEPS)
        self._checked_ns: list[float] = []
        self._suspect_ns: list[float] = []
        self._suspected = 0.0
        self._sprt: Sprt | None = None
        self._windows = WindowPairs(self._budget)
        self._step_overrun_ns = 0
        self._margins: dict[int, _Margin] = {}
        self._mean_overruns_ns = 0.0  # of all slots
        self._cusum.forget()

    @property
    def allows(self) -> bool:
        """Whether the gate may open."""
        compares = self._sprt is not None and self._sprt.wants_squeezed
        return self.breaker is Breaker.CLOSED or (self.breaker is Breaker.COMPARING and compares)

    def margin_ns(self, slot: int) -> int:
        """How long before the forecast end of a bubble of `slot` its permit must end."""
        margin = self._margins.get(slot)
        if margin is None or not margin.doublings:
            return self._margin_ns
        return max(self._margin_ns, LEAST_MARGIN_NS) << margin.doublings

    def overran(self, step: int, slot: int, overrun_ns: int) -> list[Decision]:
        """An opened bubble of `slot` has ended, and the side task used `overrun_ns` of CPU time after it."""
        self._step_overrun_ns += overrun_ns
        margin = self._margins.setdefault(slot, _Margin())
        before_ns = self.margin_ns(slot)
        change_ns = (overrun_ns - margin.mean_overrun_ns) / OVERRUN_MEMORY
        margin.mean_overrun_ns += change_ns
        self._mean_overruns_ns += change_ns
        mean_ns = margin.mean_overrun_ns
        if overrun_ns > MOST_OVERRUN_NS or (overrun_ns and self._overruns_most(margin)):
            self._mean_overruns_ns -= mean_ns
            margin.quiet, margin.mean_overrun_ns = 0, 0.0
            margin.doublings = min(margin.doublings + 1, MARGIN_DOUBLINGS)
            what = "widen"
        else:
            margin.quiet += 1
            if margin.quiet < NARROW_AFTER or not margin.doublings:
                return []
            margin.quiet = 0
            margin.doublings -= 1
            what = "narrow"
        after_ns = self.margin_ns(slot)
        if after_ns == before_ns:
            return []
        figures = {
            "slot": slot,
            "margin_ms": after_ns / 1e6,
            "overrun_ms": overrun_ns / 1e6,
            "mean_overrun_ms": mean_ns / 1e6,
        }
        return [Decision(step=step, what=what, cause="overrun" if what == "widen" else "", figures=figures)]

    def step_ended(self, step: int, duration_ns: int, squeezed: bool | None) -> list[Decision]:
        """A step of the main job has ended.

        Args:
            step: its number.
            duration_ns: how long it took.
            squeezed: True; False if it was left alone; None if it was neither, or left alone by the guard itself.
        """
        overrun_ns, self._step_overrun_ns = self._step_overrun_ns, 0
        self._steps += 1
        carries_over, self._label = squeezed is not self._label, squeezed
        if squeezed:
            self._durations_ns.append(duration_ns)
            self._overruns_ns.append(overrun_ns)
        if self.breaker is Breaker.CHECKING:
            return self._check(step, duration_ns)
        if self.breaker is Breaker.COMPARING:
            return self._compare(step, duration_ns, squeezed=bool(squeezed))
        if self.breaker is Breaker.OPEN:
            return self._wait(step, duration_ns)
        if squeezed is None:
            self._windows.divide()
        if self._steps <= WARM_UP_STEPS or squeezed is None:
            return []
        if carries_over:
            return self._end_window(step, ended_alone=squeezed)
        self._windows.add(duration_ns)
        if not squeezed:
            self._left_alone(duration_ns)
            return []
        self._squeezed_ns.append(duration_ns)
        if self._baseline_ns:
            self._squeezed_ratios.append(duration_ns / self._baseline_ns)
        return self._judge(step)

    def _left_alone(self, duration_ns: float) -> None:
        if self._baseline_ns:
            self._alone_ratios.append(duration_ns / self._baseline_ns)
        self._alone_ns.append(duration_ns)
        if len(self._alone_ns) >= LEAST_STEPS:
            self._baseline_ns = fmean(self._alone_ns)

    def _judge(self, step: int) -> list[Decision]:
        self._good_steps += 1
        if self._good_steps > self._retry_steps << self._doublings:
            self._good_steps = 0
            self._doublings = max(0, self._doublings - 1)
        overruns = self._overrun_figures()
        if overruns is not None:
            return self.shut(step, "overrun", overruns)
        excess = excess_over(self._squeezed_ns, self._alone_ns, self._budget)
        if len(self._squeezed_ns) >= LEAST_STEPS and excess is not None and excess > SURE:
            return [self._begin_check(step, "mean", list(self._squeezed_ns)[-2 * CHECK_STEPS :])]
        if len(self._alone_ns) >= LEAST_STEPS and math.isfinite(self._budget):
            found = self._cusum.squeezed(self._squeezed_ns[-1], self._alone_ns)
            if found:
                cause = "cusum" if found == "longer" else "shorter"
                return [self._begin_check(step, cause, list(self._squeezed_ns)[-max(2, self._cusum.run) :])]
        beyond = self._share_beyond()
        if beyond is not None and beyond > TAIL_MOST:
            return self.shut(step, "tail", {"share_beyond_p95": beyond})
        return []

    def _overrun_figures(self) -> dict[str, Any] | None:
        """The figures of the last squeezed steps, if they overran their bubbles by more than the budget."""
        if len(self._durations_ns) < LEAST_STEPS:
            return None
        share = sum(self._overruns_ns) / sum(self._durations_ns)
        return {"overrun_share": share, "steps": len(self._durations_ns)} if share > self._budget else None

    def _end_window(self, step: int, *, ended_alone: bool) -> list[Decision]:
        match self._windows.end(squeezed=not ended_alone):
            case "sure", figures:
                return self.shut(step, "windows", figures)
            case "suspect", figures:
                self._suspected = figures["slowdown"]
                return [self._begin_comparison(step, "windows", self._alone_ns, figures)]
        return []

    def _share_beyond(self) -> float | None:
        """The share of squeezed steps that are longer than 95% of the alone steps, by more than the budget."""
        if len(self._squeezed_ratios) < TAIL_STEPS // 2 or len(self._alone_ratios) < TAIL_STEPS // 2:
            return None
        bound = quantiles(self._alone_ratios, n=100)[round(100 * TAIL_QUANTILE) - 1] * (1 + self._budget)
        return sum(ratio > bound for ratio in self._squeezed_ratios) / len(self._squeezed_ratios)

    def _begin_check(self, step: int, cause: str, suspect_ns: list[float]) -> Decision:
        self.breaker = Breaker.CHECKING
        self._cause = cause
        self._checked_ns = []
        self._suspect_ns = suspect_ns
        self._suspected = _slowdown(suspect_ns, self._alone_ns)
        return Decision(step=step, what="check", cause=cause, figures={"slowdown": self._suspected})

    def _check(self, step: int, duration_ns: float) -> list[Decision]:
        self._checked_ns.append(duration_ns)
        if len(self._checked_ns) < CHECK_STEPS:
            return []
        alone_ns = self._checked_ns[1:]
        excess = excess_over(self._suspect_ns, alone_ns, self._budget)
        figures = {"slowdown": _slowdown(self._suspect_ns, alone_ns)}
        # a mean over many steps has shown already that they are slow; the question is why
        if excess is not None and excess > (1.0 if self._cause == "mean" else SURE):
            return self.shut(step, self._cause, figures)
        if self._cause == "shorter":
            return [self._clear(step, alone_ns, figures)]
        return [self._begin_comparison(step, self._cause, alone_ns, figures)]

    def _begin_comparison(self, step: int, cause: str, alone_ns: Sequence[float], figures: dict[str, Any]) -> Decision:
        self._cause = cause
        self._durations_ns.clear()
        self._overruns_ns.clear()
        again = self.breaker is Breaker.OPEN
        self._sprt = Sprt(self._suspected, self._budget, list(alone_ns), again=again)
        self.breaker = Breaker.COMPARING
        return Decision(step=step, what="compare", cause=cause, figures=figures)

    def _compare(self, step: int, duration_ns: float, *, squeezed: bool) -> list[Decision]:
        overruns = self._overrun_figures()
        if overruns is not None:
            return self.shut(step, "overrun", overruns)
        sprt = self._sprt
        assert sprt is not None
        is_to_blame = sprt.step_ended(duration_ns, squeezed=squeezed)
        if is_to_blame is None:
            return []
        if is_to_blame:
            return self.shut(step, self._cause, sprt.figures)
        return [self._clear(step, sprt.alone_ns, sprt.figures)]

    def _clear(self, step: int, alone_ns: Sequence[float], figures: dict[str, Any]) -> Decision:
        self._go_on()
        for each_ns in alone_ns:
            self._left_alone(each_ns)
        return Decision(step=step, what="go_on", cause=self._cause, figures=figures)

    def shut(self, step: int, cause: str, figures: dict[str, Any]) -> list[Decision]:
        """Shut the gate for a while, for `cause`."""
        steps = self._retry_steps << self._doublings
        self._doublings = min(self._doublings + 1, LONGEST_DOUBLINGS)
        self.breaker = Breaker.OPEN
        self._sprt = None
        self._cause = cause
        self._suspected = figures.get("slowdown", 0.0)
        self._shut_until = step + steps
        self._checked_ns = []
        return [Decision(step=step, what="shut", cause=cause, figures={**figures, "for_steps": steps})]

    def _wait(self, step: int, duration_ns: float) -> list[Decision]:
        self._checked_ns.append(duration_ns)
        if step < self._shut_until or len(self._checked_ns) < CHECK_STEPS:  # messages may have been lost
            return []
        alone_ns = self._checked_ns[1:]
        return [self._begin_comparison(step, self._cause, alone_ns, {"alone_ms": fmean(alone_ns) / 1e6})]

    def _go_on(self) -> None:
        """Squeeze again, and judge by the steps that follow."""
        self.breaker = Breaker.CLOSED
        self._sprt = None
        self._good_steps = 0
        self._baseline_ns = 0.0
        for past in (self._alone_ns, self._squeezed_ns, self._squeezed_ratios, self._alone_ratios):
            past.clear()
        self._overruns_ns.clear()
        self._durations_ns.clear()
        self._cusum.forget()
        self._windows.forget()

    def _overruns_most(self, margin: _Margin) -> bool:
        """Whether a step's bubbles together overrun by more than half the budget, and this slot's the most."""
        if len(self._durations_ns) < LEAST_STEPS:
            return False
        if self._mean_overruns_ns < self._budget / 2 * min(self._durations_ns):
            return False  # runs for every bubble, and nearly always ends here
        means_ns = [each.mean_overrun_ns for each in self._margins.values()]
        allowed_ns = self._budget / 2 * fmean(self._durations_ns)
        return sum(means_ns) > allowed_ns and margin.mean_overrun_ns == max(means_ns)


def excess_over(squeezed_ns: Sequence[float], alone_ns: Sequence[float], budget: float) -> float | None:
    """By how many standard errors the mean squeezed step is longer than the budget allows; None: too few steps.

    Welch's test: each sample has its own variance. Fewer than four squeezed steps borrow that of the alone steps.
    """
    if len(squeezed_ns) < 2 or len(alone_ns) < LEAST_STEPS or not math.isfinite(budget):
        return None
    allowed_ns = fmean(alone_ns) * (1 + budget)
    alone = relative_variance(alone_ns) * allowed_ns**2
    squeezed = relative_variance(squeezed_ns) * fmean(squeezed_ns) ** 2 if len(squeezed_ns) >= LEAST_STEPS else alone
    squared = squeezed / len(squeezed_ns) + alone / len(alone_ns)
    excess_ns = fmean(squeezed_ns) - allowed_ns
    return excess_ns / math.sqrt(squared) if squared else math.copysign(math.inf, excess_ns) if excess_ns else 0.0


def _slowdown(squeezed_ns: Sequence[float], alone_ns: Sequence[float]) -> float:
    return fmean(squeezed_ns) / fmean(alone_ns) - 1
