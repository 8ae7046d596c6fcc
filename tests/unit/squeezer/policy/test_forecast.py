"""Forecasts of bubble lengths: quantiles, drift, shifts, and how sure they are."""

import random
from collections.abc import Iterable

import pytest

from ds_hooks.shared.page.layout import RENEWALS_PER_SLOT
from squeezer.policy.forecast import (
    HISTORY,
    LONGEST_NS,
    MOST_INTERVALS,
    SHIFT_AFTER,
    STALE_AFTER,
    STALLED,
    Forecast,
    SlotForecast,
)

MS = 1_000_000


def after(lengths_ms: Iterable[float], quantile: float = 0.4) -> Forecast:
    forecast = SlotForecast(quantile)
    for ms in lengths_ms:
        forecast.observe(3, round(ms * MS))
    found = forecast.of(3)
    assert found is not None
    return found


def test_little_is_known_at_first() -> None:
    forecast = SlotForecast(0.4)
    assert forecast.of(3) is None and forecast.length_ns(3) is None
    forecast.observe(3, 10 * MS)
    assert forecast.of(3) is None
    forecast.observe(3, 10 * MS)
    assert forecast.of(3) == Forecast(10 * MS, 10 * MS, 10 * MS, 10 * MS)
    assert forecast.of(4) is None, "another slot"
    forecast.forget()
    assert forecast.of(3) is None


@pytest.mark.parametrize("quantile", [0.1, 0.25, 0.4, 0.5])
def test_as_many_bubbles_are_shorter_as_the_quantile_says(quantile: float) -> None:
    noise = random.Random(0)
    forecast = SlotForecast(quantile)
    shorter = in_range = 0
    for index in range(4000):
        length_ns = round(noise.lognormvariate(0, 0.2) * 20 * MS)
        found = forecast.of(3)
        if index >= 100 and found is not None:
            shorter += length_ns < found.length_ns
            in_range += found.low_ns <= length_ns <= found.high_ns
        forecast.observe(3, length_ns)
    assert shorter / 3900 == pytest.approx(quantile, abs=0.06)
    assert in_range / 3900 == pytest.approx(0.8, abs=0.08), "how sure it says it is"


def intervals_ms(
    lengths_ms: Iterable[float], margin_ms: float = 0.5, quantile: float = 0.4
) -> list[tuple[float, float]]:
    """Without the one for stalls."""
    forecast = SlotForecast(quantile)
    for ms in lengths_ms:
        forecast.observe(3, round(ms * MS))
    *found, (stalled_ns, until_ns) = forecast.intervals_ns(3, round(margin_ms * MS))
    assert stalled_ns >= STALLED * found[-1][1] and until_ns == LONGEST_NS
    return [(from_ns / MS, until_ns / MS) for from_ns, until_ns in found]


def test_where_all_end_together_nothing_may_run() -> None:
    noise = random.Random(2)
    ((from_ms, until_ms),) = intervals_ms(20 + noise.gauss(0, 0.2) for _ in range(64))
    assert from_ms == 0 and 19 < until_ms < 19.7


def test_each_of_two_places_where_many_end_is_kept_clear_of() -> None:
    assert intervals_ms([1, 30] * 16) == [(0, 0.5), (1, 29.5)]
    assert intervals_ms([1, 30] * 16, margin_ms=2) == [(1, 28)], "too short an interval is none"


def test_where_ends_are_far_between_only_the_last_are_kept_clear_of() -> None:
    found = intervals_ms(range(10, 42))
    assert found[0][0] == 0 and found[0][1] > 37
    assert intervals_ms(range(10, 42), quantile=0) == [(0, 9.5)], "the quantile of the shortest"


def test_a_lower_quantile_also_leaves_out_the_time_before_the_last_ends() -> None:
    lengths_ms = [10 + 3 * (at * 5 % 8) for at in range(32)]
    assert intervals_ms(lengths_ms, quantile=0.4) == [(0, 27.5), (28, 30.5)]
    assert intervals_ms(lengths_ms, quantile=0.05) == [(0, 9.5), (19, 21.5), (22, 24.5), (25, 27.5)]
    assert intervals_ms(lengths_ms, quantile=0.01) == [(0, 9.5)]


@pytest.mark.parametrize("margin_ms", [0.3, 1])
def test_a_lower_quantile_never_opens_more(margin_ms: float) -> None:
    noise = random.Random(5)
    lengths_ms = [noise.uniform(10, 40) for _ in range(32)]
    quantiles = (0, 0.02, 0.05, 0.1, 0.2, 0.4)
    opened_ms = [sum(b - a for a, b in intervals_ms(lengths_ms, margin_ms, quantile)) for quantile in quantiles]
    assert opened_ms == sorted(opened_ms) and opened_ms[-1] > 2 * opened_ms[0]


def test_a_wider_margin_never_opens_more() -> None:
    noise = random.Random(3)
    lengths_ms = [noise.lognormvariate(0, 0.6) * 10 for _ in range(32)]
    opened_ms = [sum(b - a for a, b in intervals_ms(lengths_ms, margin_ms)) for margin_ms in (0.1, 0.3, 0.6, 1.2, 2.4)]
    assert opened_ms == sorted(opened_ms, reverse=True) and opened_ms[0] > 2 * opened_ms[-1]


def test_intervals_are_few_apart_and_in_order() -> None:
    noise = random.Random(4)
    for _ in range(200):
        found = intervals_ms([noise.choice((3, 6, 9, 12, 15, 18)) + noise.random() / 10 for _ in range(32)])
        bounds = [bound for each in found for bound in each]
        assert len(found) <= MOST_INTERVALS and bounds == sorted(bounds)
        assert all(until_ms - from_ms >= 0.5 for from_ms, until_ms in found)


def test_all_renewals_of_a_bubble_fit_into_the_page() -> None:
    long_ms = [8.2 + 8 * (at % 8) for at in range(16)]
    assert intervals_ms(long_ms, quantile=0.1)[0][0] == 0, "this one is the permit"
    assert len(intervals_ms(long_ms, quantile=0.1)) == MOST_INTERVALS
    half_are_short = intervals_ms([ms for one in long_ms for ms in (0.2, one)], quantile=0.1)
    assert half_are_short[0][0] > 0 and len(half_are_short) == RENEWALS_PER_SLOT - 1, "and the one for stalls"


def test_nothing_is_opened_of_what_is_unknown_or_too_short() -> None:
    forecast = SlotForecast(0.4)
    assert forecast.intervals_ns(3, 0) == []
    for _ in range(8):
        forecast.observe(3, MS)
    assert forecast.intervals_ns(3, MS // 2) != [] == forecast.intervals_ns(3, MS)
    forecast.forget()
    assert forecast.intervals_ns(3, 0) == []


def test_the_mean_is_of_the_same_lengths_and_weights() -> None:
    assert after([10, 10, 10]).mean_ns == 10 * MS
    assert after([10, 20]).mean_ns / MS == pytest.approx((10 * 0.5 ** (1 / 8) + 20) / (1 + 0.5 ** (1 / 8)))


def test_noise_makes_it_less_sure() -> None:
    noise = random.Random(0)
    calm, wild = (after(20 + noise.gauss(0, deviation) for _ in range(64)) for deviation in (0.2, 4.0))
    assert wild.high_ns - wild.low_ns > 5 * (calm.high_ns - calm.low_ns)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_another_level_is_followed_within_a_few_steps(factor: float) -> None:
    noise = random.Random(1)
    lengths = [20 * noise.uniform(0.95, 1.05) for _ in range(100)]
    lengths += [20 * factor * noise.uniform(0.95, 1.05) for _ in range(SHIFT_AFTER)]
    assert after(lengths).length_ns == pytest.approx(20 * factor * MS, rel=0.06)


def test_one_that_stalls_once_changes_little() -> None:
    steady = [20.0 + 0.01 * index for index in range(50)]
    assert after([*steady, 1000.0]).length_ns == pytest.approx(after(steady).length_ns, rel=0.01)


def test_a_slow_drift_is_followed() -> None:
    lengths = [20 * 1.01**index for index in range(100)]
    assert after(lengths).length_ns == pytest.approx(lengths[-1] * MS, rel=0.15)


def bubbles(count: int, *, pace_ms: float, gap_noise: float, pace_noise: float, seed: int = 6) -> list[tuple[int, int]]:
    """(length, gap) in ns: each bubble ends `pace_ms` after the one before it, however long our own work takes."""
    noise = random.Random(seed)
    found = []
    for _ in range(count):
        gap_ms = 5 + noise.uniform(-gap_noise, gap_noise)
        found.append((pace_ms + noise.uniform(-pace_noise, pace_noise) - gap_ms, gap_ms))
    return [(round(length_ms * MS), round(gap_ms * MS)) for length_ms, gap_ms in found]


def test_where_peers_keep_pace_an_end_follows_the_bubble_before() -> None:
    forecast = SlotForecast(0.4)
    errors_ns, blind_ns = [], []
    for length_ns, gap_ns in bubbles(200, pace_ms=15, gap_noise=2, pace_noise=0.05):
        informed, blind = forecast.of(3, gap_ns), forecast.of(3)
        if informed is not None and blind is not None and forecast.end(3) is not None:
            errors_ns.append(abs(informed.length_ns - length_ns))
            blind_ns.append(abs(blind.length_ns - length_ns))
            assert informed.high_ns - informed.low_ns < 0.2 * MS < 2 * MS < blind.high_ns - blind.low_ns
        forecast.observe(3, length_ns, gap_ns)
    assert len(errors_ns) > 180, "it shows within some bubbles"
    assert max(errors_ns) < 0.2 * MS and 10 * sum(errors_ns) < sum(blind_ns)
    (from_ns, until_ns), _ = forecast.intervals_ns(3, MS // 10)
    assert from_ns == 0 and 14.7 * MS < until_ns < 15 * MS, "counted from the end of the bubble before"


def test_where_they_do_not_its_length_tells_as_much() -> None:
    forecast = SlotForecast(0.4)
    for length_ns, gap_ns in bubbles(64, pace_ms=15, gap_noise=0.05, pace_noise=2):
        forecast.observe(3, length_ns, gap_ns)
        assert forecast.end(3) is None
    assert forecast.of(3, 5 * MS) == forecast.of(3)
    (_, until_ns), _ = forecast.intervals_ns(3, MS // 10)
    assert until_ns < 12 * MS, "counted from the bubble's start"


def test_a_small_difference_changes_nothing() -> None:
    forecast, counts_by_end = SlotForecast(0.4), set()
    for length_ns, gap_ns in bubbles(400, pace_ms=15, gap_noise=0.5, pace_noise=1):
        forecast.observe(3, length_ns, gap_ns)
        counts_by_end.add(forecast.end(3) is not None)
    assert counts_by_end == {False}, "they vary by about as much"


def test_when_peers_lose_their_pace_its_length_counts_again() -> None:
    forecast = SlotForecast(0.4)
    for length_ns, gap_ns in bubbles(64, pace_ms=15, gap_noise=2, pace_noise=0.05):
        forecast.observe(3, length_ns, gap_ns)
    assert forecast.end(3) is not None
    for length_ns, gap_ns in bubbles(32, pace_ms=15, gap_noise=0.05, pace_noise=2):
        forecast.observe(3, length_ns, gap_ns)
    assert forecast.end(3) is None


def test_a_bubble_that_already_should_be_over_is_forecast_as_nothing() -> None:
    forecast = SlotForecast(0.4)
    for length_ns, gap_ns in bubbles(64, pace_ms=15, gap_noise=2, pace_noise=0.05):
        forecast.observe(3, length_ns, gap_ns)
    assert forecast.of(3, 16 * MS) == (0, 0, 0, 0)


def test_without_gaps_only_lengths_count() -> None:
    forecast = SlotForecast(0.4)
    for length_ns, _ in bubbles(64, pace_ms=15, gap_noise=2, pace_noise=0.05):
        forecast.observe(3, length_ns)
    assert forecast.end(3) is None and forecast.of(3, 5 * MS) == forecast.of(3)


def test_old_values_are_forgotten_however_many_there_were() -> None:
    noise = random.Random(7)
    lengths_ms = [noise.uniform(10, 11) for _ in range(2000)]
    assert after(lengths_ms) == after([*[10.0] * 4, *lengths_ms[-64:]]), "their weights grow, and are scaled down"


def longest_permit_ms(*, told: bool) -> float:
    """Of bubbles of 10 ms, three of thirty left shut; they do not end before 3 ms after the side task's last interval.

    Args:
        told: whether the forecast learns that it may.
    """
    forecast, longest_ns = SlotForecast(0.4), 0
    for index in range(300):
        opened = index >= 12 and index % 30 >= 3
        permit_ns = forecast.intervals_ns(3, MS)[-2][1] if opened else 0  # the last one is for stalls
        longest_ns = max(longest_ns, permit_ns)
        forecast.observe(3, max(10 * MS, permit_ns + 3 * MS), may_be_late=told and opened)
    return longest_ns / MS


def test_a_permit_does_not_follow_the_delay_that_it_causes() -> None:
    assert longest_permit_ms(told=True) == 9
    assert longest_permit_ms(told=False) > 20


def after_opened(forecast: SlotForecast, *lengths_ms: float) -> float | None:
    """The forecast in ms after further bubbles in which a side task ran."""
    for ms in lengths_ms:
        forecast.observe(3, round(ms * MS), may_be_late=True)
    found_ns = forecast.length_ns(3)
    return None if found_ns is None else found_ns / MS


def shut(*lengths_ms: float) -> SlotForecast:
    forecast = SlotForecast(0.4)
    for ms in lengths_ms:
        forecast.observe(3, round(ms * MS))
    return forecast


def test_bubbles_that_have_become_longer_are_believed_once_shut_ones_are_as_long() -> None:
    forecast = shut(*[10] * 8)
    assert after_opened(forecast, *[15] * HISTORY) == 10
    for _ in range(SHIFT_AFTER):
        forecast.observe(3, 15 * MS)
    assert after_opened(forecast, *[15] * HISTORY) == 15


def test_shorter_bubbles_and_another_level_are_believed_at_once() -> None:
    assert after_opened(shut(*[10] * 8), *[5] * HISTORY) == 5
    assert after_opened(shut(*[10] * 8), *[10 * STALLED] * SHIFT_AFTER) == 10 * STALLED


def test_all_lengths_are_believed_where_too_few_bubbles_stay_shut_to_tell() -> None:
    assert after_opened(shut(*[10] * 7), *[15] * HISTORY) == 15
    forecast = shut(*[10] * 8)
    assert after_opened(forecast, *[15] * STALE_AFTER) == 10
    assert after_opened(forecast, *[15] * HISTORY) == 15
