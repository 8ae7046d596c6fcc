"""The second promise, from the records of a real run: side work starts inside bubbles only; overruns are reported."""

import json
from pathlib import Path

import numpy as np
import pytest

from squeezer.reports.report import build_report
from tests.support.jobs import SqueezedRun, units_outside_bubbles

pytestmark = [pytest.mark.integration, pytest.mark.alone]


@pytest.fixture
def record(squeezed_run: SqueezedRun) -> Path:
    """The directory of the run."""
    return squeezed_run.record


@pytest.mark.parametrize("rank", [0, 1])
def test_no_unit_starts_while_the_bubble_word_is_closed_or_in_a_step_left_alone(record: Path, rank: int) -> None:
    assert units_outside_bubbles(record, rank) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_the_overrun_in_the_report_is_that_of_the_trace(record: Path, rank: int) -> None:
    events = [e for e in json.loads((record / "trace.json").read_text())["traceEvents"] if e.get("pid") == rank]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = {
        name: sorted(
            (e["ts"], e["ts"] + e["dur"], e["args"]) for e in events if e["ph"] == "X" and tracks[e["tid"]] == name
        )
        for name in ("bubbles", "side task")
    }
    bubbles, units = spans["bubbles"], spans["side task"]
    overruns_us = []
    for index, (begin_us, end_us, args) in enumerate(bubbles[:-1]):
        inside = [unit for unit in units if unit[1] > begin_us and unit[0] < end_us]
        if args["permitted"] and inside:
            overruns_us.append(args["overrun_us"])
        assert 0 <= args["overrun_us"] <= bubbles[index + 1][0] - end_us, "no more than there was time for"
    assert len(overruns_us) > 20
    report = build_report(record)["ranks"][str(rank)]["side"]["overrun_us"]
    for percent in (50, 99):
        assert report[f"p{percent}"] == pytest.approx(np.percentile(overruns_us, percent), rel=0.05, abs=1)


def test_yield_and_waterfall_account_for_all_bubble_time(record: Path) -> None:
    report = json.loads((record / "report.json").read_text())
    for side in (report["side"], *(of["side"] for of in report["ranks"].values())):
        # all may be lost: so short a job saves nothing before its end
        assert 0 <= side["yield"] < 1 and side["yield"] + side["waterfall"]["lost"] > 0, side
        assert side["waterfall"]["alone"] > 0, side
        assert side["waterfall"]["starting"] >= 0, "0 if it was ready before the first bubble, as on a busy machine"
        assert side["yield"] + sum(side["waterfall"].values()) == pytest.approx(1, abs=0.02), side


def test_the_report_has_all_that_it_promises(record: Path) -> None:
    report = json.loads((record / "report.json").read_text())
    assert {"steps", "step_ms_alone", "step_ms_squeezed", "slowdown", "slowdown_ci95"} <= set(report["main"])
    assert {"ratio", "by_kind"} <= set(report["bubbles"])
    assert {"fill", "harvest", "overrun_us", "resume_us"} <= set(report["side"])
    assert {"completed", "pruned", "failed", "running", "best"} <= set(report["trials"])
    assert set(report["ranks"]) == {"0", "1"}
    assert 0 < report["bubbles"]["ratio"] < 1 and 0 < report["side"]["harvest"] < 1
    assert report["trials"]["running"] == 0
    assert report["faults"]["lost_messages"] == 0 and report["faults"]["hook_faults"] == 0
    assert (record / "step.svg").read_text().startswith("<svg") or "<svg" in (record / "step.svg").read_text()
