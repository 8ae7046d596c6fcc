"""The claims on speed: their method against known truths, and the documents against the raw runs."""

import json
import math
import random
from typing import Any

import pytest

from benchmarks import bubble_utilization, shortest_bubble
from benchmarks.published_figures import (
    fusion_table,
    main,
    other_table,
    over_own_single,
    raw_runs,
    real_job_baselines,
    real_job_parts,
    real_job_waterfalls,
    real_jobs_table,
    short_table,
    twins_table,
)
from benchmarks.shared.paths import RESULTS, ROOT
from benchmarks.utilization import figures as utilization


def test_the_documents_have_the_tables_of_these_runs() -> None:
    real = real_jobs_table(raw_runs("real_jobs"))
    ghosts = utilization.summary(raw_runs(bubble_utilization.NAME))
    tables = {
        "README.md": [real, utilization.short_table(ghosts), short_table()],
        "docs/benchmarks.md": [
            real,
            real_job_parts(raw_runs("real_jobs")),
            real_job_baselines(raw_runs("real_jobs")),
            real_job_waterfalls(raw_runs("real_jobs")),
            utilization.table(ghosts),
            other_table(),
            twins_table(),
        ],
        "docs/fusing.md": [fusion_table(raw_runs("fusion"))],
    }
    for document, of_it in tables.items():
        text = (ROOT / document).read_text(encoding="utf-8")
        for table in of_it:
            assert table in text, f"python -m benchmarks.published_figures prints the table that {document} lacks"


def test_the_command_prints_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    ghosts = utilization.summary(raw_runs(bubble_utilization.NAME))
    parts = [
        real_jobs_table(raw_runs("real_jobs")),
        real_job_parts(raw_runs("real_jobs")),
        real_job_baselines(raw_runs("real_jobs")),
        real_job_waterfalls(raw_runs("real_jobs")),
        short_table(),
        utilization.short_table(ghosts),
        utilization.table(ghosts),
        other_table(),
        twins_table(),
        fusion_table(raw_runs("fusion")),
    ]
    assert capsys.readouterr().out == "\n\n".join(parts) + "\n"


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
    for mode in shortest_bubble.MODES:
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


def test_a_gain_over_its_own_single_trial_is_the_ratio_of_two_gains() -> None:
    rng = random.Random(5)

    def point(k: int, speedup: float) -> dict[str, Any]:
        rounds = [{"alone": speedup * math.exp(rng.gauss(0, 0.01)), "fused": 1.0} for _ in range(40)]
        return {"k": k, "rounds_s": rounds}

    gain, (low, high) = over_own_single({"by_k": [point(1, 1.25), point(8, 5.0), point(16, 10.0)]})
    assert low < 8.0 < high
    assert gain == pytest.approx(8.0, rel=0.01) and high / low < 1.03
