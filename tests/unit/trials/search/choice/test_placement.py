"""Which structure's trials a worker gets first: where they are trained best, compared with the other workers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.search.choice.placement import GAIN, HALF_LIFE_S, Speeds, assign

CROSSED = {("s", "a"): 100.0, ("s", "b"): 10.0, ("t", "a"): 10.0, ("t", "b"): 100.0}


def test_each_worker_gets_what_it_trains_best() -> None:
    assert assign({"s": 1, "t": 1}, ["a", "b"], CROSSED, {}) == {"a": "s", "b": "t"}


def test_samples_of_a_slow_structure_are_worth_more() -> None:
    """In samples alone, a trains the light structure best; but b is far worse at the heavy one."""
    speeds = {("light", "a"): 100.0, ("light", "b"): 50.0, ("heavy", "a"): 10.0, ("heavy", "b"): 1.0}
    assert assign({"light": 1, "heavy": 1}, ["a", "b"], speeds, {}) == {"a": "heavy", "b": "light"}


def test_what_was_not_measured_is_estimated_from_the_workers_speed_and_the_structures_cost() -> None:
    """a is ten times as fast as b wherever both are known; only for t it is known to be no faster."""
    speeds = {("r", "a"): 100.0, ("r", "b"): 10.0, ("s", "a"): 50.0, ("t", "a"): 10.0, ("t", "b"): 10.0}
    assert assign({"s": 1, "t": 1}, ["a", "b"], speeds, {}) == {"a": "s", "b": "t"}


@pytest.mark.parametrize("speeds", [{}, {("s", "a"): 3.0}, {("s", "a"): 1.0, ("t", "b"): 1e9}])
def test_with_hardly_anything_known_each_worker_still_gets_something(speeds: dict[tuple[str, str], float]) -> None:
    assert sorted(assign({"s": 1, "t": 1}, ["a", "b"], speeds, {}).values()) == ["s", "t"]


def test_a_structure_goes_where_it_fits_even_if_that_is_slower_for_all_else() -> None:
    speeds = {("s", "a"): 0.0, ("s", "b"): 1.0, ("t", "a"): 1.0, ("t", "b"): 1000.0}
    assert assign({"s": 1, "t": 1}, ["a", "b"], speeds, {}) == {"a": "t", "b": "s"}


def test_where_nothing_fits_nothing_goes() -> None:
    nowhere = {("s", "a"): 0.0, ("t", "a"): 0.0}
    assert assign({"s": 2, "t": 2}, ["a", "b"], nowhere, {}) in ({"b": "s"}, {"b": "t"})


def test_as_many_workers_get_a_structure_as_it_has_groups() -> None:
    speeds = {(structure, worker): 1.0 + (structure == "s") for structure in "st" for worker in "abcd"}
    assert sorted(assign({"s": 3, "t": 9}, list("abcd"), speeds, {}).values()).count("s") <= 3
    assert len(assign({"s": 1, "t": 1}, list("abcd"), speeds, {})) == 2


@pytest.mark.parametrize(("slots", "workers"), [({"s": 5}, ["a", "b"]), ({"s": 1, "t": 1}, ["a"]), ({}, [])])
def test_one_structure_or_one_worker_needs_no_assignment(
    slots: dict[str, int], workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trials.search.choice.placement._assign", None)
    assert assign(slots, workers, CROSSED, {}) == {}


@pytest.mark.parametrize(("better", "changes"), [(1.1, False), (1.5, True)])
def test_an_order_that_stands_changes_for_a_large_gain_only(better: float, changes: bool) -> None:
    speeds = {("s", "a"): better, ("s", "b"): 1.0, ("t", "a"): 1.0, ("t", "b"): better}
    stands = {"a": "t", "b": "s"}
    assert assign({"s": 1, "t": 1}, ["a", "b"], speeds, stands) == ({"a": "s", "b": "t"} if changes else stands)


def test_measurements_that_vary_do_not_flap() -> None:
    stands: dict[str, str] = {}
    orders = []
    for draw in range(20):
        a = 1.0 + 0.1 * (draw % 2)
        speeds = {("s", "a"): a, ("s", "b"): 1.0, ("t", "a"): 1.0, ("t", "b"): a}
        stands = assign({"s": 1, "t": 1}, ["a", "b"], speeds, stands)
        orders.append(tuple(sorted(stands.items())))
    assert len(set(orders)) == 1


def test_who_vanishes_or_has_nothing_left_makes_room_and_the_others_stay() -> None:
    speeds = {(structure, worker): 1.0 for structure in "stu" for worker in "abc"}
    stands = {"a": "s", "b": "t", "c": "u"}
    assert assign({"s": 1, "u": 1}, ["a", "b"], speeds, stands) == {"a": "s", "b": "u"}
    assert assign({"t": 2, "u": 1}, ["a", "b", "c"], speeds, stands) == {"a": "t", "b": "t", "c": "u"}


SPEEDS = st.dictionaries(
    st.tuples(st.sampled_from("stu"), st.sampled_from("abcd")), st.one_of(st.just(0.0), st.floats(1e-6, 1e9))
)


@given(
    st.dictionaries(st.sampled_from("stu"), st.integers(1, 4)),
    st.lists(st.sampled_from("abcd"), unique=True),
    SPEEDS,
    st.dictionaries(st.sampled_from("abcdx"), st.sampled_from("stuv")),
)
def test_no_worker_gets_what_does_not_fit_or_does_not_wait_and_the_order_is_stable(
    slots: dict[str, int], workers: list[str], speeds: dict[tuple[str, str], float], stands: dict[str, str]
) -> None:
    placed = assign(slots, workers, speeds, stands)
    assert placed.keys() <= set(workers)
    for worker, structure in placed.items():
        assert speeds.get((structure, worker)) != 0
    for structure in set(placed.values()):
        assert list(placed.values()).count(structure) <= slots[structure]
    assert assign(slots, workers, speeds, placed) == placed, "asked again, the same"


def test_a_speed_is_samples_per_second_of_all_groups_as_large_as_usual() -> None:
    speeds = Speeds()
    speeds.measure("s", 16, 1600, 10.0)
    speeds.measure("s", 12, 600, 10.0)
    fresh = speeds.samples_per_s()["s"]
    assert 60 < fresh < 160
    speeds.measure("s", 2, 1, 1.0)
    assert speeds.samples_per_s() == {"s": fresh}, "what is left of a group says little"


def test_larger_groups_show_what_fits_and_smaller_ones_count_once_they_are_the_rule() -> None:
    speeds = Speeds()
    speeds.measure("s", 1, 10, 10.0)
    speeds.measure("s", 16, 1600, 10.0)
    assert speeds.samples_per_s() == {"s": 160.0}
    for _ in range(50):
        speeds.measure("s", 4, 400, HALF_LIFE_S / 2)
    assert speeds.samples_per_s()["s"] == pytest.approx(400 / (HALF_LIFE_S / 2), rel=0.1)


def test_what_does_not_fit_stays_so() -> None:
    speeds = Speeds()
    speeds.does_not_fit("s")
    speeds.measure("s", 1, 1, 1.0)
    assert speeds.samples_per_s() == {"s": 0.0}


# A study of two structures on two devices with crossed speeds, by a simulated clock.


def finished_s(is_placed: bool, gap: float) -> float:
    """When the last of the waiting groups has ended. Workers take a group whenever they are free."""
    speeds = {("s", "a"): gap, ("s", "b"): 1.0, ("t", "a"): 1.0, ("t", "b"): gap}
    waiting = random.Random(0).sample([*"ts" * 20], 40)
    free_s = {"a": 0.0, "b": 0.0}
    stands: dict[str, str] = {}
    while waiting:
        worker = min(free_s, key=free_s.__getitem__)
        if is_placed:
            slots = {each: waiting.count(each) for each in set(waiting)}
            stands = assign(slots, ["a", "b"], speeds, stands) or stands
        chosen = stands.get(worker) if stands.get(worker) in waiting else waiting[0]
        assert chosen is not None
        waiting.remove(chosen)
        free_s[worker] += 1 / speeds[chosen, worker]
    return max(free_s.values())


@pytest.mark.parametrize(("gap", "at_least"), [(2.0, 1.2), (4.0, 1.5)])
def test_a_study_with_crossed_speeds_ends_sooner_than_in_the_order_of_arrival(gap: float, at_least: float) -> None:
    assert finished_s(False, gap) / finished_s(True, gap) >= at_least


def test_speeds_that_differ_by_less_than_the_gain_cost_nothing() -> None:
    assert finished_s(True, 1.0) == finished_s(False, 1.0) and GAIN > 1
