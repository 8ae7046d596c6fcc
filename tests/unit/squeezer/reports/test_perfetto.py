"""Traces are valid, cover one time on all ranks, and hold the same facts as the report."""

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squeezer.reports.perfetto import write_trace
from squeezer.reports.report import ReportError, build_report
from tests.support.made_up_rank import MadeUpRank


def events_of(run: Path, most_steps: int = 40) -> list[dict[str, Any]]:
    return json.loads(write_trace(run, most_steps).read_text())["traceEvents"]


def track(events: list[dict[str, Any]], name: str, pid: int = 0) -> list[dict[str, Any]]:
    named = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}
    return [e for e in events if e["ph"] == "X" and e["pid"] == pid and e["tid"] == named[name]]


def made_up(run: Path, ranks: int = 2) -> None:
    for number in range(ranks):
        rank = MadeUpRank(run, number)
        rank.now_ns += number * 1000
        rank.windows(bubbles=[(20, 10)], units=[(20.25, 6, 6), (26.2, 6, 5)])  # the second begins 50 µs too early
        rank.end()
        rank.write()


def test_every_event_is_complete_and_tracks_do_not_overlap(tmp_path: Path) -> None:
    made_up(tmp_path)
    events = events_of(tmp_path)
    assert all({"ph", "pid", "tid", "ts", "dur", "name", "args"} <= set(event) for event in events)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    for pid in (0, 1):
        for name in ("steps", "instructions", "bubbles", "side task"):
            shown = track(events, name, pid)
            assert shown
            for before, after in pairwise(shown):
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-3  # a nanosecond, for the rounding of floats


def test_names_and_args(tmp_path: Path) -> None:
    made_up(tmp_path)
    events = events_of(tmp_path)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "rank 0 · stage 0 of 2", 1: "rank 1 · stage 1 of 2"}
    assert [b["args"]["permitted"] for b in track(events, "bubbles")] == [
        s["args"]["squeezed"] for s in track(events, "steps")
    ]
    bubble = track(events, "bubbles")[0]
    assert bubble["args"] == {
        "slot": 0,
        "wait": "recv_grad",
        "forecast_ms": [5.0, 4.0, 12.0],
        "permitted": False,
        "side_us": 0.0,
        "overrun_us": 0.0,
    }
    assert (bubble["ts"], bubble["dur"]) == (20_000, 10_000)
    unit = track(events, "side task")[0]
    assert (unit["name"], unit["args"]) == ("0.Linear forward", {"trials": 8, "cpu_us": 6000.0})
    assert [e["name"] for e in track(events, "instructions")[:2]] == ["forward_pass", "backward_pass"]


def test_decisions_of_the_guard_stand_at_their_time(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    rank.windows(bubbles=[(20, 10)])
    rank.add("guard", t_ns=rank.now_ns - 50_000_000, step=16, what="shut", cause="mean", figures={"slowdown": 0.1})
    rank.end()
    rank.write()
    (decision,) = [event for event in events_of(tmp_path) if event["ph"] == "i"]
    last = track(events_of(tmp_path), "steps")[-1]
    assert (decision["name"], decision["args"]["cause"]) == ("guard: shut", "mean")
    assert decision["ts"] == pytest.approx(last["ts"] + last["dur"] - 50_000)


@pytest.mark.parametrize("most_steps", [1, 2, 6, 15])
def test_the_middle_is_shown_with_a_change_and_the_same_steps_on_all_ranks(tmp_path: Path, most_steps: int) -> None:
    made_up(tmp_path)
    events = events_of(tmp_path, most_steps)
    steps = [[e["args"]["step"] for e in track(events, "steps", pid)] for pid in (0, 1)]
    assert steps[0] == steps[1] == list(range(steps[0][0], steps[0][0] + most_steps))
    assert steps[0][0] > 1 or most_steps == 15
    if most_steps > 1:
        assert len({e["args"]["squeezed"] for e in track(events, "steps")}) == 2


def test_steps_of_one_job_only(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    rank.windows()
    rank.attach()
    rank.step(True, 100)
    rank.write()
    assert {e["args"]["job"] for e in track(events_of(tmp_path), "steps")} == {0}


def test_a_run_without_steps_or_names(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no records"):
        write_trace(tmp_path)
    rank = MadeUpRank(tmp_path)
    rank.write()
    with pytest.raises(ReportError, match="no step is recorded"):
        write_trace(tmp_path)
    rank = MadeUpRank(tmp_path, 1)
    rank.step(True, 100, [(10, 20)], [(11, 1, 1)])
    rank.write()
    (tmp_path / "rank1.units.jsonl").unlink()
    unit = track(events_of(tmp_path), "side task", pid=1)[0]
    assert (unit["name"], unit["args"]["trials"]) == ("unit 0", None)


@settings(max_examples=40, deadline=None)
@given(
    lengths_us=st.lists(st.integers(200, 9000), min_size=1, max_size=6),
    units_us=st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 6000), st.integers(1, 100)), max_size=20),
)
def test_overrun_in_the_trace_is_that_of_the_report(
    lengths_us: list[int], units_us: list[tuple[int, int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory)
        rank = MadeUpRank(run)
        at_us, units = 0, []
        for pause_us, wall_us, percent in units_us:
            units.append(((at_us + pause_us) / 1e3, wall_us / 1e3, wall_us * percent / 1e5))
            at_us += pause_us + wall_us
        bubbles = [(20.0 * i, length_us / 1e3) for i, length_us in enumerate(lengths_us)]
        rank.step(True, 300, bubbles, units)
        rank.write()
        events = events_of(run)
        reported = build_report(run)["side"]["overrun_us"]
    shown, overruns = track(events, "bubbles"), []
    for bubble, following in zip(shown, [*shown[1:], {"ts": float("inf")}], strict=True):
        end, spans = bubble["ts"] + bubble["dur"], track(events, "side task")
        if any(u["ts"] < end and u["ts"] + u["dur"] > bubble["ts"] for u in spans):
            after = [min(u["ts"] + u["dur"], following["ts"]) - max(u["ts"], end) for u in spans]
            overruns.append(sum(min(a, u["args"]["cpu_us"]) for a, u in zip(after, spans, strict=True) if a > 0))
    overruns.sort()
    if not overruns:
        assert reported == {"p50": None, "p99": None}
        return
    for p in (50, 99):  # linear between the two nearest, as numpy does
        place = p / 100 * (len(overruns) - 1)
        low, high = overruns[int(place)], overruns[min(int(place) + 1, len(overruns) - 1)]
        assert reported[f"p{p}"] == pytest.approx(low + (high - low) * (place % 1), abs=0.01)
