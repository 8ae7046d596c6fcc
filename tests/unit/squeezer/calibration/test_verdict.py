"""Verdicts on rows that were measured on an H200, and on such rows with one thing changed."""

import json
import pwd
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from squeezer.calibration import measure
from squeezer.calibration.measure import described
from squeezer.calibration.verdict import QUEUE_DEPTH, VERSION, judge
from squeezer.calibration.verdict_store import driver_version, keep, kept, state_file
from tests.support.measured_rows import in_turns, with_mps


def test_processes_that_overlap_may_share_a_device() -> None:
    verdict = judge(with_mps(), mps=True)
    assert verdict.sound and verdict.turn_ns == 0
    assert 0 < verdict.opening_ns < 100_000


def test_processes_that_take_turns_may_not_if_the_main_job_is_switched_out_while_it_waits() -> None:
    verdict = judge(in_turns(), mps=False)
    assert not verdict.sound
    assert 2_000_000 < verdict.turn_ns < 3_000_000
    assert verdict.late_us["stream"]["1500"] > 100
    assert "134 µs where it waits by stream" in verdict.reason


def test_the_margin_is_the_least_that_is_enough_for_both_ways_to_wait() -> None:
    found = with_mps()
    assert judge(found, mps=True).margin_ns == 0
    late = next(r for r in found if (r.get("receive"), r.get("side")) == ("stream", "margin_0"))
    late["started_us"] = [each + 200 for each in late["started_us"]]
    assert judge(found, mps=True).margin_ns == 150_000


@pytest.mark.parametrize(("late", "margin_ns"), [("margin_500", 1_500_000), ("margin_1500", 0)])
def test_a_margin_is_not_enough_where_a_longer_one_is_not(late: str, margin_ns: int) -> None:
    found = with_mps()
    row = next(r for r in found if (r.get("receive"), r.get("side")) == ("spin", late))
    row["started_us"] = [each + 200 for each in row["started_us"]]
    for each in (found, found[::-1]):
        assert (judge(each, mps=True).margin_ns, judge(each, mps=True).sound) == (margin_ns, margin_ns > 0)


def test_clients_of_a_server_that_take_turns_all_the_same_only_observe() -> None:
    slices = [row for row in in_turns() if row["figure"] == "slices"]
    found = [*slices, *(row for row in with_mps() if row["figure"] != "slices")]
    verdict = judge(found, mps=True)
    assert not verdict.sound
    assert verdict.reason == "processes take turns of 2.4 ms, although MPS should let them overlap"
    assert judge(found, mps=False).sound, "arrivals decide where turns are expected"


def test_half_of_the_shortest_bubble_worth_opening_is_left_when_the_first_kernel_starts() -> None:
    found = with_mps()
    assert judge(found, mps=True).least_bubble_ns < 200_000
    row = next(row for row in found if row["figure"] == "opening")
    row["opening_us"] = [each + 3000 for each in row["opening_us"]]
    assert 6_000_000 < judge(found, mps=True).least_bubble_ns < 6_200_000


def test_what_a_bubbles_words_take_comes_on_top_of_each_arrival() -> None:
    found = with_mps()
    assert 0 < judge(found, mps=True).words_ns < 20_000
    ways = next(row for row in found if row["figure"] == "words")["device_us_per_bubble"]
    ways["batches"] = [each + 15 for each in ways["batches"]]
    assert judge(found, mps=True).margin_ns > 0, "an arrival just in time is late by then"
    ways["batches"] = [each + 30 for each in ways["batches"]]
    verdict = judge(found, mps=True)
    assert not verdict.sound
    assert verdict.reason == "the words of each bubble take the main job's device 56 µs"


@pytest.mark.parametrize("process", ["side", "main"])
def test_a_call_that_is_refused_beside_a_shut_gate_counts_as_one_that_waits(process: str) -> None:
    found = with_mps()
    calls = next(row for row in found if row.get("process") == process)["took_ms"]
    calls["launch, same stream" if process == "side" else "cuMemAlloc"] = "CUDA_ERROR_UNKNOWN (999)"
    verdict = judge(found, mps=True)
    assert (verdict.sound, verdict.queue_depth) == ((True, 1) if process == "side" else (False, 2))
    assert "failed: CUDA_ERROR_UNKNOWN" in (verdict.queue_reason if process == "side" else verdict.reason)


def test_a_machine_on_which_nothing_takes_time_is_not_judged() -> None:
    found = with_mps()
    next(row for row in found if row.get("process") == "side")["took_ms"]["nothing"] = 149.0
    with pytest.raises(ValueError, match="not quiet"):
        judge(found, mps=True)


@pytest.mark.parametrize("figure", measure.FIGURES)
@pytest.mark.parametrize("fails", [True, False])
def test_a_figure_that_is_missing_or_failed_is_named(figure: str, fails: bool) -> None:
    found = [row for row in with_mps() if row["figure"] != figure]
    with pytest.raises(ValueError, match=f"the figure {figure} is missing"):
        judge([*found, {"figure": figure, "error": "not done within 40 s"}] if fails else found, mps=True)


def test_arrivals_without_all_margins_are_not_judged() -> None:
    found = [row for row in with_mps() if row.get("side") != "margin_500"]
    with pytest.raises(ValueError, match="not all margins"):
        judge(found, mps=True)


@pytest.mark.parametrize("late", [1, 3])
def test_nothing_is_found_to_be_late_beside_a_main_job_that_is_late_alone(
    late: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = [{"figure": "device", "uuid": "GPU-1", "name": "H200", "driver": "580.1"}, *in_turns()]
    for row in found:
        if row.get("side") == "none":
            row["started_us"][:late] = [3000] * late
    monkeypatch.setattr(measure, "measure_rows", lambda environment: found)
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    if late == 1:
        assert any(line.startswith("observe only") for line in measure.measure(mps=False, environment=environment))
        return
    assert judge(found, mps=False).sound
    with pytest.raises(measure.MeasureError, match="not quiet"):
        list(measure.measure(mps=False, environment=environment))
    assert not state_file(environment).exists()


def test_a_row_without_values_is_not_judged() -> None:
    found = with_mps()
    next(row for row in found if row.get("side") == "margin_500")["started_us"] = []
    with pytest.raises(ValueError, match="without values"):
        judge(found, mps=True)


def test_what_it_says_names_figures_and_the_decision() -> None:
    lines = list(described(judge(in_turns(), mps=False)))
    assert lines[0] == "slices: processes take turns of 2.4 ms"
    assert lines[-1].startswith("observe only: the main job's next kernel starts late")
    assert list(described(judge(with_mps(), mps=True)))[-1].startswith("sound: ")


def test_a_verdict_is_kept_for_its_device_driver_and_way(tmp_path: Path) -> None:
    file = state_file({"XDG_STATE_HOME": str(tmp_path)})
    assert file == tmp_path / "bubble-squeezer" / "devices.json"
    verdict, other = judge(with_mps(), mps=True), judge(in_turns(), mps=False)
    keep("GPU-1", "580.1", verdict, mps=True, file=file)
    keep("GPU-1", "580.1", other, mps=False, file=file)
    assert kept("GPU-1", "580.1", mps=True, file=file) == verdict
    assert kept("GPU-1", "580.1", mps=False, file=file) == other
    assert kept("MIG-1", "580.1", mps=False, file=file) == other, "CUDA's name of an instance begins with GPU"
    for uuid, driver in (("GPU-2", "580.1"), ("GPU-1", "590.0"), ("GPU-1", "")):
        assert kept(uuid, driver, mps=True, file=file) is None


def test_a_user_without_a_home_has_no_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    for environment in ({}, {"HOME": "", "XDG_STATE_HOME": "somewhere"}):
        file = state_file(environment)
        assert file.is_absolute() and kept("GPU-1", "580.1", mps=True, file=file) is None
        with pytest.raises(OSError):
            keep("GPU-1", "580.1", judge(with_mps(), mps=True), mps=True, file=file)


def test_verdicts_that_are_kept_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    file, verdict = tmp_path / "devices.json", judge(with_mps(), mps=True)
    names = [f"GPU-{number}" for number in range(8)]
    with ThreadPoolExecutor(len(names)) as pool:
        for _ in range(5):
            file.unlink(missing_ok=True)
            list(pool.map(lambda name: keep(name, "580.1", verdict, mps=True, file=file), names))
            assert all(kept(name, "580.1", mps=True, file=file) for name in names)


ODD = json.dumps({"1, driver 580.1, MPS": {**asdict(judge(with_mps(), mps=True)), "margin_ns": None}})


def test_what_an_earlier_version_kept_is_known_to_be_old(tmp_path: Path) -> None:
    file, verdict = tmp_path / "devices.json", judge(with_mps(), mps=True)
    keep("GPU-1", "580.1", verdict, mps=True, file=file)
    (entry,) = json.loads(file.read_text()).values()
    for name in ("words_ns", "queue_depth", "queue_reason", "version"):
        del entry[name]
    file.write_text(json.dumps({"1, driver 580.1, MPS": entry}))
    old = kept("GPU-1", "580.1", mps=True, file=file)
    assert old is not None and old.is_old and not verdict.is_old
    assert (old.sound, old.margin_ns, old.queue_depth) == (verdict.sound, verdict.margin_ns, QUEUE_DEPTH)


@pytest.mark.parametrize(
    "says", [{"version": VERSION + 1}, {"queue_depth": 0}, {"margin_ns": -1}, {"opening_ns": 0.5}, {"sound": 1}]
)
def test_what_this_version_cannot_mean_is_no_verdict(says: dict[str, float], tmp_path: Path) -> None:
    file = tmp_path / "devices.json"
    keep("GPU-1", "580.1", judge(with_mps(), mps=True), mps=True, file=file)
    ((name, entry),) = json.loads(file.read_text()).items()
    assert kept("GPU-1", "580.1", mps=True, file=file) is not None
    file.write_text(json.dumps({name: entry | says}))
    assert kept("GPU-1", "580.1", mps=True, file=file) is None


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"1, driver 580.1, MPS": {"sound": true}}', ODD])
def test_a_file_that_says_nothing_useful_is_no_verdict(tmp_path: Path, text: str) -> None:
    (tmp_path / "devices.json").write_text(text, encoding="utf-8")
    assert kept("GPU-1", "580.1", mps=True, file=tmp_path / "devices.json") is None


def test_the_drivers_version_is_read_from_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) == ""
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC: 13.2.0\n")
    assert driver_version(file) == "580.159.04"
