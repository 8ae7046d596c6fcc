"""The rule of promotion, against a simulation that follows the paper word by word."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf, isnan, nan
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.search.choice.promotion import Ranking, Standing, next_milestone

RUNGS, EPOCHS = (1, 3, 9), 27

States = Literal["open", "paused", "ended", "failed"]


def standing(number: int, milestone: int, state: States, **scores: float) -> Standing:
    return Standing(number, {int(rung[1:]): score for rung, score in scores.items()}, milestone, state)


def paused(number: int, *scores: float) -> Standing:
    """Waits at the last of the rungs for which it has scores."""
    return Standing(number, dict(zip(RUNGS, scores, strict=False)), RUNGS[len(scores) - 1], "paused")


def ranked(standings: Iterable[Standing], is_high_best: bool = True) -> Ranking:
    ranking = Ranking(RUNGS, is_high_best)
    for each in standings:
        ranking.put(each)
    return ranking


def promotable(standings: Iterable[Standing], factor: int, is_high_best: bool = True) -> list[int]:
    return ranked(standings, is_high_best).promotable(factor)


def last_resort(standings: Iterable[Standing]) -> int | None:
    return ranked(standings).last_resort()


def reference(standings: list[Standing], factor: int, is_high_best: bool) -> int | None:
    """`get_job` of the paper: for k from the highest rung, the best of the candidates that are not promoted yet."""
    for rung in sorted(RUNGS, reverse=True):
        at = [each for each in standings if rung in each.scores]
        numbers = sorted(each.scores[rung] for each in at if not isnan(each.scores[rung]))
        if is_high_best:
            numbers.reverse()
        quota, candidates = len(at) // factor, set[int]()
        for value in dict.fromkeys(numbers):  # the best value first; who ties, in the order of numbers
            for each in sorted(at, key=lambda each: each.number):
                if each.scores[rung] == value and len(candidates) < quota:
                    candidates.add(each.number)
        waiting = [
            each for each in at if each.number in candidates and each.state == "paused" and each.milestone == rung
        ]
        if waiting:
            best = (max if is_high_best else min)(each.scores[rung] for each in waiting)
            return min(each.number for each in waiting if each.scores[rung] == best)
    return None


SCORES = st.one_of(st.integers(-3, 3).map(float), st.just(nan), st.sampled_from([inf, -inf]))


@st.composite
def standings(draw: st.DrawFn) -> list[Standing]:
    found = []
    for number in range(draw(st.integers(0, 25))):
        reached = draw(st.integers(0, len(RUNGS)))
        scores = {rung: draw(SCORES) for rung in RUNGS[:reached]}
        further = next_milestone(RUNGS, EPOCHS, RUNGS[reached - 1] if reached else 0)
        state: States = draw(st.sampled_from(["open", "paused", "ended", "failed"] if reached else ["open", "failed"]))
        found.append(Standing(number, scores, RUNGS[reached - 1] if state == "paused" else further, state))
    return draw(st.permutations(found))


@given(earlier=standings(), now=standings(), gone=st.sets(st.integers(0, 9)), is_high_best=st.booleans())
def test_a_ranking_that_has_seen_other_standings_is_as_a_new_one(
    earlier: list[Standing], now: list[Standing], gone: set[int], is_high_best: bool
) -> None:
    kept = ranked(earlier, is_high_best)
    for each in now:
        kept.put(each)
    for number in gone:
        kept.drop(number)
    left = {each.number: each for each in (*earlier, *now) if each.number not in gone}
    fresh = ranked(left.values(), is_high_best)
    assert kept.promotable(2) == fresh.promotable(2) and kept.last_resort() == fresh.last_resort()


@given(standings=standings(), factor=st.integers(2, 5), is_high_best=st.booleans())
def test_one_after_another_they_are_those_of_the_paper(
    standings: list[Standing], factor: int, is_high_best: bool
) -> None:
    found = promotable(standings, factor, is_high_best)
    one_by_one: list[int] = []
    while (number := reference(standings, factor, is_high_best)) is not None:
        one_by_one.append(number)
        [chosen] = [each for each in standings if each.number == number]
        further = next_milestone(RUNGS, EPOCHS, chosen.milestone)
        standings = [each for each in standings if each is not chosen]
        standings.append(Standing(number, chosen.scores, further, "open"))
    assert found == one_by_one


@given(standings=standings(), factor=st.integers(2, 5), is_high_best=st.booleans())
def test_no_rung_promotes_more_than_its_share_and_none_that_is_no_number(
    standings: list[Standing], factor: int, is_high_best: bool
) -> None:
    by_number = {each.number: each for each in standings}
    found = promotable(standings, factor, is_high_best)
    assert len(set(found)) == len(found)
    for rung in RUNGS:
        at = [each for each in standings if rung in each.scores]
        promoted = [by_number[number] for number in found if by_number[number].milestone == rung]
        assert len(promoted) <= len(at) // factor
        assert not any(isnan(each.scores[rung]) for each in promoted)


@pytest.mark.parametrize(("factor", "expected"), [(2, [1, 3]), (3, [1]), (4, [1]), (5, [])])
def test_one_in_so_many_is_promoted(factor: int, expected: list[int]) -> None:
    assert promotable([paused(n, score) for n, score in enumerate([0.1, 0.9, 0.3, 0.8])], factor) == expected


def test_the_highest_rung_is_first_and_who_was_promoted_still_counts() -> None:
    above = [paused(n, 0.9, 0.5 + n / 10) for n in range(3)]
    below = [paused(n, 0.1) for n in range(3, 9)]
    assert promotable([*above, *below], 3) == [2], "the best three below are above already"
    assert promotable([*above, *below], 3, False) == [0, 3, 4, 5]


def test_ties_go_to_the_lower_number() -> None:
    assert promotable([paused(n, 1.0) for n in (4, 2, 3)], 3) == [2]


def simulate(trials: int, factor: int, at_once: int, fails: frozenset[int] = frozenset()) -> list[Standing]:
    """A whole search, in which trial n scores n at every rung, or fails above the first."""
    found: dict[int, Standing] = {}
    for _ in range(1000):
        ready = promotable(found.values(), factor)
        batch = [number for number in ready if number in found][:at_once]
        batch += range(len(found), min(trials, len(found) + at_once - len(batch)))
        if not batch and (last := last_resort(found.values())) is not None:
            batch = [last]
        if not batch:
            return list(found.values())
        for number in batch:
            before = found.get(number, Standing(number, {}, 0, "open"))
            milestone = next_milestone(RUNGS, EPOCHS, before.milestone)
            scores = {**before.scores, milestone: float(number)}
            if before.scores and number in fails:
                found[number] = Standing(number, before.scores, milestone, "failed")
            else:
                found[number] = Standing(number, scores, milestone, "ended" if milestone == EPOCHS else "paused")
    pytest.fail("it does not end")


@given(
    trials=st.integers(1, 40),
    factor=st.integers(2, 5),
    at_once=st.integers(1, 50),
    fails=st.frozensets(st.integers(0, 39), max_size=6),
)
def test_every_search_ends_and_completes_some_trial_if_any_can(
    trials: int, factor: int, at_once: int, fails: frozenset[int]
) -> None:
    ended = simulate(trials, factor, at_once, fails)
    assert len(ended) == trials
    if set(range(trials)) - fails:
        assert any(each.state == "ended" for each in ended)


@pytest.mark.parametrize(("trials", "completed"), [(1, 1), (2, 1), (26, 1), (27, 1), (54, 2), (81, 3)])
def test_as_many_complete_as_the_brackets_say(trials: int, completed: int) -> None:
    ended = simulate(trials, 3, trials)
    assert [each.number for each in ended if each.state == "ended"] == list(range(trials))[-completed:]


def test_nobody_is_promoted_before_its_time_while_others_may_still_come() -> None:
    two = [paused(0, 0.5), paused(1, 0.7)]
    assert last_resort([*two, standing(2, 1, "open")]) is None
    assert last_resort(two) == 1
    assert last_resort([paused(0, 0.5), standing(1, 3, "open", r1=0.7)]) is None, "one is above"
    assert last_resort([paused(0, 0.5), standing(1, 3, "failed", r1=0.7)]) == 0
    assert last_resort([paused(0, 0.5), paused(1, 0.7, nan)]) == 0, "it can never go further"
    assert last_resort([paused(0, nan)]) is None
    assert last_resort([]) is None


@pytest.mark.parametrize(("after", "expected"), [(0, 1), (1, 3), (2, 3), (3, 9), (9, 27), (20, 27)])
def test_the_next_milestone(after: int, expected: int) -> None:
    assert next_milestone(RUNGS, EPOCHS, after) == expected


def test_a_rung_at_the_last_epoch_is_no_milestone_of_its_own() -> None:
    assert next_milestone((2, 4), 4, 2) == 4


def test_whoever_breaks_a_constraint_is_promoted_behind_all_others() -> None:
    others = [paused(n, n / 10) for n in range(1, 6)]
    best = replace(paused(0, 0.9), breaks=True)
    assert promotable([best, *others], 3) == [5, 4]
    above = [replace(paused(n, 0.9, 0.5), breaks=True) for n in (6, 7, 8)]
    assert promotable([*others, *above], 3) == [5, 4, 6], "though its rung is higher"
    assert last_resort([best, paused(1, 0.1)]) == 1
    assert last_resort([best]) == 0, "else no trial would complete"
