"""Which paused trials train on: successive halving by promotion, ASHA (Li et al. 2020, arXiv:1810.05934, algorithm 2).

A trial trains up to its *milestone*. A new one has the lowest rung for it. There it pauses until it is promoted; then
its milestone is the next rung, or the last epoch. A rung with n scores promotes the best ⌊n / factor⌋ of them.

Syne Tune's `PromotionRungSystem` looks in the same order, from the highest rung down. It compares with a quantile, so
that trials which tie there all pass; here the lower number wins, and no more than ⌊n / factor⌋ ever do.
"""

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
        state: "open" while it trains, or waits to begin or to go on; "paused" at its milestone; "ended" as completed or
            pruned; or "failed".
    """

    number: int
    scores: Mapping[int, float]
    milestone: int
    state: Literal["open", "paused", "ended", "failed"]

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


def promotable(standings: Sequence[Standing], rungs: Sequence[int], factor: int, is_high_best: bool) -> list[int]:
    """Return the numbers of the trials to promote: from the highest rung down, the best first.

    Args:
        standings: of all trials of the study.
        rungs: increasing epochs before the last one.
        factor: one in so many is promoted.
        is_high_best: whether high scores are good.
    """
    found: list[int] = []
    for rung in reversed(rungs):
        ranked = _ranked(standings, rung, is_high_best)
        found += [each.number for each in ranked[: len(ranked) // factor] if each.is_paused_at(rung)]
    return found


def last_resort(standings: Sequence[Standing], rungs: Sequence[int], is_high_best: bool) -> int | None:
    """Return the trial to promote when there will be no new ones and none is `promotable`; None: the search is over.

    A rung that no further trial can reach promotes its best, though fewer than `factor` have reached it, unless one of
    them is above it and has not failed there. Otherwise a study of few trials would complete none.
    """
    for rung in rungs:
        if any(each.state == "open" and each.milestone <= rung for each in standings):
            return None
        ranked = _ranked(standings, rung, is_high_best)
        paused = next((each.number for each in ranked if each.is_paused_at(rung)), None)
        if paused is not None and all(each.milestone <= rung or each.is_stuck for each in ranked):
            return paused
    return None


def _ranked(standings: Sequence[Standing], rung: int, is_high_best: bool) -> list[Standing]:
    """Return the trials that have a score at `rung`, the best first; what is no number is worst."""

    def key(each: Standing) -> tuple[bool, float, int]:
        score = each.scores[rung]
        return (True, 0.0, each.number) if isnan(score) else (False, -score if is_high_best else score, each.number)

    return sorted((each for each in standings if rung in each.scores), key=key)
