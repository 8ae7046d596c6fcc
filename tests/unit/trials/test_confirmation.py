"""Which surrogates a target is trained with, once the best were trained again."""

from collections.abc import Sequence
from math import exp, log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from trials.confirmation import NEAR, Confirmed, are_near, choose, how_many, unconfirmed

MINIMIZE, MAXIMIZE = StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE

SPACE: dict[str, BaseDistribution] = {
    "lr": FloatDistribution(1e-4, 1e-1, log=True),
    "momentum": FloatDistribution(0.5, 1.0),
    "layers": IntDistribution(1, 4),
    "kind": CategoricalDistribution(["adam", "sgd"]),
}


def trial(number: int, score: float | list[float] = 0.0, *, constraint: float = 0.0, **params: Any) -> FrozenTrial:
    values = score if isinstance(score, list) else [score]
    spaces = {name: SPACE[name] for name in params}
    state, limits = TrialState.COMPLETE, {"limit": constraint}
    made = create_trial(state=state, values=values, params=params, distributions=spaces, constraints=limits)
    made.number = number
    return made


def numbers(pool: Sequence[Confirmed], top: int, *directions: StudyDirection) -> list[int]:
    return [each.trial.number for each in choose(pool, directions or (MINIMIZE,), top)]


def test_the_mean_of_further_seeds_counts_and_not_the_luck_of_the_search() -> None:
    lucky = Confirmed(trial(0, 0.01, lr=1e-4), [[0.09], [0.11], [0.10]])
    good = Confirmed(trial(1, 0.02, lr=1e-2), [[0.05], [0.07], [0.06]])
    fair = Confirmed(trial(2, 0.03, lr=1e-1), [[0.08], [0.08], [0.08]])
    assert numbers([lucky, good, fair], 2) == [1, 2]
    assert numbers([lucky, good, fair], 2, MAXIMIZE) == [0, 2]
    first = choose([lucky, good, fair], [MINIMIZE], 1)[0]
    assert first.why == "mean score 0.06 of 3 further seeds, score 0.02 in the search"


def test_a_near_copy_of_a_better_one_is_passed_over_unless_no_other_is_left() -> None:
    best = Confirmed(trial(0, lr=1e-2), [[0.1]])
    copy = Confirmed(trial(1, lr=1.5e-2), [[0.2]])  # a range has three decades: 0.06 of it
    other = Confirmed(trial(2, lr=2.5e-2), [[0.3]])  # 0.13
    assert numbers([best, copy, other], 2) == [0, 2]
    found = choose([best, copy, other], [MINIMIZE], 3)
    assert [each.trial.number for each in found] == [0, 2, 1]
    assert found[-1].why.endswith("; a near copy of trial 0, but no other was left")


@pytest.mark.parametrize(
    ("a", "b", "near"),
    [
        ({"lr": 1e-3}, {"lr": 1.99e-3}, True),
        ({"lr": 1e-3}, {"lr": 2.01e-3}, False),
        ({"momentum": 0.9}, {"momentum": 0.949}, True),
        ({"momentum": 0.9}, {"momentum": 0.951}, False),
        ({"lr": 1e-3, "momentum": 0.9}, {"lr": 1.1e-3, "momentum": 0.6}, False),
        ({"layers": 2}, {"layers": 3}, False),
        ({"kind": "adam"}, {"kind": "sgd"}, False),
        ({"kind": "adam", "lr": 1e-3}, {"kind": "adam", "lr": 1.1e-3}, True),
        ({"kind": "adam"}, {"kind": "adam", "momentum": 0.9}, False),  # a branch of its own
        ({}, {}, True),
    ],
)
def test_what_a_near_copy_is(a: dict[str, Any], b: dict[str, Any], near: bool) -> None:
    assert are_near(trial(0, **a), trial(1, **b)) is near
    assert are_near(trial(1, **b), trial(0, **a)) is near


def test_a_hyperparameter_of_one_value_tells_nothing_apart() -> None:
    fixed = {"lr": FloatDistribution(0.1, 0.1, log=True)}
    made = [create_trial(state=TrialState.COMPLETE, value=0.0, params={"lr": 0.1}, distributions=fixed)] * 2
    assert are_near(*made)


def test_trials_that_fail_with_a_seed_come_last_and_those_that_break_a_constraint_behind_them() -> None:
    breaking = Confirmed(trial(0, lr=1e-1, constraint=1.0), [[0.1], [0.1]])
    diverging = Confirmed(trial(1, lr=3e-2), [[0.2]], failed=1)
    dead = Confirmed(trial(2, lr=1e-3), [], failed=2)
    sound = Confirmed(trial(3, lr=1e-2), [[0.9], [0.9]])
    copy = Confirmed(trial(4, lr=1.1e-2), [[0.95], [0.95]])
    pool = [breaking, diverging, dead, sound, copy]
    assert numbers(pool, 5) == [3, 4, 1, 2, 0]
    found = {each.trial.number: each.why for each in choose(pool, [MINIMIZE], 5)}
    assert found[1] == "mean score 0.2 of 1 further seeds, score 0 in the search, 1 of its further seeds failed"
    assert found[2] == "score 0 in the search, 2 of its further seeds failed"


def test_of_several_objectives_those_come_first_that_fewest_dominate() -> None:
    made = [[0.1, 0.5], [0.2, 0.4], [0.3, 0.9], [0.15, 0.45]]  # a loss and a score: 0 dominates 3, and both of them 1
    rates = (1e-1, 2e-2, 3e-3, 4e-4)
    pool = [Confirmed(trial(i, [0.0, 0.0], lr=rates[i]), [means, means]) for i, means in enumerate(made)]
    assert numbers(pool, 4, MINIMIZE, MAXIMIZE) == [0, 2, 3, 1]
    assert choose(pool, [MINIMIZE, MAXIMIZE], 1)[0].why.startswith("mean scores 0.1, 0.5 of 2 further seeds")


def test_what_was_not_confirmed_says_so() -> None:
    (only,) = unconfirmed([trial(0, 0.5)])
    assert only.why == "score 0.5 in the search, not confirmed"


@pytest.mark.parametrize(
    ("completed", "spent_epochs", "wanted", "top", "found"),
    [
        (128, 128 * 20, None, 3, 16),
        (128, 300, None, 3, 5),  # 3 seeds of 10 epochs each: at most half of the epochs
        (4, 128 * 20, None, 3, 4),
        (3, 128 * 20, None, 3, 0),  # all will be targets in any case
        (128, 60, None, 1, 0),
        (128, 60, 20, 3, 20),  # the user's word
        (128, 60, 3, 3, 0),
    ],
)
def test_how_many_are_confirmed(completed: int, spent_epochs: int, wanted: int | None, top: int, found: int) -> None:
    assert how_many(completed, 10, spent_epochs, 3, wanted, top) == found


POOLS = st.lists(
    st.tuples(
        st.tuples(st.floats(0.0, 1.0), st.floats(0.5, 1.0), st.sampled_from(["adam", "sgd"])),
        st.lists(st.floats(-9.0, 9.0), max_size=3),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=12,
)


def pool_of(drawn: Sequence[Any]) -> list[Confirmed]:
    low, high = log(1e-4), log(1e-1)
    return [
        Confirmed(
            trial(i, lr=min(max(exp(low + lr * (high - low)), 1e-4), 1e-1), momentum=momentum, kind=kind),
            [[score] for score in scores],
            failed,
        )
        for i, ((lr, momentum, kind), scores, failed) in enumerate(drawn)
    ]


@given(POOLS, st.integers(1, 14))
def test_as_many_as_are_wanted_are_chosen_each_once(drawn: Sequence[Any], top: int) -> None:
    found = numbers(pool_of(drawn), top)
    assert len(found) == len(set(found)) == min(top, len(drawn))


@given(POOLS, st.integers(1, 14))
def test_none_is_chosen_before_a_better_one_that_is_no_copy(drawn: Sequence[Any], top: int) -> None:
    pool = pool_of(drawn)
    sound = [each for each in pool if not each.is_doubtful]
    found = numbers(pool, top)
    if not sound:
        return
    best = min(sound, key=lambda each: each.means)
    assert found[0] == best.trial.number
    taken = [each for each in sound if each.trial.number in found]
    for left in sound:
        if (
            left not in taken
        ):  # each that is left has a copy that is chosen, or all of those chosen are at least as good
            copied = any(are_near(left.trial, each.trial) for each in taken)
            assert copied or (len(taken) == top and all(each.means <= left.means for each in taken))


@given(POOLS, st.integers(1, 14), st.randoms(use_true_random=False), st.floats(0.1, 10.0))
def test_order_and_scale_of_scores_do_not_matter(drawn: Sequence[Any], top: int, random: Any, scale: float) -> None:
    pool = [each for each in pool_of(drawn) if each.scores]
    means = [each.means[0] for each in pool]
    if len({round(mean, 6) for mean in means}) < len(pool):
        return
    found = numbers(pool, top)
    scaled = [Confirmed(c.trial, [[scale * score] for (score,) in c.scores], c.failed) for c in pool]
    random.shuffle(scaled)
    assert numbers(scaled, top) == found
    turned = [Confirmed(c.trial, [[-score] for (score,) in c.scores], c.failed) for c in pool]
    assert numbers(turned, top, MAXIMIZE) == found


@given(POOLS)
def test_copies_are_mutual_and_a_trial_is_its_own(drawn: Sequence[Any]) -> None:
    made = [each.trial for each in pool_of(drawn)]
    assert all(are_near(a, a) for a in made)
    assert all(are_near(a, b) == are_near(b, a) for a in made for b in made)
    assert 0 < NEAR < 0.5
