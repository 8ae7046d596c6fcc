"""Ratios and their intervals."""

import math
import random
from statistics import fmean

import pytest

from benchmarks.shared.intervals import ratio_with_ci95


def pairs(number: int, noise: float, truth: float, rng: random.Random) -> list[tuple[float, float]]:
    return [(100 * math.exp(truth + rng.gauss(0, noise)), 100.0) for _ in range(number)]


def test_equal_pairs_have_no_interval() -> None:
    value, interval = ratio_with_ci95([(101.0, 100.0)] * 5)
    assert [value, *interval] == pytest.approx([0.01] * 3)


def test_one_pair_has_an_unknown_interval() -> None:
    value, interval = ratio_with_ci95([(101.0, 100.0)])
    assert value == pytest.approx(0.01) and all(map(math.isnan, interval))


def test_the_interval_holds_the_truth_in_95_of_100_runs() -> None:
    rng = random.Random(2)
    held = []
    for _ in range(2000):
        low, high = ratio_with_ci95(pairs(8, 0.02, 0.003, rng))[1]
        held.append(low <= math.expm1(0.003) <= high)
    assert 0.935 < fmean(held) < 0.965
