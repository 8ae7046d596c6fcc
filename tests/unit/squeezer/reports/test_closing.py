"""The five lines at a squeezed job's end: nothing is claimed that the interval does not show."""

from pathlib import Path
from typing import Any

import pytest

from squeezer.reports.closing import closing_lines, slowdown_text
from squeezer.reports.trials import NO_TRIALS

MISMATCH = {"trial": 3, "trials": 4, "mode": "training", "what": "it is odd", "way": "rules", "then": "vmap"}


def main_of(slowdown: float | None, interval: tuple[float, float] | None) -> dict[str, Any]:
    figures = {"slowdown": slowdown, "slowdown_ci95": interval, "slowdown_pairs": 25}
    return {**figures, "step_ms_alone": 100.0, "step_ms_squeezed": 101.25, "squeezed_share": 0.8, "steps": 300}


@pytest.mark.parametrize(
    ("slowdown", "interval", "text"),
    [
        (0.001, (-0.008, 0.010), "no slowdown detected, ±0.9% (95% interval -0.8% to +1.0%, n = 25)"),
        (0.02, (0.012, 0.028), "+2.0% slower steps (95% interval +1.2% to +2.8%, n = 25)"),
        (0.05, (-0.09, 0.2), "unknown: steps vary too much to tell (95% interval -9.0% to +20.0%, n = 25)"),
        (
            -0.02,
            (-0.03, -0.01),
            "no slowdown detected; steps were -2.0% with squeezing (95% interval -3.0% to -1.0%, n = 25)",
        ),
        (0.05, None, "unknown: too few steps with and without squeezing to compare"),
    ],
)
def test_what_is_said_of_the_slowdown(slowdown: float, interval: tuple[float, float] | None, text: str) -> None:
    assert slowdown_text(main_of(slowdown, interval)) == text


def test_five_lines_say_what_was_gained_at_what_cost_and_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    best = {"number": 147, "value": 0.98765, "params": {"lr": 0.1}}
    report = {
        "main": main_of(0.001, (-0.008, 0.010)),
        "bubbles": {"ratio": 0.23},
        "side": {
            "fill": 0.78,
            "yield": 0.515,
            "waterfall": {"alone": 0.1, "guard": 0.0, "starting": 0.12, "colder": 0.03, "search": 0.021, "lost": None},
            "audit": {"audits": 41, "mismatches": []},
            "not_started": [],
        },
        "trials": {**NO_TRIALS, "completed": 108, "pruned": 52, "best": best, "studies": {"digits": {}}},
        "faults": {"hook_faults": 0},
        "ranks": {"0": {"ended": True}, "1": {"ended": True}},
        "missing": [],
    }
    assert closing_lines(report, tmp_path / "runs" / "demo") == [
        "Gained  study digits: 108 completed, 52 pruned; best score 0.9877 (trial 147)",
        "Used    devices were idle 23% of the time; that gave trials 52% of what a dedicated device would (most of the "
        "rest: starting 12%, steps left alone 10%, slower training 3%); audits: 41, 0 differed",
        "Cost    no slowdown detected, ±0.9% (95% interval -0.8% to +1.0%, n = 25); "
        "steps 100.0 ms without, 101.2 ms with",
        "Next    squeezer report runs/demo  |  squeezer why runs/demo",
        "Files   in runs/demo: step.svg (a step), yield.svg (what the bubbles gave), trace.json (for ui.perfetto.dev)",
    ]


def test_what_is_unknown_is_not_made_up(tmp_path: Path) -> None:
    report = {
        "main": {**main_of(None, None), "step_ms_alone": None, "squeezed_share": None, "steps": 0},
        "bubbles": {"ratio": None},
        "side": {
            "fill": None,
            "yield": None,
            "waterfall": {},
            "audit": {"audits": 0, "mismatches": [MISMATCH]},
            "not_started": ["there is no server"],
        },
        "trials": {**dict.fromkeys(NO_TRIALS), "problem": "no such table"},
        "faults": {"hook_faults": 1},
        "ranks": {"0": {"ended": True}, "1": {"ended": False}},
        "missing": [2, 3],
    }
    gained, used, cost, _, files, audit, faults = closing_lines(report, tmp_path)
    assert gained == "Gained  the study cannot be read: no such table"
    assert used == (
        "Used    no step was seen: the script built no pipeline engine, or its hooks could not work, as said above"
    )
    assert cost == "Cost    unknown: too few steps with and without squeezing to compare"
    assert files == f"Files   in {tmp_path}: report.json"
    assert audit == "Audit   trial 3 of 4 fused by rules differed in training: it is odd; trained by vmap from there on"
    assert faults == (
        "Faults  no side task was started: there is no server; "
        "hooks switched themselves off 1 time; the daemon of rank 1 did not finish its record; "
        "no records of rank 2, 3 here"
    )
