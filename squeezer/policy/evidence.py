"""The test whether squeezing breaks the budget. It may look after every comparison, since it is sequential.

The latest 2, 4, 8, 16 … comparisons each give a lower bound of the slowdown. For normal differences of unknown
variance, the bound that begins with a given comparison exceeds the true slowdown at any time with a probability of at
most `ERROR_RATE` (a confidence sequence: Howard et al. 2021, Annals of Statistics 49; with the t statistic: Wang and
Ramdas 2025, Sequential Analysis 44). Windows let it forget, so that a slowdown that begins late is found as soon; they
also give up that guarantee for ever. What holds instead is simulated, with the daemon's defaults and a budget of 1%
(`tests/unit/squeezer/policy/test_error_rates.py`, `python -m benchmarks.guard_power`):

- No slowdown: a false alarm in 180,000 steps whose noise of 1%, 3% or 10% is normal or has heavy tails, and two in as
  many that also have bursts, or drift.
- A slowdown of just the budget: an alarm in 180,000 steps of the first sort.
- Where nothing is slowed, alarms and suspicion together take at most 4.7% of the squeezing, mostly suspicion.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from squeezer.policy.rise import Rise
from squeezer.policy.slowdown import LASTING_PAIRS, Pairs, estimate

ERROR_RATE = 0.05
LEAST_PAIRS = 2
MOST_PAIRS = 256
"""Older comparisons are forgotten."""
EXPECTED_SQUARED = 0.5
"""In the mixture over slowdowns: less makes the bound tighter for large ones, more for small ones."""
LEAST_DEVIATION = 0.002
"""Of a comparison: equal steps do not prove that machines are exact."""
FEW_PAIRS = 4
"""A mean must also be further out than this many comparisons would make it, each as far out as the farthest before.
Means of few comparisons are not normal where some comparisons are far out, as with steps of two lengths."""
LEARNING_PAIRS = 8
"""The draw is dense until there are this many, and again after each new beginning."""
SUSPICIOUS = 1.6
"""In standard errors above the budget, over 8 comparisons or more. Only makes the draw dense, so it costs little. With
1.8, a slowdown of 2% at 3% noise cost a tenth more, for the same squeezing without any."""
STARTLING = 3.0
"""In standard deviations above the budget, of the last comparison. Likewise."""
LOOKS = 8
"""After squeezed steps have become longer (`rise`), so many comparisons are wanted soon; fewer if none of them shows
half of that."""
HALVED = {2.0: 2, 1.0: 3}
"""A multiple of the budget -> how often the draw is halved once the slowdown is surely below it. So one of twice the
budget is found as soon as if the draw were never halved. Most jobs' steps vary too much for the second."""


class Finding(NamedTuple):
    """The budget is broken. All as log ratios.

    Attributes:
        low: the slowdown is at least this.
        mean: the estimate.
        pairs: of how many comparisons.
    """

    low: float
    mean: float
    pairs: int


class Evidence:
    """What is known of the slowdown by one kind of time.

    Args:
        budget: the slowdown that is allowed; 0.01 is 1%.

    Attributes:
        is_suspicious: more comparisons are wanted soon.
        halvings: how often the draw may be halved, see `HALVED`. As the test looks after every comparison, so does
            this, with the same rate of errors.
    """

    def __init__(self, budget: float) -> None:
        self._budget = math.log1p(budget)
        self._pairs = Pairs()
        self._log_ratios: deque[float] = deque(maxlen=MOST_PAIRS)
        self._residuals: deque[float] = deque(maxlen=MOST_PAIRS)  # of those before the last beginning
        self._rises = Rise(self._budget)
        self._rise, self._looks = 0.0, 0  # the rise that is looked into, and by how many comparisons so far
        self.is_suspicious, self.halvings = False, 0

    @property
    def is_learning(self) -> bool:
        """Whether little is known yet."""
        return len(self._log_ratios) < LEARNING_PAIRS

    def begin_anew(self) -> None:
        """Judge by what follows. How much comparisons vary stays known."""
        if self._log_ratios:
            mean, _ = estimate(self._log_ratios)
            self._residuals.extend([each - mean for each in self._log_ratios])
        self._log_ratios.clear()
        self._pairs.divide()
        self._rises.begin_anew()
        self._rise = 0.0
        self.is_suspicious, self.halvings = False, 0

    def add(self, step: int, length: float, squeezed: bool | None) -> Finding | None:
        """Take one more time; returns what is found if the budget is broken. Arguments: see `Pairs.add`."""
        if squeezed and 0 < length < math.inf and (rise := self._rises.add(math.log(length))):
            self._rise, self._looks, self.is_suspicious = rise, 0, True
        pair = self._pairs.add(step, length, squeezed)
        if pair is None:
            return None
        self._log_ratios.append(pair.log_ratio)
        return self._judge()

    def _judge(self) -> Finding | None:
        values = list(self._log_ratios)
        _, deviation = estimate(values)
        known, past = len(values), len(self._residuals)
        degrees = known - 1 + max(0, past - 1)
        if known < LEAST_PAIRS:
            return None
        squared = deviation**2 * (known - 1) + sum([each**2 for each in self._residuals])
        deviation = max(math.sqrt(squared / degrees), LEAST_DEVIATION)
        self._look_into_rise(values)
        self.is_suspicious = self._rise > 0 or values[-1] - self._budget > STARTLING * deviation
        self.halvings = 0
        findings = []
        for count in _windows(known):
            mean, error = sum(values[-count:]) / count, deviation / math.sqrt(count)
            farthest = max(map(abs, [*self._residuals, *values[:-count]]), default=0.0)
            strays = max(error * errors_allowed(count, degrees), farthest * min(1.0, FEW_PAIRS / count))
            findings.append(Finding(mean - strays, mean, count))
            if count >= LEARNING_PAIRS:
                self.is_suspicious |= mean - SUSPICIOUS * error > self._budget
                high = mean + error * errors_allowed(count, degrees)  # of the longest window in the end
                self.halvings = max([0, *(times for budgets, times in HALVED.items() if high < budgets * self._budget)])
        surest = max(findings)
        return surest if surest.low > self._budget else None

    def _look_into_rise(self, values: Sequence[float]) -> None:
        """Let a rise be, unless the comparisons since it was noticed show that squeezing may be the reason."""
        self._looks = min(self._looks + 1, len(values))
        if self._looks >= LOOKS or (self._looks >= LASTING_PAIRS and max(values[-self._looks :]) < self._rise / 2):
            self._rise = 0.0


def _windows(known: int) -> list[int]:
    """How many of the latest comparisons each bound is made of."""
    counts = [LEAST_PAIRS << doublings for doublings in range(8)]
    return [*(count for count in counts if count < known), known]


def errors_allowed(count: int, degrees: int, rate: float = ERROR_RATE) -> float:
    """How far above the truth the mean of `count` comparisons may stray, at any time, in standard errors.

    From the t statistic's likelihood ratio, mixed over slowdowns (Lai 1976; Wang and Ramdas 2025).

    Args:
        count: comparisons in the mean.
        degrees: of freedom of their variance.
        rate: of errors.
    """
    prior = EXPECTED_SQUARED / (count + EXPECTED_SQUARED)
    grown = math.exp(min(500.0, -(math.log(prior) + 2 * math.log(rate)) / (degrees + 1)))
    left = 1 - grown * prior
    return math.sqrt(degrees * (grown - 1) / left) if left > 0 else math.inf
