"""Harvests are compared at equal speed of the machine."""

import math
import random
from statistics import fmean

import pytest

from benchmarks.utilization.harvest_ratio import harvest_ratio, harvest_ratios, speed_power
from benchmarks.windows.figures import Window

TRUTH = 0.9


def window(cycle: int, mode: str, speed: float, work_per_ms: float) -> Window:
    """Of a machine whose side task gains by `speed` twice: it computes faster, and in longer bubbles."""
    work = 300.0 * work_per_ms * speed**2
    return Window(cycle=cycle, mode=mode, work=work, bubble_ms=300.0, computing_ms=100.0 / speed)


def run(rng: random.Random, cycles: int = 8, noise: float = 0.05, spread: float = 0.15) -> list[Window]:
    """Each window meets a machine of another speed."""
    found = []
    for cycle in range(cycles):
        for mode, work_per_ms in (("alone", 0.0), ("cooperative", TRUTH), ("oracle", 1.0), ("step_grain", 0.7)):
            speed, more = math.exp(rng.gauss(0, spread)), math.exp(rng.gauss(0, noise))
            found.append(window(cycle, mode, speed, work_per_ms * more))
    return found


def test_the_machines_speed_is_taken_out() -> None:
    rng = random.Random(7)
    found = run(rng, cycles=40, noise=0.01)
    figures = harvest_ratio(found, "cooperative", "oracle")
    assert figures is not None
    low, high = figures["ci95"]
    assert low < TRUTH < high and high - low < 0.02
    assert figures["speed_power"] == pytest.approx(2.0, abs=0.05)
    low, high = figures["plain_ci95"]
    assert low < TRUTH < high and high - low > 0.1


def test_the_interval_holds_the_truth_in_95_of_100_runs() -> None:
    rng = random.Random(3)
    held, errors, plain_errors = [], [], []
    for _ in range(400):
        figures = harvest_ratio(run(rng), "cooperative", "oracle")
        assert figures is not None
        held.append(figures["ci95"][0] <= TRUTH <= figures["ci95"][1])
        errors.append(figures["ratio"] - TRUTH)
        plain_errors.append(figures["plain_ratio"] - TRUTH)
    assert 0.91 < fmean(held) < 0.985
    assert abs(fmean(errors)) < 0.01, "no bias"
    assert fmean(map(abs, errors)) < 0.5 * fmean(map(abs, plain_errors))


def test_at_one_speed_nothing_is_corrected() -> None:
    found = run(random.Random(5), spread=0.0)
    figures = harvest_ratio(found, "cooperative", "step_grain")
    assert figures is not None and figures["speed_power"] == 0.0
    assert figures["ratio"] == pytest.approx(figures["plain_ratio"]) and figures["ci95"] == pytest.approx(
        figures["plain_ci95"]
    )


def test_ungated_windows_and_those_alone_say_nothing_of_the_speed() -> None:
    found = run(random.Random(9))
    strange = [window(cycle, mode, 3.0, 50.0) for cycle in range(8) for mode in ("alone", "naive")]
    assert harvest_ratio([*found, *strange], "cooperative", "oracle") == harvest_ratio(found, "cooperative", "oracle")


def test_a_window_that_got_nothing_counts_for_the_ratio_but_not_for_the_speed() -> None:
    found = run(random.Random(11), noise=0.0)
    power = speed_power(found)
    nothing = [Window(cycle=w.cycle, mode=w.mode, work=0.0, bubble_ms=300.0, computing_ms=80.0) for w in found[::4]]
    assert power == pytest.approx(2.0) and speed_power([*found, *nothing]) == pytest.approx(power)
    lost = next(w for w in found if w.mode == "cooperative")
    before = harvest_ratio(found, "cooperative", "oracle")
    lost.work = 0.0
    after = harvest_ratio(found, "cooperative", "oracle")
    assert before and after and after["ratio"] < 0.95 * before["ratio"]


def test_where_there_is_no_measure_there_is_no_ratio() -> None:
    found = run(random.Random(13))
    assert harvest_ratio(found[:4], "cooperative", "oracle") is None, "one cycle has no interval"
    assert harvest_ratio(found, "cooperative", "preemptive") is None, "it never ran"
    silent = [w for w in found if w.mode != "step_grain"] + [window(c, "step_grain", 1.0, 0.0) for c in range(8)]
    assert harvest_ratio(silent, "cooperative", "step_grain") is None, "what got nothing is no measure"


def test_a_cycle_cut_short_counts_for_neither() -> None:
    found = run(random.Random(15))
    more = window(8, "cooperative", 1.0, 40.0)
    assert harvest_ratio([*found, more], "cooperative", "oracle") == harvest_ratio(found, "cooperative", "oracle")


def test_which_ratios_are_told_of_a_mode() -> None:
    found = run(random.Random(17))
    assert set(harvest_ratios(found, "cooperative")) == {"harvest_over_oracle", "harvest_over_step_grain"}
    assert set(harvest_ratios(found, "preemptive")) == {"harvest_over_step_grain"}
    assert harvest_ratios(found, "oracle") == {}
