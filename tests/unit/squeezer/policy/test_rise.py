"""When squeezed steps count as longer than before, and how often that may be said."""

import math
import random

import pytest

from squeezer.policy.rise import LATEST, MEMORY_STEPS, NOTICES, STEPS_PER_NOTICE, Rise


def noticed(rise: Rise, logs: list[float]) -> list[int]:
    """After which of these steps."""
    return [at for at, log in enumerate(logs) if rise.add(log)]


def noise(steps: int, deviation: float, seed: int = 0) -> list[float]:
    drawn = random.Random(seed)
    return [drawn.gauss(0, deviation) for _ in range(steps)]


@pytest.mark.parametrize(
    ("deviation", "by", "most"), [(0.01, 0.4, 4), (0.1, 0.4, 6), (0.01, 0.04, 8), (0.03, 0.04, 40)]
)
def test_a_rise_is_noticed_soon_the_sooner_the_larger_it_is(deviation: float, by: float, most: int) -> None:
    after = []
    for seed in range(9):
        rise, calm = Rise(0.01), noise(300, deviation, seed)
        assert noticed(rise, calm[:200]) == []
        after.append((noticed(rise, [math.log1p(by) + log for log in calm[200:]]) or [100])[0])
    assert sorted(after)[4] <= most


def test_it_says_by_how_much_and_compares_what_follows_with_what_follows() -> None:
    rise = Rise(0.01)
    assert noticed(rise, noise(100, 0.01)) == []
    risen = [rise.add(0.3 + log) for log in noise(100, 0.01, 1)]
    assert [found for found in risen if found] == [pytest.approx(0.3, abs=0.05)]


@pytest.mark.parametrize("fall", [0.0, -0.3, 0.005])
def test_equal_or_shorter_steps_are_none_nor_is_what_the_budget_allows(fall: float) -> None:
    rise = Rise(0.01)
    assert noticed(rise, [0.0] * 200 + [fall] * 200) == []


def test_single_long_steps_and_a_sort_that_is_often_long_are_none() -> None:
    drawn = random.Random(0)
    stalls = [3.0 if drawn.random() < 0.01 else log for log in noise(3000, 0.02)]
    assert len(noticed(Rise(0.01), stalls)) <= 1
    two_lengths = [1.9 if drawn.random() < 0.2 else log for log in noise(3000, 0.02)]
    assert len(noticed(Rise(0.01), two_lengths)) <= 2
    assert noticed(Rise(0.01), [0.7 * (at % 2) for at in range(1000)]) == [], "every other step"


@pytest.mark.parametrize("seed", range(5))
def test_every_other_step_twice_as_long_is_none_though_some_steps_are_left_out(seed: int) -> None:
    """Which are long is then no rhythm any more, and a median of both sorts is one of them by chance."""
    drawn = random.Random(seed)
    blocks = [range(at, at + 3) for at in range(0, 3000, 3) if drawn.random() < 0.9]
    assert (
        noticed(Rise(0.01), [math.log(2) * (at % 2) + drawn.gauss(0, 0.01) for block in blocks for at in block]) == []
    )


def test_a_machine_of_many_speeds_is_noticed_now_and_then_only() -> None:
    """A staircase: each step up is a clear rise."""
    steps = 20 * STEPS_PER_NOTICE
    found = noticed(Rise(0.01), [0.1 * (at // (2 * max(LATEST))) for at in range(steps)])
    assert 10 < len(found) <= NOTICES + 20


def test_a_new_beginning_forgets_the_steps_so_far() -> None:
    rise = Rise(0.01)
    noticed(rise, [0.0] * MEMORY_STEPS)
    rise.begin_anew()
    assert noticed(rise, [0.4] * MEMORY_STEPS) == []
