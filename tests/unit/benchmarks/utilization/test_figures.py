"""The blocks of `bubble_utilization`: what they show of steps and work whose truth is known, and how a run goes on."""

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bubble_utilization
from benchmarks.studies import ENDLESS_DIGITS, ENDLESS_PLACEBO_DIGITS
from benchmarks.utilization.figures import COMPARED, SHORT, TITLES, short_table, summary, table
from benchmarks.utilization.scenarios import ARMS, BLOCK_STEPS, GHOSTS, LONG, MODES, NAIVE
from benchmarks.windows.modes import CACHE_PLACEBO, COOPERATIVE, PREEMPTIVE, STEP_GRAIN
from trials.study import load_study

STOPPED = 'slowdown: ours, `preemptive = "stop"`'
LONGER = {
    "awake": 0.0,
    "alone": 0.03,
    "placebo": 0.005,
    "cache_placebo": 0.009,
    "preemptive": 0.01,
    "cooperative": 0.006,
    "sched_idle": 0.004,
    "step_grain": 0.007,
    "niceness_19": 0.3,
    "least_weight": 0.25,
}
HARVESTS = {"preemptive": 0.9, "cooperative": 0.8, "sched_idle": 0.95, "step_grain": 0.5, "step_grain_8": 0.6}


def run_of(scenario: str, rounds: int, modes: tuple[str, ...], *, noise: float = 0.02) -> dict[str, Any]:
    rng = random.Random(5)
    windows = []
    for cycle in range(rounds):
        for mode in rng.sample(modes, len(modes)):
            log = LONGER.get(mode, 0.0) + 1e-3 * cycle  # the machine becomes slower
            step_ms = [200 * math.exp(log + rng.gauss(0, noise)) for _ in range(BLOCK_STEPS - 1)]
            slice_ = rng.uniform(0.7, 1.3)  # of time in which the dedicated rate is measured
            work = 1000 * HARVESTS.get(mode, 0.3) * math.exp(rng.gauss(0, noise))
            times = {"bubble_ms": 80.0}
            place: dict[str, Any] = {"cycle": cycle, "mode": mode, "step_ms": step_ms}
            windows.append({**place, "work": work, "capacity": 1000 / slice_, **times})
    return {"scenario": scenario, "run": 0, "windows": windows}


def test_slowdowns_of_all_arms_are_found_in_noise_and_drift() -> None:
    found = summary(
        [
            run_of("long_arms", 200, (*MODES[ARMS], CACHE_PLACEBO)),
            run_of("long_naive", 200, MODES[NAIVE]),
            run_of("dualpipev_arms", 200, MODES[ARMS]),
        ]
    )
    for kind, compared in COMPARED.items():
        for name, (of, over) in compared.items():
            truth = math.expm1(LONGER.get(of, 0.0) - LONGER.get(over, 0.0))
            low, high = found[f"long_{name}_ci95"]
            assert low < found[f"long_{name}"] < high and found[f"long_{name}_n"] == 200
            assert abs(found[f"long_{name}"] - truth) < 0.75 * (high - low) < 0.006, (kind, name)
    assert "dualpipev_caches" not in found and "dualpipev_gate" in found


def test_ours_is_compared_with_the_step_grain_that_harvests_most_in_the_same_rounds() -> None:
    found = summary([run_of("long_arms", 100, MODES[ARMS])])
    assert found["long_best_step_grain"] == "step_grain_8"
    for mode in (PREEMPTIVE, COOPERATIVE):
        ratio = HARVESTS[mode] / HARVESTS["step_grain_8"]
        low, high = found[f"long_harvest_{mode}_over_step_grain_ci95"]
        assert low < ratio < high and high - low < 0.02, "the dedicated rate, which varies, is in both"
    low, high = found[f"long_harvest_{STEP_GRAIN}_ci95"]
    assert low < HARVESTS[STEP_GRAIN] < high


def test_a_harvest_is_that_of_the_arms_whatever_naive_ones_do_to_it_elsewhere() -> None:
    arms, naive = run_of("long_arms", 20, MODES[ARMS]), run_of("long_naive", 10, MODES[NAIVE])
    for window in naive["windows"]:
        window["work"] /= 3
    alone = summary([arms])
    assert alone["long_harvest_preemptive_n"] == 20
    for runs in ([arms, naive], [naive, arms]):
        found = summary(runs)
        assert alone.items() <= found.items()
        assert not {name for name in found.keys() - alone.keys() if "harvest" in name}


def test_a_step_grain_that_never_fits_has_no_ratio_and_a_round_cut_short_no_slowdown() -> None:
    run = run_of("many_arms", 5, MODES[ARMS])
    for window in run["windows"]:
        if window["mode"].startswith(STEP_GRAIN):
            window["work"] = 0.0
    run["windows"] = [w for w in run["windows"] if (w["cycle"], w["mode"]) != (4, "awake")]
    found = summary([run])
    assert found["many_harvest_step_grain"] == 0.0
    assert not any(name.endswith("_over_step_grain") for name in found)
    assert found["many_slowdown_n"] == 4 and found["many_slowdown_from_asleep_n"] == 5


def test_yields_are_means_over_runs_and_unknown_ones_are_left_out() -> None:
    def run(of: str, share: float | None) -> dict[str, Any]:
        rest = None if share is None else 1 - share
        return {"scenario": f"{of}_yield", "yield": share, "waterfall": {"alone": rest}}

    found = summary([run("many", 0.5), run("many", None), run("many", 0.7), run("long", None)])
    assert found["many_yield"] == pytest.approx(0.6) and found["many_yield_n"] == 2
    assert found["many_yield_waterfall"] == {"alone": pytest.approx(0.4)}
    assert not any(name.startswith("long") for name in found)


def test_the_table_shows_what_is_measured_and_says_what_is_not() -> None:
    runs = [run_of("long_arms", 30, MODES[ARMS]), {"scenario": "many_yield", "yield": 0.5, "waterfall": {"lost": 0.5}}]
    figures = summary(runs)
    lines = {line.split(" | ")[0].strip("| "): line for line in table(figures).splitlines()}
    assert f"{100 * figures['long_slowdown']:+.1f}%".replace("-", "−") in lines[STOPPED]
    assert "n = 30) | not measured | not measured |" in lines[STOPPED]
    assert "not measured | not measured | not measured" in lines["slowdown: naive, at niceness 19"]
    best = f"{figures['long_harvest_step_grain_8']:.0%}"
    assert f"| {best} (" in lines["harvest: step grain, with the best of K = 16, 8 and 4"]
    assert "| not measured | 50% (n = 1) | not measured |" in lines["yield with the defaults"]
    assert "| not measured | 50% | not measured |" in lines["not yielded: lost"]
    assert list(TITLES) == list(GHOSTS)
    short = short_table(figures).splitlines()
    assert len(short) == 2 + len(SHORT) and set(short) <= set(table(figures).splitlines())


def test_side_task_and_baselines_train_as_many_trials_for_as_long() -> None:
    ours, theirs = load_study(ENDLESS_PLACEBO_DIGITS), load_study(ENDLESS_DIGITS)
    assert (ours.rows, ours.trials, ours.epochs) == (theirs.rows, theirs.trials, theirs.epochs)
    assert not ours.rungs


def test_an_interrupted_run_goes_on_where_it_was_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    measured: list[str] = []

    def measure(scenario: str, *, quick: bool) -> dict[str, Any]:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(scenario)
        if scenario.endswith((ARMS, NAIVE)):
            return run_of(scenario, 3, MODES[scenario.removeprefix(f"{LONG}_")])
        return {"yield": 0.5, "waterfall": {"alone": 0.5}}

    monkeypatch.setattr(bubble_utilization, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["bubble_utilization", "--quick", "--json", str(file)])
    with pytest.raises(KeyboardInterrupt):
        bubble_utilization.main()
    stopped = json.loads(file.read_text())
    assert [run["scenario"] for run in stopped["runs"]] == measured
    first, measured[:] = [*measured], []
    bubble_utilization.main()
    whole = json.loads(file.read_text())
    assert len(first) == 2 and not {*first} & {*measured}
    assert {*first, *measured} == {"long_arms", "long_naive", "long_yield"}
    assert whole["runs"][:2] == stopped["runs"] and whole["summary"]["long_yield"] == 0.5
