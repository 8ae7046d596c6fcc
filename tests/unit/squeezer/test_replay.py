"""Recorded runs give the same actions again: the daemon's decisions follow from its events alone."""

import gzip
import json
from pathlib import Path

import pytest

from squeezer.policy.actions import PlanSlot
from squeezer.replay import ReplayError, main_replay, read_golden, replay, write_golden
from tests.support.paths import GOLDEN

RUNS = sorted(GOLDEN.glob("*.jsonl.gz"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name.partition(".")[0])
def test_a_recorded_run_replays_to_the_same_actions(path: Path) -> None:
    kinds = set()
    for index, (recorded, replayed) in enumerate(replay(read_golden(path))):
        assert replayed["actions"] == recorded["actions"], f"event {index}: {recorded['event']}"
        kinds |= {action[0] for action in replayed["actions"]}
    assert {"ForgetPlan", "PlanSlot", "PlanSteps", "FlushAt"} <= kinds, "it has something to say"


def test_there_are_runs_of_both_modes_and_one_that_the_guard_shut() -> None:
    preemptive, noted = set(), set()
    for path in RUNS:
        records = read_golden(path)
        preemptive.add(records[0]["config"]["squeeze"]["preemptive"])
        noted |= {action[1][2] for record in records[1:] for action in record["actions"] if action[0] == "Note"}
    assert preemptive == {"stop", False} and "shut" in noted


def test_there_is_a_run_whose_ends_follow_the_bubble_before() -> None:
    plans = [
        PlanSlot(*action[1:])
        for path in RUNS
        for record in read_golden(path)[1:]
        for action in record["actions"]
        if action[0] == "PlanSlot"
    ]
    assert {bool(plan.opens_before_ns) for plan in plans if plan.permit_ns} == {True, False}


def test_what_is_written_anew_is_what_was_recorded(tmp_path: Path) -> None:
    records = read_golden(RUNS[0])
    write_golden(tmp_path / "again.jsonl.gz", records)
    assert read_golden(tmp_path / "again.jsonl.gz") == records


def test_a_trace_without_events_or_answers_is_refused(tmp_path: Path) -> None:
    run, event = read_golden(RUNS[0])[:2]
    for content, reason in (([], "no events"), ([run], "no events"), ([run, {**event, "actions": None}], None)):
        path = tmp_path / "trace.jsonl.gz"
        kept = [{k: v for k, v in line.items() if v is not None} for line in content]
        path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in kept).encode()))
        with pytest.raises(ReplayError, match=reason or "not recorded by this version"):
            main_replay(path, write=False)


def test_a_trace_that_cannot_be_written_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(ReplayError, match=r"cannot write .*: Permission denied"):
        main_replay(RUNS[0], write=True)
