"""Yield and waterfall of made-up records whose shares are known."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squeezer.daemon.bubble_accounts import BubbleCounter
from squeezer.records.reader import load_run
from squeezer.reports.report import build_report, render
from squeezer.reports.waterfall import MEANINGS, NAMES, Spent, spent, waterfall_figures
from tests.support.made_up_rank import MadeUpRank

S = 10**9
NOTHING = BubbleCounter().take()


def rank_with(run: Path, number: int, per_s: float | None, **counted: float) -> None:
    rank = MadeUpRank(run, number)
    rank.windows()
    half = {name: value / 2 for name, value in counted.items()}
    for _ in range(2):  # as of a long run, or of two daemons
        rank.add("bubble_time", t_ns=rank.now_ns, **{**NOTHING, **half})
    rank.end(work_per_s=per_s)
    rank.write()


TEN_SECONDS: dict[str, float] = {
    "bubble_ns": 10 * S,
    "starting_ns": 1 * S,
    "alone_ns": 1 * S,
    "unopened_ns": 0.5 * S,
    "search_ns": 0.5 * S,
    "unused_ns": 0.7 * S,
    "main_ns": 0.3 * S,
    "side_ns": 6 * S,
    "overrun_ns": 0.1 * S,
    "busy_ms": 6000,
    "lost_ms": 100,
    "training_ms": 5000,
    "work": 3000,
    "lost_work": 300,
    "samples": 600,
}
"""8 trials make 1000 trial-samples/s, and 2 make 500: 1 ms per trial and sample would be 8 ms and 4 ms for each sample,
so a sample takes 8/3 ms and each of its trials 2/3 ms more."""


def test_shares_follow_from_what_was_counted(tmp_path: Path) -> None:
    rank_with(tmp_path, 0, 1000.0, **TEN_SECONDS)
    side = build_report(tmp_path)["side"]
    dedicated_s = 600 * 8 / 3e3 + 3000 * 2 / 3e3
    assert side["yield"] == pytest.approx((3.0 - 0.3) / 10)
    assert side["waterfall"] == pytest.approx(
        {
            "starting": 0.1,
            "alone": 0.1,
            "guard": 0.0,
            "unopened": 0.05,
            "search": 0.05,
            "resume_and_tail": 0.07,
            "main_job": 0.03,
            "other_work": 0.1,
            "empty_rows": (dedicated_s - 3.0) / 10,
            "colder": (5.0 - dedicated_s) / 10,
            "lost": (0.3 + 0.1) / 10,
            "ended": 0.0,
            "overrun": -0.01,
        }
    )
    assert side["yield"] + sum(side["waterfall"].values()) == pytest.approx(1.0)
    assert set(MEANINGS) == set(NAMES) == set(side["waterfall"])


def test_ranks_weigh_by_their_bubbles(tmp_path: Path) -> None:
    rank_with(tmp_path, 0, 1000.0, **TEN_SECONDS)
    rank_with(tmp_path, 1, 1000.0, bubble_ns=30 * S, ended_ns=30 * S)
    report = build_report(tmp_path)
    assert report["side"]["yield"] == pytest.approx(0.27 / 4)
    assert report["side"]["waterfall"]["ended"] == pytest.approx(0.75)
    assert report["ranks"]["1"]["side"]["yield"] == 0.0 and report["ranks"]["0"]["side"]["yield"] == pytest.approx(0.27)
    text = render(report)
    assert f"75.0%  {MEANINGS['ended']}" in text and MEANINGS["guard"] not in text


def test_without_a_dedicated_rate_only_times_are_known(tmp_path: Path) -> None:
    rank_with(tmp_path, 0, None, **TEN_SECONDS)
    report = build_report(tmp_path)
    side = report["side"]
    assert side["yield"] is side["waterfall"]["colder"] is side["waterfall"]["empty_rows"] is None
    assert side["waterfall"]["starting"] == pytest.approx(0.1)
    assert "Yield       unknown" in render(report)


def test_a_device_that_measures_itself_has_its_unused_time_from_what_it_reports(tmp_path: Path) -> None:
    counted = {**TEN_SECONDS, "unmeasured_ns": 7 * S, "unused_ns": 0.0, "main_ns": 0.0, "side_ns": 0.0}
    rank_with(tmp_path, 0, 1000.0, **counted)
    side = build_report(tmp_path)["side"]
    assert side["waterfall"]["resume_and_tail"] == pytest.approx((7 - (6 + 0.1 - 0.1)) / 10)
    assert side["yield"] + sum(side["waterfall"].values()) == pytest.approx(1.0)


@given(work=st.floats(1, 1e6), mean_rows=st.floats(1, 8), slower=st.floats(0.2, 8))
def test_the_parts_of_training_add_up_to_it(
    tmp_path_factory: pytest.TempPathFactory, work: float, mean_rows: float, slower: float
) -> None:
    rank: Any = type("Rank", (), {})()
    dedicated = {"trials": 8, "work_per_s": 1000.0, "few_trials": 2, "few_work_per_s": 1000.0 / slower}
    counted = {**NOTHING, "r": "bubble_time", "t_ns": 0, "bubble_ns": 10 * S, "work": work, "training_ms": 4000.0}
    rank.records = {"bubble_time": [{**counted, "samples": work / mean_rows}], "end": [{"dedicated": dedicated}]}
    found = spent(rank)
    assert found.useful_ns is not None
    parts = found.useful_ns + found.shares_ns["empty_rows"] + found.shares_ns["colder"]
    assert parts == pytest.approx(4 * S, rel=1e-6, abs=1e3)
    assert found.shares_ns["empty_rows"] >= -1e-6 * found.useful_ns, "rows that stand empty never help"


def test_no_bubbles_are_no_figures() -> None:
    found = waterfall_figures([Spent(0.0, None, {})])
    assert found["yield"] is None and set(found["waterfall"].values()) == {None}


def test_a_run_of_no_side_task_says_so(tmp_path: Path) -> None:
    rank_with(tmp_path, 0, None, bubble_ns=S, ended_ns=S)
    assert load_run(tmp_path)[0].records["bubble_time"]
    assert build_report(tmp_path)["side"]["waterfall"]["ended"] == pytest.approx(1.0)
