"""The estimator of the slowdown, against hand-computed values and made-up jobs."""

import math
import random
from collections.abc import Callable, Sequence
from itertools import product
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squeezer.policy.alone_steps import Draw
from squeezer.policy.slowdown import MOST_ALONE_STEPS, Pairs, estimate, pairs_of
from tests.support.slow_cases import others_slow

Steps = Sequence[tuple[bool | None, float]]


def ratios(steps: Steps) -> list[float]:
    return [math.exp(pair.log_ratio) for pair in pairs_of((at, ms, of) for at, (of, ms) in enumerate(steps))]


def test_a_block_is_compared_with_four_steps_on_either_side() -> None:
    steps = [
        *[(True, 7.0)] * 5,
        *[(True, 104.0)] * 4,
        (False, 55.0),
        *[(False, 100.0)] * 2,
        (True, 300.0),
        *[(True, 106.0)] * 4,
        (True, 9.0),
    ]
    assert ratios(steps) == [pytest.approx(math.sqrt(1.04 * 1.06))]


def test_of_few_steps_between_two_blocks_each_has_a_half_and_none_counts_twice() -> None:
    between = [(True, 102.0), (True, 104.0), (True, 110.0)]
    steps = [(True, 100.0), (False, 100.0), *between, (False, 100.0), (True, 100.0)]
    assert ratios(steps) == [
        pytest.approx(math.sqrt(1.00 * math.sqrt(1.02 * 1.04))),
        pytest.approx(math.sqrt(1.10 * 1.00)),
    ]


def test_the_first_step_after_a_change_does_not_count() -> None:
    """Alone, it is still fast from the side task before it; squeezed, it is slow from a core that slept."""

    def length_ms(at: int, squeezed: bool) -> float:
        changed = at > 0 and of[at - 1] != squeezed
        return 200 * (1.006 if squeezed else 1.0) * ((1.05 if squeezed else 0.96) if changed else 1.0)

    draw = Draw(observe_steps=6, alone_block_steps=3, round_blocks=10)
    of = [not draw.is_alone(draw.block_of(step), 0) for step in range(1, 4000)]
    found = pairs_of((at, length_ms(at, each), each) for at, each in enumerate(of))
    assert len(found) > 100 and fmean(pair.log_ratio for pair in found) == pytest.approx(math.log(1.006), abs=1e-3)


def test_of_one_alone_or_two_squeezed_steps_the_first_counts() -> None:
    assert ratios([(True, 100.0), (False, 80.0), (True, 100.0), (True, 100.0)]) == [pytest.approx(1.25)]
    assert ratios([(True, 100.0), (False, 80.0), (True, 120.0), (True, 100.0)]) == [pytest.approx(1.25 * 1.2**0.25)]


def test_a_steady_drift_is_no_slowdown() -> None:
    steps = [(at % 12 not in (3, 4, 5), 100 * 1.01**at) for at in range(111)]
    assert ratios(steps)[1:] == pytest.approx([1.0] * 8), "the first block has three steps before it, and four after"


@pytest.mark.parametrize("gap", [(None, 100.0), (True, 0.0), (True, math.nan), (True, math.inf), (False, -1.0)])
def test_nothing_is_compared_across_a_gap(gap: tuple[bool | None, float]) -> None:
    assert ratios([(True, 100.0), (False, 100.0), gap, (True, 900.0)]) == []
    assert ratios([(True, 100.0), (False, 100.0), (True, 110.0), gap, (True, 900.0)]) == [pytest.approx(1.1**0.5)]


def test_a_step_that_was_not_heard_of_is_a_gap() -> None:
    pairs = Pairs()
    assert [pairs.add(*step) for step in ((1, 1.0, True), (2, 1.0, False), (4, 1.0, True), (5, 1.0, False))] == [
        None
    ] * 4


def test_a_block_needs_squeezed_steps_on_both_sides_and_is_short() -> None:
    assert ratios([(False, 100.0), (True, 100.0)]) == []
    assert ratios([(True, 1.0), *[(False, 1.0)] * (MOST_ALONE_STEPS + 1), (True, 1.0)]) == []


def drawn(steps: int, length_ms: Callable[[int, bool], float], seed: int = 0) -> list[float]:
    draw = Draw(observe_steps=6, alone_block_steps=3, round_blocks=10)
    of = [not draw.is_alone(draw.block_of(step), seed, dense=False) for step in range(1, steps)]
    return [pair.log_ratio for pair in pairs_of((at, length_ms(at, each), each) for at, each in enumerate(of))]


RHYTHMS: dict[str, Callable[[int], float]] = {
    "odd steps are twice as long": lambda step: 1 + step % 2,
    "one step of 20 takes three times as long, as a round has": lambda step: 3 if step % 20 == 7 else 1,
    "one step of 50 takes ten times as long": lambda step: 10 if step % 50 == 7 else 1,
    "it grows tenfold": lambda step: 10 if step > 10_000 else 1,
}


@pytest.mark.parametrize(
    ("name", "slowdown"),
    others_slow(
        product(RHYTHMS, [-0.04, 0.0, 0.03, 0.4]),
        [*product(RHYTHMS, [0.0]), *zip(RHYTHMS, [-0.04, 0.03, 0.4, 0.03], strict=True)],
    ),
)
def test_no_rhythm_of_the_job_passes_for_a_slowdown(name: str, slowdown: float) -> None:
    noise, rhythm = random.Random(0), RHYTHMS[name]
    found = estimate(drawn(20_000, lambda step, of: rhythm(step) * (1 + slowdown * of) * noise.lognormvariate(0, 0.02)))
    close = max(0.004, 4 * found.deviation / math.sqrt(1000), 0.07 * slowdown)  # a large one is understated
    assert found.mean == pytest.approx(math.log1p(slowdown), abs=close)


def test_a_stall_of_a_minute_changes_little() -> None:
    calm, stalled = random.Random(0), random.Random(0)
    usual = drawn(4000, lambda _, of: 200 * calm.lognormvariate(0, 0.02))
    once = drawn(4000, lambda step, of: 200 * stalled.lognormvariate(0, 0.02) + 60_000 * (step == 1999))
    assert abs(fmean(usual) - fmean(once)) < 0.001


def test_a_slowdown_that_begins_among_equal_steps_is_no_outlier_for_long() -> None:
    found = drawn(4000, lambda step, of: 200 * (1 + 0.4 * (of and step >= 2000)))
    first = next(at for at, ratio in enumerate(found) if ratio > 0.001)
    assert found[first] < 0.02 and found[first + 3 :] == pytest.approx([math.log(1.4)] * len(found[first + 3 :]))


def test_a_slowdown_that_ends_is_seen_to_end() -> None:
    noise = random.Random(0)
    found = drawn(4000, lambda step, of: 200 * (1 + 0.4 * (of and step < 2000)) * noise.lognormvariate(0, 0.02))
    assert fmean(found[:60]) == pytest.approx(math.log(1.4), abs=0.01) and abs(fmean(found[-60:])) < 0.01


@given(st.lists(st.tuples(st.none() | st.booleans(), st.floats(1e-3, 1e6)), max_size=60))
def test_a_job_whose_times_are_all_longer_has_the_same_slowdown(steps: list[tuple[bool | None, float]]) -> None:
    assert ratios([(of, 3 * ms) for of, ms in steps]) == pytest.approx(ratios(steps), rel=1e-6)
