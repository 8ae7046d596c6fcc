"""Forecasts of bubble lengths: quantiles, drift, shifts, and how sure they are."""

import random
from collections.abc import Iterable

import pytest

from squeezer.forecast import SHIFT_AFTER, Forecast, SlotForecast

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
    assert forecast.of(3) == Forecast(10 * MS, 10 * MS, 10 * MS, 10 * MS, (10 * MS,) * 4)
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


def test_what_outlives_its_forecast_is_forecast_anew_by_those_that_did() -> None:
    found = after([1, 30] * 16, quantile=0.4)
    assert (found.length_ns, found.next_ns) == (1 * MS, (30 * MS,) * 4)
    assert 15 * MS < found.mean_ns < 16.5 * MS, "the latest count most"
    noise = random.Random(2)
    found = after((noise.uniform(10, 20) for _ in range(64)), quantile=0.5)
    for times, next_ns in enumerate(found.next_ns, start=2):  # half of what is left, again and again
        assert next_ns / MS == pytest.approx(20 - 10 * 0.5**times, abs=1.6)


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
