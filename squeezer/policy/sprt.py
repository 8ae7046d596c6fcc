"""Is squeezing what makes steps longer, or is the machine slow by itself? Windows of both, in turn.

A machine has bursts of some steps in which all is slower, and one comparison may fall into one. So each squeezed window
is compared with the alone windows on both sides of it, and its evidence is added up: the logarithm of the ratio of two
likelihoods, that squeezing is as slow as suspected, and that it keeps the budget.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

SQUEEZED_STEPS, ALONE_STEPS = 3, 4
"""Of a short window; its first step still carries what went before, and counts for nothing."""
LARGE = 0.1
"""A slowdown by so much shows in one step, and two would cost twice as much."""
MOST_ROUNDS = 6
SURE = 4.0
"""Of evidence: one is 55 times as likely as the other."""
SUSPICIOUS = 2.0
"""7 times as likely: enough for a comparison, which costs little. Noise alone did so in none of 20 recorded runs."""
LIKELY = 1.0
"""And of what is not sure after the last window, so much speaks against squeezing; after any, if it was found guilty
before: as it then costs much, it is not tried for long."""
BEGAN = 2.0
"""Or so much since it spoke most for squeezing: what burdens the steps may have begun meanwhile."""
MOST_ACQUITTING = 2.5
"""What one window may say for squeezing, so that two are needed; against it one may do, as every step costs."""
LEAST_DEVIATION = 0.02
"""As a share of a step: so much a machine drifts by itself for some steps."""
LEAST_SUSPECTED = 0.02
"""A slowdown by less is not told from none by a few windows."""
SUSPECTED = 0.05
"""What ordinary windows are searched for."""
LEAST_WINDOWS, MOST_WINDOWS = 8, 64
SURE_ERRORS = 3.0
"""In standard errors: above the budget by so much is no chance."""
MEDIAN_VARIANCE = 1.57
"""Of the median of many; the mean's is 1."""
DEVIATIONS = 8
"""Windows by which the noise of steps is known."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """What a squeezed window says: `log`, of its steps' length to those beside it, and the evidence in that."""

    log: float
    evidence: float


class Scales:
    """Weighs squeezed windows.

    Args:
        slowdown: that squeezing is suspected of, such as 0.1.
        budget: the slowdown that is allowed.
    """

    def __init__(self, slowdown: float, budget: float) -> None:
        self._none = math.log1p(budget)
        self._suspected = math.log1p(max(slowdown, budget + LEAST_SUSPECTED))
        self._variances: deque[float] = deque(maxlen=DEVIATIONS)

    def weigh(self, squeezed_ns: Sequence[float], before_ns: Sequence[float], after_ns: Sequence[float]) -> Weighed:
        """A squeezed window, and the steps alone before and after it."""
        # one that strays, such as by a peer's stall, says nothing of the others
        squeezed, before, after = (math.log(median(each)) for each in (squeezed_ns, before_ns, after_ns))
        self._variances += [relative_variance(each) for each in (before_ns, after_ns) if len(each) > 1]
        variance = fmean(self._variances) if self._variances else 0.0
        variance *= MEDIAN_VARIANCE * (1 / len(squeezed_ns) + 1 / (len(before_ns) + len(after_ns)))
        # the machine's speed changed meanwhile, and nobody knows when
        variance = max(variance, LEAST_DEVIATION**2) + ((after - before) / 2) ** 2
        log = squeezed - (before + after) / 2
        middle, width = (self._suspected + self._none) / 2, self._suspected - self._none
        return Weighed(log, max(-MOST_ACQUITTING, min(width * (log - middle) / variance, SURE)))


class Sprt:
    """In short windows, until it is sure: a sequential test (Wald 1945, Annals of Mathematical Statistics 16).

    Args:
        slowdown: that squeezing is suspected of.
        budget: the slowdown that is allowed.
        alone_ns: the steps just left alone.
        again: whether it was found guilty before.
    """

    def __init__(self, slowdown: float, budget: float, alone_ns: Sequence[float], *, again: bool = False) -> None:
        self._scales = Scales(slowdown, budget)
        self._again = again
        self._squeezed_steps = SQUEEZED_STEPS - (slowdown >= LARGE)
        self._before_ns = list(alone_ns[1 - ALONE_STEPS :])
        self._after_ns: list[float] = []
        self._squeezed_ns: list[float] = []
        self._label = False
        self._evidence = self._least_evidence = 0.0
        self._logs: list[float] = []
        self.alone_ns: list[float] = self._before_ns
        """The latest steps alone."""
        self.wants_squeezed = True
        """Whether the next step should be squeezed."""

    @property
    def figures(self) -> dict[str, Any]:
        """The slowdown in the mean of the windows so far, and how many they are."""
        return {"slowdown": math.expm1(fmean(self._logs)) if self._logs else 0.0, "windows": len(self._logs)}

    def step_ended(self, duration_ns: float, *, squeezed: bool) -> bool | None:
        """A step has ended. Returns whether it is the squeezing, or None as long as that is not known."""
        carries_over, self._label = squeezed is not self._label, squeezed
        if carries_over:
            return None
        if squeezed:
            self._squeezed_ns.append(duration_ns)
            self.wants_squeezed = len(self._squeezed_ns) < self._squeezed_steps - 1
            return None
        self._after_ns.append(duration_ns)
        if len(self._after_ns) < ALONE_STEPS - 1:
            return None
        guilty = None if self.wants_squeezed else self._weigh()
        self.alone_ns = self._before_ns + self._after_ns
        self._before_ns, self._after_ns = self._after_ns, []
        return guilty

    def _weigh(self) -> bool | None:
        weighed = self._scales.weigh(self._squeezed_ns, self._before_ns, self._after_ns)
        self._evidence += weighed.evidence
        self._least_evidence = min(self._least_evidence, self._evidence)
        self._logs.append(weighed.log)
        self._squeezed_ns = []
        self.wants_squeezed = True
        if self._again and self._evidence > LIKELY:
            return True
        if abs(self._evidence) < SURE and len(self._logs) < MOST_ROUNDS:
            return None
        return self._evidence > LIKELY or self._evidence - self._least_evidence > BEGAN


class WindowPairs:
    """Follows the ordinary windows of a job: a cumulative sum of evidence, and the mean of many (see `cusum`)."""

    def __init__(self, budget: float) -> None:
        """A slowdown of `budget` is allowed."""
        self._budget = budget
        self.forget()

    def forget(self) -> None:
        """What came before tells nothing about what comes."""
        self._scales = Scales(SUSPECTED, self._budget)
        self._evidence = 0.0
        self._logs: deque[float] = deque(maxlen=MOST_WINDOWS)
        self.divide()

    def divide(self) -> None:
        """What comes next is not beside what came before."""
        self._steps_ns: list[float] = []
        self._before_ns: list[float] = []
        self._squeezed_ns: list[float] = []

    def add(self, duration_ns: float) -> None:
        """A step of the window that there is."""
        self._steps_ns.append(duration_ns)

    def end(self, *, squeezed: bool) -> tuple[str, dict[str, Any]] | None:
        """A window has ended, squeezed or alone.

        Returns:
            Whether that is "suspect", by some windows, or "sure", by many, and the figures; else None.
        """
        steps_ns, self._steps_ns = self._steps_ns, []
        if squeezed:
            self._squeezed_ns = steps_ns
            return None
        before_ns, self._before_ns = self._before_ns, steps_ns
        if not (before_ns and steps_ns and self._squeezed_ns) or not math.isfinite(self._budget):
            return None
        weighed = self._scales.weigh(self._squeezed_ns, before_ns, steps_ns)
        self._logs.append(math.log(fmean(self._squeezed_ns) * 2 / (fmean(before_ns) + fmean(steps_ns))))
        self._evidence = max(0.0, self._evidence + weighed.evidence)
        figures = {"slowdown": math.expm1(fmean(self._logs)), "windows": len(self._logs)}
        if len(self._logs) >= LEAST_WINDOWS:
            mean = fmean(self._logs)
            spread = math.sqrt(fmean((each - mean) ** 2 for each in self._logs) / (len(self._logs) - 1))
            if mean - SURE_ERRORS * spread > math.log1p(self._budget):
                return "sure", figures
        if self._evidence >= SUSPICIOUS:
            self._evidence = 0.0
            return "suspect", {"slowdown": math.expm1(weighed.log), "windows": 1}
        return None


def relative_variance(sample: Sequence[float]) -> float:
    """The variance, as a share of the mean's square. Of floats: that of `statistics` is exact, and takes 50 times."""
    mean = fmean(sample)
    return sum([(each / mean - 1) ** 2 for each in sample]) / (len(sample) - 1)
