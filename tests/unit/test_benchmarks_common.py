"""How benchmarks turn pairs of windows into one figure."""

import math
import random
from statistics import fmean

import pytest

from benchmarks.common import pooled_ratio_with_ci95, ratio_with_ci95


def pairs(number: int, noise: float, truth: float, rng: random.Random) -> list[tuple[float, float]]:
    return [(100 * math.exp(truth + rng.gauss(0, noise)), 100.0) for _ in range(number)]


def test_equal_pairs_have_no_interval() -> None:
    value, interval = ratio_with_ci95([(101.0, 100.0)] * 5)
    assert [value, *interval] == pytest.approx([0.01] * 3)


def test_one_pair_has_an_unknown_interval() -> None:
    value, interval = ratio_with_ci95([(101.0, 100.0)])
    assert value == pytest.approx(0.01) and all(map(math.isnan, interval))


def test_a_noisy_scenario_hardly_moves_a_precise_one() -> None:
    rng = random.Random(1)
    precise = pairs(20, 0.001, 0.0, rng)
    noisy = pairs(20, 0.1, 0.05, rng)
    pooled, interval = pooled_ratio_with_ci95([precise, noisy])
    assert abs(pooled - ratio_with_ci95(precise)[0]) < 1e-4
    assert interval[1] - interval[0] < 0.002


def test_the_interval_holds_the_truth_in_95_of_100_runs() -> None:
    rng = random.Random(2)
    held = []
    for _ in range(2000):
        scenarios = [pairs(8, noise, 0.003, rng) for noise in (0.01, 0.02, 0.05)]
        low, high = pooled_ratio_with_ci95(scenarios)[1]
        held.append(low <= math.expm1(0.003) <= high)
    assert 0.91 < fmean(held) < 0.98
