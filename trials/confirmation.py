"""Which surrogates' hyperparameters a target is trained with: the best of several seeds, but no near copies.

The best scores of a search are too good: of many trials that are equally good, those come first that had luck with
their seed. So the best are trained again with further seeds, which had no part in the choice, and their means count.
The seeds are the same for all, as common random numbers: no mean is biased by that, and what a seed does to all alike,
by its initial weights, does not decide between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log
from statistics import fmean
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from ds_hooks.shared.trial_attributes import HISTORY
from trials.search.choice.constraints import breaks
from trials.search.files.best_weights import describe_score, score_of

MOST = 16
"""How many of the best are confirmed, unless the user says otherwise."""

SHARE = 0.5
"""Unless the user says otherwise, confirming takes at most this share of the epochs that the search has trained."""

NEAR = 0.1
"""Trials are near copies that differ in no hyperparameter by more than this share of its range.

Widths move the best rate by about an octave (docs/shrinking.md), a tenth of the three decades that are often searched:
closer ones are the same bet.
"""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A surrogate, and what its hyperparameters scored with further seeds.

    Attributes:
        trial: of the search.
        scores: one for each seed and objective.
        failed: how many further seeds gave no score.
    """

    trial: FrozenTrial
    scores: Sequence[Sequence[float]]
    failed: int = 0

    @property
    def means(self) -> list[float]:
        """The mean score for each objective."""
        return [fmean(each) for each in zip(*self.scores, strict=True)]

    @property
    def is_doubtful(self) -> bool:
        """Whether a seed gave no score, as of trials that diverge."""
        return self.failed > 0 or not self.scores


@dataclass(frozen=True, slots=True)
class Choice:
    """A surrogate whose hyperparameters the target gets.

    Attributes:
        trial: of the search.
        why: in words.
    """

    trial: FrozenTrial
    why: str


def how_many(completed: int, epochs: int, spent_epochs: int, seeds: int, wanted: int | None, top: int) -> int:
    """How many of the best surrogates are confirmed.

    Args:
        completed: how many trials have completed, or are on the front of several objectives.
        epochs: of one trial.
        spent_epochs: those that all trials of the search have trained.
        seeds: how many further seeds each of them gets.
        wanted: what the user says; None: `MOST`, as far as they take no more than `SHARE`.
        top: how many targets are trained.

    Returns:
        A number greater than `top`; 0 if there is nothing to choose from, or no epoch for it.
    """
    most = min(MOST, int(SHARE * spent_epochs / (seeds * epochs))) if wanted is None else wanted
    found = min(most, completed)
    return found if found > top else 0


def epochs_of(trial: FrozenTrial) -> int:
    """How many epochs a trial of the search has trained; of several objectives Optuna keeps no steps."""
    return trial.last_step or len(trial.user_attrs.get(HISTORY, {}).get("loss", []))


def unconfirmed(trials: Sequence[FrozenTrial]) -> list[Choice]:
    """Choose all of these, as they come in the search."""
    return [Choice(each, _why(Confirmed(each, ()))) for each in trials]


def choose(pool: Sequence[Confirmed], directions: Sequence[StudyDirection], top: int) -> list[Choice]:
    """Choose up to `top` surrogates by the means of their further seeds.

    Of several objectives those come first that fewest others dominate. A near copy of one that was chosen is passed
    over, unless nothing else is left but trials that failed with a seed, or that break a constraint.

    Args:
        pool: the candidates, in the order of the search, which decides between equals.
        directions: of the objectives.
        top: how many.
    """
    signs = [-1 if each is StudyDirection.MAXIMIZE else 1 for each in directions]
    costs = {id(c): [s * mean for s, mean in zip(signs, c.means, strict=False)] for c in pool}
    ahead = {id(c): sum(_dominates(costs[id(other)], costs[id(c)]) for other in pool) for c in pool}
    chosen: list[Choice] = []
    rows = sorted(pool, key=lambda c: (*_tier(c), not c.scores, ahead[id(c)]))
    for _, tier in groupby(rows, key=_tier):
        copies: list[Choice] = []
        for each in tier:
            like = next((c.trial.number for c in chosen if are_near(c.trial, each.trial)), None)
            if like is None:
                chosen.append(Choice(each.trial, _why(each)))
            else:
                why = f"{_why(each)}; a near copy of trial {like}, but no other was left"
                copies.append(Choice(each.trial, why))
        chosen += copies
    return chosen[:top]


def are_near(a: FrozenTrial, b: FrozenTrial) -> bool:
    """Whether two trials differ in no hyperparameter by more than `NEAR` of its range, or of its logarithm's.

    Those with another choice of a category, or with hyperparameters that the other lacks, are not near.
    """
    if a.params.keys() != b.params.keys():
        return False
    spaces: Mapping[str, BaseDistribution] = a.distributions
    return all(_distance(spaces[name], a.params[name], b.params[name]) <= NEAR for name in a.params)


def _distance(space: BaseDistribution, a: Any, b: Any) -> float:
    """How far two values are apart, as a share of their range."""
    if a == b:
        return 0.0
    if isinstance(space, CategoricalDistribution):
        return 1.0
    assert isinstance(space, (FloatDistribution, IntDistribution))
    low, high, x, y = (log(v) if space.log else v for v in (space.low, space.high, a, b))
    return float(abs(x - y) / (high - low)) if high > low else 0.0


def _dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether costs `a` are nowhere above `b`, and somewhere below; of nothing, neither is."""
    pairs = list(zip(a, b, strict=False))
    return bool(pairs) and all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)


def _tier(each: Confirmed) -> tuple[bool, bool]:
    return breaks(each.trial), each.is_doubtful


def _in_search(trial: FrozenTrial) -> str:
    score = score_of(trial)
    assert score is not None  # it has completed
    return describe_score(score)


def _why(each: Confirmed) -> str:
    seeds = len(each.scores)
    failed = f", {each.failed} of its further seeds failed" if each.failed else ""
    if not seeds:
        return f"{_in_search(each.trial)} in the search{failed or ', not confirmed'}"
    mean = describe_score(each.means[0] if len(each.means) == 1 else each.means)
    return f"mean {mean} of {seeds} further seeds, {_in_search(each.trial)} in the search{failed}"
