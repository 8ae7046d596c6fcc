"""The claims on speed: their method against known truths, and the documents against the raw runs."""

import json
import math
import random
from typing import Any

import pytest

from benchmarks.published_figures import (
    details,
    fusion_table,
    main,
    other_table,
    over_own_single,
    raw_runs,
    readme_table,
    real_job_parts,
    real_jobs_table,
    twins_table,
)
from benchmarks.shared.paths import RESULTS, ROOT
from benchmarks.utilization.class_figures import (
    class_harvest,
    class_slowdown,
    cycle_ratios,
    harvest_ratio_range,
    intervals_above_zero,
    mean_with_ci95,
    scenario_slowdown,
    signed,
    speed_table,
)
from benchmarks.utilization.ghosts import REAL, all_ghosts
from benchmarks.utilization.scenario_classes import (
    CLASSES,
    GHOST_STAGES,
    LONG_BUBBLES,
    REAL_JOB,
    REPEATS,
    SHORT_BELOW_MS,
    SHORT_BUBBLES,
    ScenarioClass,
)
from benchmarks.windows.figures import Window
from benchmarks.windows.modes import ALONE, COOPERATIVE, ORACLE, PREEMPTIVE, SCHED_IDLE, STEP_GRAIN


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return raw_runs("bubble_utilization")


def test_the_documents_have_the_tables_of_these_runs(runs: list[dict[str, Any]]) -> None:
    real, placebos = raw_runs("real_jobs"), raw_runs("real_jobs_placebos")
    tables = {
        "README.md": [real_jobs_table(real), readme_table(runs)],
        "docs/benchmarks.md": [
            *(real_jobs_table(real), real_job_parts(placebos), speed_table(runs), other_table(), twins_table()),
        ],
        "docs/fusing.md": [fusion_table(raw_runs("fusion"))],
    }
    for document, of_it in tables.items():
        text = (ROOT / document).read_text(encoding="utf-8")
        for table in of_it:
            assert table in text, f"python -m benchmarks.published_figures prints the table that {document} lacks"


def test_the_command_prints_the_tables(
    runs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["published_figures", "--details"])
    main()
    parts = [
        real_jobs_table(raw_runs("real_jobs")),
        real_job_parts(raw_runs("real_jobs_placebos")),
        readme_table(runs),
        speed_table(runs),
        other_table(),
        twins_table(),
        fusion_table(raw_runs("fusion")),
        "\n".join(details(runs)),
    ]
    assert capsys.readouterr().out == "\n\n".join(parts) + "\n"


def test_every_scenario_is_in_one_class_or_repeats_one() -> None:
    classed = [scenario for of in CLASSES for scenario in of.scenarios]
    assert sorted([*classed, *REPEATS]) == sorted([REAL, *(ghost.name for ghost in all_ghosts())])
    assert set(GHOST_STAGES.scenarios) == set(classed) - {REAL}
    assert all(scenario.removesuffix(f"_{mode}") in classed for scenario, mode in REPEATS.items())


def test_classes_follow_the_bubbles_of_the_raw_runs(runs: list[dict[str, Any]]) -> None:
    micro_batches = {ghost.name: ghost.micro_batches for ghost in all_ghosts()}
    for run in runs:
        name = run["scenario"]
        if name in GHOST_STAGES.scenarios:
            bubble_ms = run["bubble_ratio"] * run["step_ms_alone"] / micro_batches[name]
            assert (bubble_ms < SHORT_BELOW_MS) is (name in SHORT_BUBBLES.scenarios), name
            assert not 9.6 < bubble_ms < 16, "SHORT_BELOW_MS lies in a gap"


def test_what_the_documents_say_of_the_slowdown_holds(runs: list[dict[str, Any]]) -> None:
    for of, resolution in ((REAL_JOB, 0.034), (GHOST_STAGES, 0.006)):
        for mode in (COOPERATIVE, PREEMPTIVE):
            figure = class_slowdown(runs, of, mode)
            assert figure is not None
            mean, low, high, _ = figure.estimate
            assert low < 0 < high, "no slowdown detected"
            assert max(mean - low, high - mean) < resolution
    assert list(intervals_above_zero(runs, COOPERATIVE)[0]) == ["ghost_16_0_64"]
    assert intervals_above_zero(runs, PREEMPTIVE) == ({}, 23)


def test_what_else_docs_benchmarks_tells_is_of_the_raw_runs(runs: list[dict[str, Any]]) -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    (shortest,) = intervals_above_zero(runs, COOPERATIVE)[0].values()
    short = class_slowdown(runs, SHORT_BUBBLES, COOPERATIVE)
    idle = class_harvest(runs, LONG_BUBBLES, SCHED_IDLE)
    assert short is not None and idle is not None
    expected = [signed(shortest), signed(short.estimate)]
    expected.append("the idle class harvests {:.0%} to {:.0%} of long bubbles".format(*idle.bounds))
    for mode, other in ((COOPERATIVE, ORACLE), (COOPERATIVE, STEP_GRAIN), (PREEMPTIVE, STEP_GRAIN)):
        low, high, count = harvest_ratio_range(runs, mode, other)
        expected.append(f"| {mode} ÷ {other.replace('_', ' ')} | {low:.2f} to {high:.2f} | {count} |")
    again = {run["scenario"]: run["baselines"] for run in runs if "baselines" in run}
    more = {
        mode: again["ghost_16_0_64_oracle"][mode]["harvest"] - again["ghost_16_0_64"][mode]["harvest"]
        for mode in (PREEMPTIVE, COOPERATIVE)
    }
    expected.append(
        f"harvested {100 * more[PREEMPTIVE]:.0f} points more (preemptive) and {100 * more[COOPERATIVE]:.0f}"
    )
    guarded = [run["guarded"] for run in (*runs, *raw_runs("guarded_loader")) if "guarded" in run]
    assert len(guarded) == 8 and all(found["held"] for found in guarded), "in none of eight runs"
    worst = max((found["worst"] for found in guarded), key=lambda found: found["cost"])
    expected.append("{:+.2%} ({:+.2%} to {:+.2%})".format(worst["cost"], *worst["cost_ci95"]))
    assert [each for each in expected if each not in text] == []


def test_the_smaller_tables_are_of_their_results() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    summaries = {
        name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["summary"]
        for name in ("shortest_bubble", "refill", "search_cost")
    }
    expected = []
    for key, ratio in summaries["refill"].items():
        if key.endswith("_over_apart"):
            low, high = summaries["refill"][f"{key}_ci95"]
            model = key.removesuffix("_mixed_over_apart")
            name = "the example's study" if model == "study" else f"`{model}`"
            expected.append(f"| {name} | {ratio:.2f} | {low:.2f} to {high:.2f} |")
    bubbles = summaries["shortest_bubble"]
    for mode in (PREEMPTIVE, COOPERATIVE):
        shares = [share for key, share in bubbles.items() if key.startswith(mode) and key.endswith("_harvest")]
        expected.append(f"| {mode} | {' | '.join(f'{share:.0%}' for share in shares)} |")
        expected.append(f"{bubbles[f'{mode}_pays_from_ms']:g} ms on ({mode})")
    cost = summaries["search_cost"]
    for search in ("default", "random", "asha"):
        for storage in ("journal", "sqlite", "postgresql"):
            cells = []
            for key in (f"{search}_{storage}_{size}" for size in (10, 1000, 10_000)):
                low, high = cost[f"{key}_cpu_ms_ci95"]
                waits_ms = max(0.0, cost[f"{key}_elapsed_ms"] - cost[f"{key}_cpu_ms"])
                cells.append(f"{cost[f'{key}_cpu_ms']:.0f} ({low:.0f} to {high:.0f}) + {waits_ms:.0f}")
            expected.append(f"| {' | '.join(cells)} |")
    for workers in (1, 4, 16):
        rates = (cost[f"sustained_by_{workers}_{what}_per_s"] for what in ("statements", "of_claims", "trials"))
        alone = cost[f"claims_by_{workers}_statements_per_s"]
        expected.append(f"| {workers} | {' | '.join(f'{rate:.0f}' for rate in (*rates, alone))} |")
    assert len(expected) == 11 + 4 + 9 + 3
    assert [each for each in expected if each not in text] == []


def made_up(scenario: str, cycles: int, rng: random.Random, *, cost: float, idle: float, drift: float = 0.0) -> Any:
    """A run whose idle core makes steps longer by `idle`, and whose cooperative mode costs `cost` of an awake one's."""
    windows = []
    for cycle in range(cycles):
        level = 100 * (1 + drift * cycle) * math.exp(rng.gauss(0, 0.02))
        for mode, ratio in ((ALONE, 1 + idle), (COOPERATIVE, 1 + cost), (SCHED_IDLE, 1.0)):
            step_ms = [level * ratio * math.exp(rng.gauss(0, 0.004)) for _ in range(3)]
            work = {COOPERATIVE: 8.0, SCHED_IDLE: 9.0}.get(mode, 0.0)
            windows.append(Window(cycle=cycle, mode=mode, step_ms=step_ms, work=work, capacity=10.0).raw())
    return {"scenario": scenario, "windows": windows}


def test_a_small_cost_shows_against_an_awake_core_and_not_against_one_that_slept() -> None:
    run = made_up(REAL, 30, random.Random(1), cost=0.01, idle=0.03, drift=0.02)
    estimate = scenario_slowdown(run, COOPERATIVE)
    assert estimate is not None
    assert 0 < estimate.low < 0.01 < estimate.high and estimate.units == 30
    windows = [Window(**raw) for raw in run["windows"]]
    against_alone = mean_with_ci95(cycle_ratios(windows, COOPERATIVE, ALONE))
    assert against_alone.high < 0, "it even seems to be a gain"


def test_scenarios_weigh_alike_however_precise_each_is() -> None:
    rng = random.Random(2)
    of = ScenarioClass("made up", ("a", "b"))
    precise, noisy = made_up("a", 400, rng, cost=0.0, idle=0.0), made_up("b", 8, rng, cost=0.04, idle=0.0)
    figure = class_slowdown([precise, noisy], of, COOPERATIVE)
    assert figure is not None and figure.estimate.units == 2
    assert figure.estimate.mean == pytest.approx(0.02, abs=0.002)


def test_the_interval_over_scenarios_holds_the_truth_in_95_of_100() -> None:
    rng = random.Random(3)
    held = 0
    names = tuple(f"s{i}" for i in range(6))
    for _ in range(300):
        costs = [math.exp(rng.gauss(0.01, 0.01)) - 1 for _ in names]
        made = [made_up(name, 4, rng, cost=cost, idle=0.0) for name, cost in zip(names, costs, strict=True)]
        figure = class_slowdown(made, ScenarioClass("made up", names), COOPERATIVE)
        assert figure is not None
        held += figure.estimate.low <= math.expm1(0.01) <= figure.estimate.high
    assert 0.91 < held / 300 < 0.985


def test_a_harvest_is_of_the_class_and_a_repeat_only_widens_its_range() -> None:
    rng = random.Random(4)
    made = [made_up(name, 5, rng, cost=0.0, idle=0.0) for name in (*SHORT_BUBBLES.scenarios, "ghost_16_0_64_oracle")]
    for run, work in zip(made, (4.0, 5.0, 6.0, 9.0), strict=True):
        for window in run["windows"]:
            window["work"] = work
    figure = class_harvest(made, SHORT_BUBBLES, COOPERATIVE)
    assert figure is not None
    assert (figure.estimate.mean, figure.estimate.units) == (pytest.approx(0.5), 3)
    assert figure.bounds == pytest.approx((0.4, 0.9))
    assert class_harvest(made, LONG_BUBBLES, COOPERATIVE) is None
    assert class_harvest(made, SHORT_BUBBLES, ORACLE) is None


def test_a_gain_over_its_own_single_trial_is_the_ratio_of_two_gains() -> None:
    rng = random.Random(5)

    def point(k: int, speedup: float) -> dict[str, Any]:
        rounds = [{"alone": speedup * math.exp(rng.gauss(0, 0.01)), "fused": 1.0} for _ in range(40)]
        return {"k": k, "rounds_s": rounds}

    gain, (low, high) = over_own_single({"by_k": [point(1, 1.25), point(8, 5.0), point(16, 10.0)]})
    assert low < 8.0 < high
    assert gain == pytest.approx(8.0, rel=0.01) and high / low < 1.03
