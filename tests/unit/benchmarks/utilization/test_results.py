"""What is committed of `bubble_utilization` follows from its raw runs."""

import json
from collections import Counter
from typing import Any

import pytest

from benchmarks import bubble_utilization
from benchmarks.shared.paths import ROOT
from benchmarks.utilization.ghosts import BESIDE_WINDOWS, REAL
from benchmarks.utilization.harvest_ratio import harvest_ratio, harvest_ratios
from benchmarks.utilization.picture import picture, table
from benchmarks.windows.figures import Window, mode_figures
from benchmarks.windows.modes import COOPERATIVE, GATED, PREEMPTIVE

RESULTS = ROOT / "benchmarks" / "results" / "bubble_utilization.json"


@pytest.fixture(scope="module")
def content() -> Any:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_summary_is_of_these_runs(content: Any) -> None:
    made = json.loads(json.dumps(bubble_utilization._summary(content["runs"])))
    assert made == content["summary"]


def test_a_scenario_that_is_measured_again_counts_once(content: Any) -> None:
    again = [run for run in content["runs"] if run["scenario"].endswith(tuple(BESIDE_WINDOWS))]
    assert len(again) == 2
    rest = bubble_utilization._summary([run for run in content["runs"] if run not in again])
    assert rest["harvest"] == content["summary"]["harvest"]
    assert set(content["summary"]["by_scenario"]) - set(rest["by_scenario"]) == {run["scenario"] for run in again}


def test_figures_are_of_these_windows(content: Any) -> None:
    for run in content["runs"]:
        if "baselines" not in run:
            continue
        windows = [Window(**raw) for raw in run["windows"]]
        for mode, made in mode_figures(windows).items():
            stored = run["baselines"][mode]
            assert (made is None) is (stored is None)
            if made is None:
                continue
            if mode in GATED:
                made |= harvest_ratios(windows, mode)
            # raw windows are rounded to a microsecond
            assert made["slowdown"] == pytest.approx(stored["slowdown"], abs=1e-5), run["scenario"]
            assert made["harvest"] == pytest.approx(stored["harvest"], abs=1e-5)
            for key in (key for key in made if key.startswith("harvest_over_") and made[key] is not None):
                assert made[key]["ratio"] == pytest.approx(stored[key]["ratio"], abs=1e-4), (run["scenario"], key)
                assert made[key]["ci95"] == pytest.approx(stored[key]["ci95"], abs=1e-3)


@pytest.mark.parametrize("mode", [PREEMPTIVE, COOPERATIVE])
def test_windows_of_one_mode_have_equal_harvests_at_equal_speed(content: Any, mode: str) -> None:
    (real,) = (run for run in content["runs"] if run["scenario"] == REAL)
    windows = [Window(**raw) for raw in real["windows"]]
    places: Counter[int] = Counter()
    for window in windows:
        if window.mode == mode:
            window.mode = f"{mode} {places[window.cycle]}"
            places[window.cycle] += 1
    for one, other in ((0, 1), (0, 2), (1, 2)):
        figures = harvest_ratio(windows, f"{mode} {one}", f"{mode} {other}")
        assert figures is not None
        assert figures["ratio"] == pytest.approx(1, abs=0.05), figures


def test_table_and_picture_are_of_these_runs(content: Any) -> None:
    assert RESULTS.with_suffix(".md").read_text(encoding="utf-8") == table(content)
    compared = [run for run in content["runs"] if "baselines" in run]
    assert RESULTS.with_suffix(".svg").read_text(encoding="utf-8") == picture(compared)
