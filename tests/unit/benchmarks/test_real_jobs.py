"""The slowdown of `benchmarks.real_jobs`, from steps whose truth is known."""

import math
import random
from typing import Any

import pytest

from benchmarks.real_jobs import (
    BASELINE_WINDOWS,
    BLOCK_STEPS,
    LONG_WASH_OUT_STEPS,
    LONG_WINDOWS,
    WINDOWS,
    is_close,
    summary,
)
from benchmarks.windows.modes import (
    ALONE,
    AWAKE,
    CACHE_PLACEBO,
    DEDICATED,
    IDLE,
    NICENESS_19,
    PLACEBO,
    PREEMPTIVE,
    SCHED_IDLE,
    Windows,
)

OURS, STOPPED, SLEPT, GATE, CACHES = 0.02, 0.026, 0.03, 0.005, 0.01


def steps(
    rounds: int, windows: Windows = WINDOWS, affected: int = 1, *, noise: float, drift: float = 0.0, bursts: float = 0.0
) -> list[list[Any]]:
    """Rows of a run in which ours costs `OURS` against an awake core, or `STOPPED`, and sleeping `SLEPT`.

    The first steps of a block, as many as `affected`, still feel the block before.
    """
    rng = random.Random(3)
    longer = {ALONE: SLEPT, AWAKE: 0.0, PLACEBO: GATE, CACHE_PLACEBO: GATE + CACHES, IDLE: OURS, PREEMPTIVE: STOPPED}
    rows = []
    for step in range(windows.first_step(0), windows.first_step(rounds)):
        at = windows.locate(step)
        log = longer[at.mode] + rng.gauss(0, noise) + drift * step + (rng.random() < bursts) * 0.7
        first = 1.5 if at.at < affected else 1.0
        rows.append([at.cycle, at.mode, at.at, 200 * first * math.exp(log)])
    return rows


@pytest.mark.parametrize("disturbed", [{}, {"drift": 1e-4}, {"bursts": 0.05}])
def test_slowdowns_are_found_in_noise_drift_and_bursts(disturbed: dict[str, Any]) -> None:
    found = summary([{"scenario": "pretrain_cost", "steps_ms": steps(300, noise=0.02, **disturbed)}])
    truths = {"slowdown": OURS, "slowdown_from_asleep": OURS - SLEPT, "awake_from_asleep": -SLEPT}
    truths |= {"stopped": STOPPED, "stopped_from_asleep": STOPPED - SLEPT, "ours_over_stopped": OURS - STOPPED}
    for name, truth in {**truths, "gate": GATE, "caches": CACHES, "work": STOPPED - GATE}.items():
        low, high = found[f"pretrain_{name}_ci95"]
        within = 0.75 * (high - low)  # three standard errors
        assert abs(found[f"pretrain_{name}"] - math.expm1(truth)) < within < 0.0075
        assert low < found[f"pretrain_{name}"] < high and found[f"pretrain_{name}_rounds"] == 300
    for name in ("first_step", "first_step_alone"):
        assert 0.1 < found[f"pretrain_{name}"] < 0.5, "half as long again, and so far that it counts as less far"


def test_of_long_blocks_only_steps_count_that_do_not_feel_the_block_before() -> None:
    rows = steps(60, LONG_WINDOWS, LONG_WASH_OUT_STEPS, noise=0.02)
    found = summary([{"scenario": "pretrain_long", "steps_ms": rows}])
    low, high = found["pretrain_slowdown_in_long_blocks_ci95"]
    assert low < math.expm1(OURS - SLEPT) < high and high - low < 0.01
    assert found["pretrain_slowdown_in_long_blocks_rounds"] == 60


def test_rounds_of_further_runs_count_until_the_slowdown_is_known_closely() -> None:
    one = {"scenario": "pretrain_cost", "steps_ms": steps(40, noise=0.04)}
    few, many = [one], [one] * 9
    assert summary(many)["pretrain_slowdown_rounds"] == 360
    assert summary(many)["pretrain_slowdown"] == pytest.approx(summary(few)["pretrain_slowdown"])
    assert not is_close([], "pretrain") and not is_close(few, "pretrain") and is_close(many, "pretrain")
    assert not is_close(many, "denoise")


def test_a_round_that_was_cut_short_does_not_count() -> None:
    found = summary([{"scenario": "denoise_cost", "steps_ms": steps(4, noise=0.01)[: -3 * BLOCK_STEPS - 1]}])
    assert found["denoise_slowdown_rounds"] == 3


def test_baselines_are_judged_by_what_they_cost_and_by_what_they_train() -> None:
    rng, rounds = random.Random(4), 60
    longer = {AWAKE: 0.0, PREEMPTIVE: 0.002, IDLE: -0.003, SCHED_IDLE: 0.001, NICENESS_19: 0.02}
    shares = {PREEMPTIVE: 0.5, IDLE: 0.58, SCHED_IDLE: 0.6, NICENESS_19: 0.7}
    windows = [
        {
            "cycle": cycle,
            "mode": mode,
            "step_ms": [250 * math.exp(log + rng.gauss(0, 0.005)) for _ in range(BLOCK_STEPS - 1)],
            "work": 1000 * shares.get(mode, 0.0) * math.exp(rng.gauss(0, 0.02)),
            "capacity": 1000.0,
            "bubble_ms": 100.0,
        }
        for cycle in range(rounds)
        for mode, log in longer.items()
    ]
    found = summary([{"scenario": "denoise_baselines", "windows": windows}])
    for mode in shares:
        low, high = found[f"denoise_baselines_slowdown_{mode}_ci95"]
        within = 0.75 * (high - low)  # three standard errors
        assert abs(found[f"denoise_baselines_slowdown_{mode}"] - math.expm1(longer[mode])) < within < 0.003
        assert found[f"denoise_baselines_slowdown_{mode}_n"] == rounds
        assert found[f"denoise_baselines_harvest_{mode}"] == pytest.approx(shares[mode], rel=0.02)
    assert set(longer) == {mode for mode, _ in BASELINE_WINDOWS.cycle} - {DEDICATED}


def test_yields_are_means_over_runs_and_unknown_ones_are_left_out() -> None:
    def run(share: float | None) -> dict[str, Any]:
        return {
            "scenario": "denoise_yield",
            "yield": share,
            "waterfall": {"alone": 0.1, "colder": share and 0.9 - share},
        }

    found = summary([run(0.5), run(None), run(0.6)])
    assert found["denoise_yield"] == pytest.approx(0.55) and found["denoise_yield_runs"] == 2
    assert found["denoise_yield_ci95"] == pytest.approx([0.55 - 12.706 * 0.05, 0.55 + 12.706 * 0.05], abs=1e-3)
    assert found["denoise_waterfall"] == {"alone": 0.1, "colder": 0.35}
    assert "pretrain_yield" not in found
