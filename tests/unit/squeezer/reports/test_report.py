"""Reports of made-up runs whose every figure is known beforehand."""

import json
import re
from pathlib import Path

import optuna
import pytest

from ds_hooks.shared.rotating_file import older
from ds_hooks.shared.study_paths import journal_path
from ds_hooks.shared.trial_attributes import MILESTONE
from ds_hooks.shared.unit_record import UNIT_RECORD
from squeezer.records.layout import RECORD_VERSION, study_directory, units_path
from squeezer.reports.closing import closing_lines
from squeezer.reports.perfetto import write_trace
from squeezer.reports.report import ReportError, build_report, main_report, render, write_report
from squeezer.reports.step_svg import draw_step
from squeezer.reports.trials import NO_TRIALS
from tests.support.made_up_rank import BOOT_NS, LOST, MS, MadeUpRank
from trials.search.storage.optuna_storage import open_storage


def test_every_figure_of_one_rank(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    # two bubbles of 10 ms; in the first 6 ms are used, and 1 ms after it; in the second nothing runs
    rank.stopped_epochs = frozenset({9})
    rank.work_per_step = 4  # 15 times, since the first count may be another job's
    rank.windows(bubbles=[(20, 10), (60, 10)], units=[(20.5, 4, 4), (28, 3, 3)])
    rank.add("side", t_ns=rank.now_ns, event="started", group="/sys/fs/cgroup/x", no_group="", limits_memory=False)
    rank.add("side", t_ns=rank.now_ns, event="exited", status=1, restarted=True, group_cpu_ms=400.0, uncounted_ms=2.0)
    rank.add("side", t_ns=rank.now_ns, event="started", group=None, no_group="it is read-only", limits_memory=False)
    rank.add("side", t_ns=rank.now_ns, event="finished")
    for what in ("shut", "retry"):
        rank.add("guard", t_ns=BOOT_NS, step=5, what=what, cause="steps", figures={"slowdown": 0.1, "for_steps": 50})
    rank.add("fault", t_ns=BOOT_NS, what="the hooks switched themselves off")
    rank.end(work_per_s=1000.0)
    rank.write()
    report = build_report(tmp_path)
    assert report["main"]["steps"] == 16
    times = (report["main"]["step_ms_alone"], report["main"]["step_ms_squeezed"])
    assert times == pytest.approx((100, 101))
    assert report["main"]["slowdown"] == pytest.approx(0.01)
    assert report["main"]["slowdown_ci95"] is None and report["main"]["slowdown_pairs"] == 1
    share = 16 * 20 / (10 * 100 + 6 * 101)
    assert report["bubbles"]["ratio"] == pytest.approx(share)
    assert report["bubbles"]["by_kind"] == {"recv_grad": {"count_per_step": 2, "ms_per_step": 20, "ratio": share}}
    side = report["side"]
    assert side["fill"] == pytest.approx(6 / 20)
    assert side["harvest"] == pytest.approx(60 / (1000 * 6 * 20e-3))
    assert side["overrun_us"] == {"p50": 1000, "p99": 1000}
    assert side["resume_us"] == {"p50": 500, "p99": 500}
    assert (side["units"], side["restarts"], side["starved"]) == (12, 1, [])
    assert (side["processes"], side["grouped"], side["no_group"]) == (2, 1, ["it is read-only"])
    assert side["uncounted"] == pytest.approx(0.005)
    said = "control groups: 1 of 2; 0.5% of their CPU time was not counted; without a control group: it is read-only"
    assert said in " ".join(render(report).split())
    assert report["faults"] == {**LOST, "hook_faults": 1, "stops": 1}
    assert report["trials"] == NO_TRIALS
    assert not journal_path(study_directory(tmp_path)).exists()  # looking creates none
    about = {"stage": 0, "stages": 2, "ended": True}
    guard = {"decisions": 2, "shut": 1}
    slot = {
        "wait": "RECV_GRAD",
        "count": 6,
        "ms_p50": 10,
        "ms_min": 10,
        "forecast_ms_p50": 5,
        "forecast_error_p50": 0.5,
    }
    slot |= {"forecast_error_p90": 0.5, "in_range": 1.0, "opened": 1.0}
    bubbles = {**report["bubbles"], "slots": [{"slot": 0, **slot, "fill": 0.6}, {"slot": 1, **slot, "fill": 0.0}]}
    same = {key: report[key] for key in ("main", "device", "side", "faults")}
    assert report["ranks"] == {"0": {**about, **same, "bubbles": bubbles, "guard": guard}}
    assert (report["main"]["squeezed_share"], report["main"]["alone_share"]) == (6 / 16, 10 / 16)
    assert report["main"]["p99_slowdown"] is None, "it needs a hundred steps of each"


def test_ranks_are_pooled_by_time(tmp_path: Path) -> None:
    # 10 ms of bubble filled by half, and 30 ms filled by a sixth: 10 of 40 ms together
    for number, length_ms, rate in ((0, 10.0, 1000.0), (1, 30.0, None)):
        rank = MadeUpRank(tmp_path, number)
        rank.add("side", t_ns=BOOT_NS, event="started")
        rank.work_per_step = 2
        rank.windows(bubbles=[(20, length_ms)], units=[(21, 5, 5)], squeezed_ms=100 + 2 * number)
        rank.end(work_per_s=rate)
        rank.write()
    report = build_report(tmp_path)
    assert report["main"]["slowdown"] == pytest.approx(0.01)
    assert report["side"]["fill"] == pytest.approx(10 / 40)
    assert report["bubbles"]["by_kind"]["recv_grad"]["ms_per_step"] == pytest.approx(20)
    # the rank without a rate counts neither with its work nor with its bubbles
    assert report["side"]["harvest"] == report["ranks"]["0"]["side"]["harvest"] == pytest.approx(30 / 60)
    assert report["ranks"]["1"]["side"]["harvest"] is None
    assert report["faults"]["lost_messages"] == 2


def test_ranks_whose_records_another_node_has_are_named(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path, 1, world_size=4)
    rank.windows()
    rank.end()
    rank.write()
    report = build_report(tmp_path)
    assert list(report["ranks"]) == ["1"] and report["missing"] == [0, 2, 3]
    assert "no records here: rank 0, rank 2, rank 3" in render(report)


def test_bubbles_that_were_not_opened_count_for_fill_only(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    rank.windows(bubbles=[(20, 10)], opened=False)
    rank.end()
    rank.write()
    side = build_report(tmp_path)["side"]
    assert side["fill"] == 0
    assert side["overrun_us"] == side["resume_us"] == {"p50": None, "p99": None}


def test_two_jobs_in_one_file_are_not_compared_with_each_other(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    rank.windows(squeezed_ms=102.0)
    rank.attach()
    for ms in (900, 900, 300, 300):
        rank.step(True, ms)
    rank.end()
    rank.write()
    main = build_report(tmp_path)["main"]
    assert main["steps"] == 20
    assert main["slowdown"] == pytest.approx(0.02)
    assert main["step_ms_squeezed"] == pytest.approx(102), "the other job's window has none alone beside it"


def test_a_killed_daemon_leaves_what_it_wrote(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    rank.add("side", t_ns=BOOT_NS, event="started")
    rank.windows(bubbles=[(20, 10)], units=[(21, 5, 5)])
    rank.add("fault", t_ns=BOOT_NS, what="this line is cut short")
    rank.write()
    rank.path.write_bytes(rank.path.read_bytes()[:-9])
    units = units_path(tmp_path, 0)
    units.write_bytes(units.read_bytes()[:-5])
    units.with_suffix(".jsonl").write_text('{"group": 0, "tri')
    report = build_report(tmp_path)
    assert report["main"]["slowdown"] == pytest.approx(0.01)
    assert report["side"]["units"] == 5
    assert report["side"]["fill"] == pytest.approx(5 / 10)
    assert (report["side"]["harvest"], report["faults"]["lost_messages"]) == (None, None)
    assert not report["ranks"]["0"]["ended"]
    assert "record not finished (still running, or killed): rank 0" in render(report)


def test_units_longer_than_every_bubble_are_named(tmp_path: Path) -> None:
    found = []
    for number, remedy in enumerate(("split", "nothing")):
        rank = MadeUpRank(tmp_path, number)
        unit = {"unit": "0.Linear backward", "trials": 16 >> number, "needs_ms": 12.34, "longest_bubble_ms": 8.1}
        found.append({**unit, "remedy": remedy})
        rank.add("side", t_ns=BOOT_NS, event="starved", **found[-1])
        rank.write()
    report = build_report(tmp_path)
    assert report["side"]["starved"] == found
    assert [report["ranks"][number]["side"]["starved"] for number in "01"] == [[unit] for unit in found]
    text = render(report)
    assert "longer than every bubble (8.1 ms): 0.Linear backward of 16, 12.3 ms: split\n" in text
    assert "longer than every bubble (8.1 ms): 0.Linear backward of 8, 12.3 ms: not split\n" in text


def test_audits_of_all_ranks_and_processes_add_up(tmp_path: Path) -> None:
    found = {"trial": 7, "trials": 16, "mode": "training", "what": "output of 0.Linear is float32, alone bfloat16"}
    for number in range(2):
        rank = MadeUpRank(tmp_path, number)
        for audits in (3, 1):
            times = {"audit_ms": 2.0 * audits, "first_ms": 2.0, "all_ms": 200.0}
            rank.add("side", t_ns=BOOT_NS, event="audited", audits=audits, mismatches=number, **times)
        if number:
            rank.add("side", t_ns=BOOT_NS, event="mismatched", **found, way="vmap", then="loop")
        rank.write()
    report = build_report(tmp_path)
    assert report["side"]["audit"] == {
        "audits": 8,
        "mismatches": [{**found, "way": "vmap", "then": "loop"}],
        "cost": pytest.approx(0.02),
        "cost_of_first": pytest.approx(0.01),
    }
    assert report["ranks"]["0"]["side"]["audit"]["mismatches"] == []
    text = render(report)
    assert "Audit       8 steps compared with a trial alone, 1 differed; cost 2.0% of the side task's time, " in text
    assert "trial 7 of 16 fused by vmap differed in training: output of 0.Linear is float32" in text


def test_an_observed_run_without_steps_is_all_na(tmp_path: Path) -> None:
    MadeUpRank(tmp_path).write()
    report = build_report(tmp_path)
    assert report["bubbles"] == {"steps": 0, "ratio": None, "by_kind": {}}
    assert report["main"]["steps"] == 0
    assert "slowdown n/a: no block of steps left alone between squeezed ones" in render(report)


def test_ranks_of_two_machines_come_onto_one_clock(tmp_path: Path) -> None:
    for number, wall_s in ((0, 1.7e9), (1, 1.7e9 - 3600.0)):
        rank = MadeUpRank(tmp_path, number, wall_s=wall_s)
        if number:  # booted an hour earlier: the same moment has a larger number there
            rank.now_ns += 3600 * 10**9
        rank.windows(squeezed_ms=104.0 - 2 * number)
        rank.end()
        rank.write()
    main = build_report(tmp_path)["main"]
    assert (main["steps"], main["slowdown"]) == (16, pytest.approx(0.03))


def test_trials_are_read_from_the_study(tmp_path: Path) -> None:
    MadeUpRank(tmp_path).write()
    study_directory(tmp_path).mkdir()
    study = optuna.create_study(storage=open_storage(str(journal_path(study_directory(tmp_path)))), study_name="digits")
    for value in (0.5, 0.25):
        trial = study.ask()
        trial.suggest_float("lr", 0.1, 0.1)
        study.tell(trial, value)
    study.tell(study.ask(), state=optuna.trial.TrialState.PRUNED)
    study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)
    study.ask()
    for milestone in (1, 3):  # it has a score after epoch 1
        paused = optuna.trial.create_trial(
            state=optuna.trial.TrialState.WAITING, user_attrs={MILESTONE: milestone}, intermediate_values={1: 0.5}
        )
        study.add_trial(paused)
    before = optuna.logging.get_verbosity()
    report = build_report(tmp_path)
    best = {"number": 1, "value": 0.25, "params": {"lr": 0.1}}
    counts = {"completed": 2, "pruned": 1, "failed": 1, "running": 1, "paused": 1, "waiting": 1}
    study = {**counts, "best": best}
    assert report["trials"] == {**study, "studies": {"digits": study}, "problem": None}
    assert optuna.logging.get_verbosity() == before
    assert "best: trial 1 with 0.25\n            lr=0.1\n" in render(report)


def test_a_study_that_was_not_begun_has_no_trials(tmp_path: Path) -> None:
    """The job has ended while its side task was starting, and another's file is there."""
    MadeUpRank(tmp_path).write()
    study_directory(tmp_path).mkdir()
    optuna.create_study(storage=open_storage(str(journal_path(study_directory(tmp_path)))), study_name="another")
    report = build_report(tmp_path)
    assert report["trials"] == {**NO_TRIALS, "studies": {}}
    assert closing_lines(report, tmp_path)[0] == "Gained  no trial"


def test_an_unreadable_study_is_named_and_the_rest_reported(tmp_path: Path) -> None:
    MadeUpRank(tmp_path).write()
    study_directory(tmp_path).mkdir()
    journal_path(study_directory(tmp_path)).write_text("this is no journal\n" * 9)
    report = build_report(tmp_path)
    assert report["trials"]["completed"] is None
    assert "study.journal: JSONDecodeError" in report["trials"]["problem"]
    assert "n/a completed" in render(report)


def test_what_is_no_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=f"{tmp_path}: no records of a run here; allowed: "):
        main_report(tmp_path, as_json=False)
    MadeUpRank(tmp_path, version=99).write()
    with pytest.raises(ReportError, match=rf"rank0\.events.*: record version 99; allowed: version {RECORD_VERSION}$"):
        build_report(tmp_path)


@pytest.mark.parametrize("rolled", ["details", "units"])
def test_of_a_long_run_bubbles_and_units_are_those_of_the_last_steps(tmp_path: Path, rolled: str) -> None:
    rank = MadeUpRank(tmp_path, keep_bytes=16_000 if rolled == "details" else None)
    rank.work_per_step = 4
    for _ in range(6):
        rank.windows(bubbles=[(20, 10), (60, 10)], units=[(20.5, 4, 4), (28, 3, 3)])
        rank.windows(bubbles=[(20, 10), (60, 10)], units=[(22.5, 4, 4), (28, 2, 2)])
        rank.flush()
    rank.end(work_per_s=1000.0)
    rank.write()
    units = units_path(tmp_path, 0)
    if rolled == "units":
        data = units.read_bytes()
        older(units).write_bytes(data[100 * UNIT_RECORD.size : -50 * UNIT_RECORD.size])  # the first hundred are gone
        units.write_bytes(data[-50 * UNIT_RECORD.size :])
    report = build_report(tmp_path)
    steps, kept = report["main"]["steps"], report["bubbles"]["steps"]
    assert steps == 12 * 16 and 16 < kept < steps - 16
    assert report["main"]["slowdown"] == pytest.approx(0.01), "of all steps"
    assert report["bubbles"]["by_kind"]["recv_grad"]["count_per_step"] == 2
    assert report["bubbles"]["ratio"] == pytest.approx(0.2, rel=0.01)
    assert report["side"]["fill"] == pytest.approx(0.3, abs=0.02)
    squeezed = report["ranks"]["0"]["bubbles"]["slots"][0]["count"]
    assert report["side"]["harvest"] == pytest.approx(4 * (kept - 1) / 1000 / (2 * squeezed * 0.01))
    assert report["side"]["units"] == 2 * squeezed
    assert f"; bubbles and units: the last {kept} steps" in render(report)
    first = steps - kept + 1
    names = [event["name"] for event in json.loads(write_trace(tmp_path).read_text())["traceEvents"]]
    shown = [int(name.split()[1]) for name in names if name.startswith("step ")]
    assert shown and min(shown) >= first
    drawn = re.search(r"Step (\d+) as recorded", draw_step(tmp_path, tmp_path / "step.svg").read_text())
    assert drawn and int(drawn[1]) >= first


def test_ranks_are_compared_over_the_steps_that_all_have_kept(tmp_path: Path) -> None:
    for number, (bubbles, units) in enumerate(([[(20, 10)] * 1, []], [[(at, 2) for at in range(20, 60, 4)], []])):
        rank = MadeUpRank(tmp_path, number, keep_bytes=80_000)
        for _ in range(12):
            rank.windows(bubbles=bubbles, units=units)
            rank.flush()
        rank.write()
    report = build_report(tmp_path)
    kept = [of["bubbles"]["steps"] for of in report["ranks"].values()]
    assert kept[0] == kept[1] < 12 * 16 == report["main"]["steps"]
    assert report["bubbles"]["ratio"] == pytest.approx((10 + 20) / 200, rel=0.01)
    assert [of["bubbles"]["ratio"] for of in report["ranks"].values()] == pytest.approx([0.1, 0.2], rel=0.01)


def test_a_daemon_that_comes_after_another_is_told_of_the_same_job(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    attached_ns = rank.now_ns
    rank.windows(bubbles=[(20, 10)])
    rank.now_ns += MS
    rank.add("run", version=RECORD_VERSION, rank=0, config={"side": None}, wall_s=1.7e9, t_ns=rank.now_ns)
    rank.add("job", job=0, pid=7, rank=0, t_ns=attached_ns, world_size=2, stage=0, stages=2, micro_batches=4)
    rank.windows(bubbles=[(20, 10)])
    rank.write()
    report = build_report(tmp_path)
    assert report["main"]["steps"] == report["bubbles"]["steps"] == 32
    assert report["bubbles"]["ratio"] == pytest.approx(0.1, rel=0.01)
    assert report["bubbles"]["by_kind"]["recv_grad"]["count_per_step"] == 1


def test_bubbles_of_a_job_whose_record_is_lost(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    rank.windows(bubbles=[(20, 10)])
    rank.write()
    lines = [line for line in rank.path.read_text().splitlines() if '"r":"job"' not in line]
    rank.path.write_text("\n".join(lines))
    assert build_report(tmp_path)["main"]["steps"] == 16


def test_text_fits_a_terminal_and_json_is_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (0, 11):
        rank = MadeUpRank(tmp_path, number)
        rank.windows(bubbles=[(20, 10)], units=[(21, 5, 5)])
        rank.write()
    assert main_report(tmp_path, as_json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(write_report(tmp_path).read_text()) == build_report(tmp_path)
    assert main_report(tmp_path, as_json=False) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "  11    11  100.00   101.00    +1.00%" in text
