"""Which paused trials train on: successive halving by promotion, ASHA (Li et al. 2020, arXiv:1810.05934, algorithm 2).

A trial trains up to its *milestone*. A new one has the lowest rung for it. There it pauses until it is promoted; then
its milestone is the next rung, or the last epoch. A rung with n scores promotes the best ⌊n / factor⌋ of them. Trials
that break a constraint come behind all others.

Syne Tune's `PromotionRungSystem` looks in the same order, from the highest rung down. It compares with a quantile, so
that trials which tie there all pass; here the lower number wins, and no more than ⌊n / factor⌋ ever do.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Literal


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a trial is.

    Attributes:
        number: its number.
        scores: epochs trained -> its score then.
        milestone: the epoch up to which it may train.
        state: "open" while it trains, or waits to begin or to continue; "paused" at its milestone; "ended" as completed
            or pruned; or "failed".
        breaks: whether it breaks a constraint.
    """

    number: int
    scores: Mapping[int, float]
    milestone: int
    state: Literal["open", "paused", "ended", "failed"]
    breaks: bool = False

    def is_paused_at(self, rung: int) -> bool:
        """Whether it waits there and has a score that can be compared."""
        return self.state == "paused" and self.milestone == rung and not isnan(self.scores.get(rung, nan))

    @property
    def is_stuck(self) -> bool:
        """Whether it will never complete: it has failed, or has paused without a number for a score."""
        return self.state == "failed" or (self.state == "paused" and not self.is_paused_at(self.milestone))


def next_milestone(rungs: Sequence[int], epochs: int, after: int) -> int:
    """Return the next rung after epoch `after`, or the last epoch.

    Args:
        rungs: increasing epochs.
        epochs: of a whole trial.
        after: 0 for a new trial.
    """
    return next((rung for rung in rungs if after < rung < epochs), epochs)


class Ranking:
    """How all trials of a study stand. Only those that have changed cost time, however many there are.

    Args:
        rungs: increasing epochs before the last one.
        is_high_best: whether high scores are good.
    """

    def __init__(self, rungs: Sequence[int], is_high_best: bool) -> None:
        self._is_high_best = is_high_best
        self._standings: dict[int, Standing] = {}
        self._ranked: dict[int, list[_Rank]] = {rung: [] for rung in rungs}

    def put(self, standing: Standing) -> None:
        """Note how a trial stands now."""
        self._replace(standing.number, standing)

    def drop(self, number: int) -> None:
        """Forget a trial, if it is known."""
        self._replace(number, None)

    def is_paused(self, number: int) -> bool:
        """Whether it waits at its milestone, which is one of the rungs."""
        standing = self._standings.get(number)
        return standing is not None and standing.state == "paused" and standing.milestone in self._ranked

    def promotable(self, factor: int) -> list[int]:
        """Return the numbers of the trials to promote: from the highest rung down, the best first.

        Behind all others come those that break a constraint: they are there only where too few do not.

        Args:
            factor: one trial in `factor` is promoted.
        """
        found: list[int] = []
        for rung, ranked in reversed(self._ranked.items()):
            best = (number for *_, number in ranked[: len(ranked) // factor])
            found += [number for number in best if self._standings[number].is_paused_at(rung)]
        return sorted(found, key=lambda number: self._standings[number].breaks)

    def last_resort(self) -> int | None:
        """Return the trial to promote when there are no new ones and none is `promotable`; None: the search is over.

        A rung that no further trial can reach promotes its best, though fewer than `factor` have reached it, unless one
        of them is above it and has not failed there. Otherwise a study of few trials would complete none.
        """
        for rung, ranks in self._ranked.items():
            if any(each.state == "open" and each.milestone <= rung for each in self._standings.values()):
                return None
            ranked = [self._standings[number] for *_, number in ranks]
            paused = next((each.number for each in ranked if each.is_paused_at(rung)), None)
            if paused is not None and all(each.milestone <= rung or each.is_stuck for each in ranked):
                return paused
        return None

    def _replace(self, number: int, standing: Standing | None) -> None:
        before = self._standings.pop(number, None)
        for rung, ranked in self._ranked.items():
            old, new = self._rank(before, rung), self._rank(standing, rung)
            if old == new:
                continue
            if old is not None:
                del ranked[bisect_left(ranked, old)]
            if new is not None:
                insort(ranked, new)
        if standing is not None:
            self._standings[number] = standing

    def _rank(self, standing: Standing | None, rung: int) -> "_Rank | None":
        """Orders the trials that have a score at `rung`, the best first.

        Behind all others come those that break a constraint, and behind these, those whose score is no number.
        """
        if standing is None or rung not in standing.scores:
            return None
        score, number, breaks = standing.scores[rung], standing.number, standing.breaks
        if isnan(score):
            return True, breaks, 0.0, number
        return False, breaks, -score if self._is_high_best else score, number


_Rank = tuple[bool, bool, float, int]
