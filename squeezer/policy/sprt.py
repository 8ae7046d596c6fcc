"""Decides whether squeezing makes steps longer, or the machine is slow on its own: a sequential test over windows.

Machines have slow phases of a few steps, and a single comparison may fall into one. So each squeezed window is compared
with the alone windows on both sides, and the evidence adds up. Evidence is the logarithm of a ratio of likelihoods:
squeezing is as slow as suspected, against squeezing keeps the budget.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

SQUEEZED_STEPS, ALONE_STEPS = 3, 4
"""The length of a short window. Its first step still shows the effects of the one before, and does not count."""
LARGE = 0.1
"""A slowdown that shows in a single step; a second one would double the cost."""
MOST_ROUNDS = 6
SURE = 4.0
"""Evidence that settles the question: one answer is 55 times as likely as the other."""
SUSPICIOUS = 2.0
"""Evidence that starts short windows, which cost little: 7 times as likely. Noise never reached it in 20 recorded
runs."""
LIKELY = 1.0
"""Evidence that suffices after the last window. It suffices after any window if squeezing was too slow before, because
then each further try is likely to cost."""
BEGAN = 2.0
"""Evidence since the sum was lowest: the slowdown may have begun only then."""
MOST_CLEARING = 2.5
"""The most evidence that one window gives for squeezing, so clearing it takes two. One may suffice against it, because
each step costs."""
LEAST_DEVIATION = 0.02
"""As a share of a step: machines drift by this much on their own."""
LEAST_SUSPECTED = 0.02
"""A smaller slowdown does not show in a few windows."""
SUSPECTED = 0.05
"""The slowdown looked for in ordinary windows."""
LEAST_WINDOWS, MOST_WINDOWS = 8, 64
SURE_ERRORS = 3.0
"""In standard errors: further above the budget than chance explains."""
MEDIAN_VARIANCE = 1.57
"""Of the median of many samples, relative to their mean's."""
DEVIATIONS = 8
"""How many windows estimate the noise of steps."""


@dataclass(frozen=True, slots=True)
class WindowEvidence:
    """What one squeezed window shows.

    Attributes:
        log: the logarithm of its steps' length relative to the steps beside it.
        evidence: above 0 against squeezing, below 0 for it.
    """

    log: float
    evidence: float


class LikelihoodRatio:
    """Compares a squeezed window with the windows beside it.

    Args:
        slowdown: the one suspected, such as 0.1.
        budget: the slowdown that is allowed.
    """

    def __init__(self, slowdown: float, budget: float) -> None:
        self._none = math.log1p(budget)
        self._suspected = math.log1p(max(slowdown, budget + LEAST_SUSPECTED))
        self._variances: deque[float] = deque(maxlen=DEVIATIONS)

    def evidence_of(
        self, squeezed_ns: Sequence[float], before_ns: Sequence[float], after_ns: Sequence[float]
    ) -> WindowEvidence:
        """The evidence in one squeezed window, given the alone steps before and after it."""
        # medians, so that one outlier, such as a peer's stall, does not decide
        squeezed, before, after = (math.log(median(each)) for each in (squeezed_ns, before_ns, after_ns))
        self._variances += [relative_variance(each) for each in (before_ns, after_ns) if len(each) > 1]
        variance = fmean(self._variances) if self._variances else 0.0
        variance *= MEDIAN_VARIANCE * (1 / len(squeezed_ns) + 1 / (len(before_ns) + len(after_ns)))
        # the machine's speed changed in between, at an unknown time
        variance = max(variance, LEAST_DEVIATION**2) + ((after - before) / 2) ** 2
        log = squeezed - (before + after) / 2
        middle, width = (self._suspected + self._none) / 2, self._suspected - self._none
        return WindowEvidence(log, max(-MOST_CLEARING, min(width * (log - middle) / variance, SURE)))


class Sprt:
    """A sequential test in short windows (Wald 1945, Annals of Mathematical Statistics 16).

    Args:
        slowdown: the one suspected.
        budget: the slowdown that is allowed.
        alone_ns: how long the latest alone steps took.
        again: whether squeezing was found too slow before.

    Attributes:
        alone_ns: how long the latest alone steps took.
        wants_squeezed: whether the next step should be squeezed.
    """

    def __init__(self, slowdown: float, budget: float, alone_ns: Sequence[float], *, again: bool = False) -> None:
        self._ratio = LikelihoodRatio(slowdown, budget)
        self._again = again
        self._squeezed_steps = SQUEEZED_STEPS - (slowdown >= LARGE)
        self._before_ns = list(alone_ns[1 - ALONE_STEPS :])
        self._after_ns: list[float] = []
        self._squeezed_ns: list[float] = []
        self._label = False
        self._evidence = self._least_evidence = 0.0
        self._logs: list[float] = []
        self.alone_ns: list[float] = self._before_ns
        self.wants_squeezed = True

    @property
    def figures(self) -> dict[str, Any]:
        """The mean slowdown of the windows so far, and their number."""
        return {"slowdown": math.expm1(fmean(self._logs)) if self._logs else 0.0, "windows": len(self._logs)}

    def step_ended(self, duration_ns: float, *, squeezed: bool) -> bool | None:
        """Take a step that has ended. Returns whether squeezing is to blame; None: not settled yet."""
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
        is_to_blame = None if self.wants_squeezed else self._judge_window()
        self.alone_ns = self._before_ns + self._after_ns
        self._before_ns, self._after_ns = self._after_ns, []
        return is_to_blame

    def _judge_window(self) -> bool | None:
        window = self._ratio.evidence_of(self._squeezed_ns, self._before_ns, self._after_ns)
        self._evidence += window.evidence
        self._least_evidence = min(self._least_evidence, self._evidence)
        self._logs.append(window.log)
        self._squeezed_ns = []
        self.wants_squeezed = True
        if self._again and self._evidence > LIKELY:
            return True
        if abs(self._evidence) < SURE and len(self._logs) < MOST_ROUNDS:
            return None
        return self._evidence > LIKELY or self._evidence - self._least_evidence > BEGAN


class WindowPairs:
    """Watches a job's ordinary windows by a cumulative sum of evidence (see `cusum`), and by a mean over many windows.

    Args:
        budget: the slowdown that is allowed.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self.forget()

    def forget(self) -> None:
        """Start anew: past windows say nothing about the next ones."""
        self._ratio = LikelihoodRatio(SUSPECTED, self._budget)
        self._evidence = 0.0
        self._logs: deque[float] = deque(maxlen=MOST_WINDOWS)
        self.divide()

    def divide(self) -> None:
        """The next window has no neighbours among those before it."""
        self._steps_ns: list[float] = []
        self._before_ns: list[float] = []
        self._squeezed_ns: list[float] = []

    def add(self, duration_ns: float) -> None:
        """Add a step to the current window."""
        self._steps_ns.append(duration_ns)

    def end(self, *, squeezed: bool) -> tuple[str, dict[str, Any]] | None:
        """End a window, squeezed or alone.

        Returns:
            "suspect" if a few windows speak against squeezing, "sure" if many do, with the figures; else None.
        """
        steps_ns, self._steps_ns = self._steps_ns, []
        if squeezed:
            self._squeezed_ns = steps_ns
            return None
        before_ns, self._before_ns = self._before_ns, steps_ns
        if not (before_ns and steps_ns and self._squeezed_ns) or not math.isfinite(self._budget):
            return None
        window = self._ratio.evidence_of(self._squeezed_ns, before_ns, steps_ns)
        self._logs.append(math.log(fmean(self._squeezed_ns) * 2 / (fmean(before_ns) + fmean(steps_ns))))
        self._evidence = max(0.0, self._evidence + window.evidence)
        figures = {"slowdown": math.expm1(fmean(self._logs)), "windows": len(self._logs)}
        if len(self._logs) >= LEAST_WINDOWS:
            mean = fmean(self._logs)
            spread = math.sqrt(fmean((each - mean) ** 2 for each in self._logs) / (len(self._logs) - 1))
            if mean - SURE_ERRORS * spread > math.log1p(self._budget):
                return "sure", figures
        if self._evidence >= SUSPICIOUS:
            self._evidence = 0.0
            return "suspect", {"slowdown": math.expm1(window.log), "windows": 1}
        return None


def relative_variance(sample: Sequence[float]) -> float:
    """The variance divided by the squared mean. In floats, because `statistics` is exact and takes 50 times as long."""
    mean = fmean(sample)
    return sum([(each / mean - 1) ** 2 for each in sample]) / (len(sample) - 1)
