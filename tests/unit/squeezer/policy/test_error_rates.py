"""How often the guard errs, by simulation: the rates that `squeezer.policy.evidence` states."""

import numpy as np
import pytest

from benchmarks.guard_power import MOST_SQUEEZED, bursts, heavy, simulate, two_lengths, white
from squeezer.config import SqueezeTable
from squeezer.policy.evidence import ERROR_RATE, errors_allowed
from tests.support.slow_cases import others_slow


def test_a_bound_that_may_look_at_any_time_is_wrong_as_rarely_as_it_says() -> None:
    """Normal differences of unknown variance, looked at after each of 300."""
    random = np.random.default_rng(0)
    wrong = 0
    for _ in range(1000):
        values = random.normal(0, 1, 300)
        sums, squares, counts = np.cumsum(values), np.cumsum(values**2), np.arange(1, 301)
        for count in range(3, 301):
            mean = sums[count - 1] / count
            deviation = np.sqrt((squares[count - 1] - count * mean**2) / (count - 1))
            if mean > errors_allowed(int(counts[count - 1]), count - 1) * deviation / np.sqrt(count):
                wrong += 1
                break
    assert wrong <= 1000 * ERROR_RATE


@pytest.mark.parametrize(
    ("noise", "deviation", "slowdown", "most_alarms", "most_lost"),
    others_slow(
        [
            *[(white, 0.03, 0.0, 1, 0.02), (bursts, 0.1, 0.0, 6, 0.06), (heavy, 0.03, 0.0, 1, 0.02)],
            (white, 0.03, 0.01, 10, 1),
        ],
        [(bursts, 0.1, 0.0, 6, 0.06), (white, 0.03, 0.01, 10, 1)],
    ),
)
def test_alarms_in_40_000_steps(noise, deviation, slowdown, most_alarms, most_lost) -> None:  # type: ignore[no-untyped-def]
    outcome = simulate(noise(np.random.default_rng(5), 40_000, deviation), slowdown, 5)
    assert outcome.shut <= most_alarms
    assert outcome.squeezed >= MOST_SQUEEZED * (1 - most_lost)


def test_steps_of_two_lengths_at_random_are_hardly_ever_taken_for_a_slowdown() -> None:
    """Where few squeezed steps lie between alone ones, two comparisons in a row may be far out by chance."""
    often = SqueezeTable(alone_share=0.3)
    found = [simulate(two_lengths(np.random.default_rng(s), 6000, 0.02), 0.0, s, squeeze=often) for s in range(3)]
    assert sum(each.shut for each in found) <= 2
    harmed = simulate(two_lengths(np.random.default_rng(0), 6000, 0.02), 0.1, 0, squeeze=often)
    assert harmed.shut > 2 and harmed.squeezed < 0.3, "a true slowdown is found all the same"


SLOWDOWNS = [(0.02, 1000, 0.012), (0.04, 150, 0.01), (0.4, 60, 0.015)]


@pytest.mark.parametrize(
    ("noise", "slowdown", "most_steps", "most_cost"),
    others_slow(
        [(noise, *slowdown) for noise in (white, bursts) for slowdown in SLOWDOWNS],
        [(white, *SLOWDOWNS[0]), (bursts, *SLOWDOWNS[1]), (white, *SLOWDOWNS[2])],
    ),
)
def test_a_slowdown_is_found_and_kept_out(noise, slowdown: float, most_steps: int, most_cost: float) -> None:  # type: ignore[no-untyped-def]
    found = [simulate(noise(np.random.default_rng(seed), 3000, 0.03), slowdown, seed) for seed in range(15)]
    after = sorted(each.shut_at or 3000 for each in found)
    assert after[7] <= most_steps, "the median"
    assert np.mean([each.cost for each in found]) <= most_cost


@pytest.mark.parametrize(
    ("deviation", "slowdown", "most_steps"),
    others_slow([(0.03, 0.4, 80), (0.001, 0.4, 180), (0.005, 0.05, 180)], [(0.03, 0.4, 80), (0.001, 0.4, 180)]),
)
def test_a_slowdown_that_begins_late_is_found_as_soon(deviation: float, slowdown: float, most_steps: int) -> None:
    """Also where steps have been so equal that the first longer ones look like outliers."""
    found = [simulate(white(np.random.default_rng(s), 3000, deviation), slowdown, s, begins=1500) for s in range(9)]
    assert sorted(each.shut_at or 3000 for each in found)[4] <= most_steps


def test_fewer_steps_are_left_alone_once_the_slowdown_is_known_to_be_within_the_budget() -> None:
    outcome = simulate(white(np.random.default_rng(0), 3000, 0.01), 0.0, 0)
    assert outcome.squeezed > 1.06 * MOST_SQUEEZED
    found = [simulate(white(np.random.default_rng(s), 3000, 0.01), 0.04, s, begins=1500) for s in range(9)]
    assert sorted(each.shut_at or 3000 for each in found)[4] <= 150, "a slowdown that begins then is found all the same"
    assert max(each.cost for each in found) <= 0.008


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_small_slowdown_that_begins_late_amid_noise_is_not_passed_over(ranks: int) -> None:
    found = [simulate(white(np.random.default_rng(s), 4500, 0.03), 0.04, s, begins=3000, ranks=ranks) for s in range(6)]
    assert max(each.shut_at or 1500 for each in found) <= 400


def test_squeezing_that_makes_steps_shorter_is_let_alone() -> None:
    outcome = simulate(white(np.random.default_rng(0), 5000, 0.03), -0.04, 0)
    assert outcome.shut == 0 and outcome.squeezed > 0.98 * MOST_SQUEEZED
