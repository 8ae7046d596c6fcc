"""Verdicts on rows that were measured on an H200, and on such rows with one thing changed."""

import json
import pwd
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from squeezer.calibration import measure
from squeezer.calibration.measure import described
from squeezer.calibration.verdict import judge
from squeezer.calibration.verdict_store import driver_version, keep, kept, state_file
from tests.support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "gpu"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def test_processes_that_overlap_may_share_a_device() -> None:
    verdict = judge(rows("calibration_mps.jsonl"))
    assert verdict.sound and verdict.turn_ns == 0
    assert 0 < verdict.opening_ns < 100_000


def test_processes_that_take_turns_may_not_if_the_main_job_is_switched_out_while_it_waits() -> None:
    verdict = judge(rows("calibration_first.jsonl"))
    assert not verdict.sound
    assert 2_000_000 < verdict.turn_ns < 3_000_000
    assert verdict.late_us["stream"]["1500"] > 100
    assert "134 µs where it waits by stream" in verdict.reason


def test_the_margin_is_the_least_that_is_enough_for_both_ways_to_wait() -> None:
    found = rows("calibration_mps.jsonl")
    assert judge(found).margin_ns == 0
    late = next(r for r in found if (r.get("receive"), r.get("side")) == ("stream", "margin_0"))
    late["started_us"] = [each + 200 for each in late["started_us"]]
    assert judge(found).margin_ns == 150_000


@pytest.mark.parametrize(("late", "margin_ns"), [("margin_500", 1_500_000), ("margin_1500", 0)])
def test_a_margin_is_not_enough_where_a_longer_one_is_not(late: str, margin_ns: int) -> None:
    found = rows("calibration_mps.jsonl")
    row = next(r for r in found if (r.get("receive"), r.get("side")) == ("spin", late))
    row["started_us"] = [each + 200 for each in row["started_us"]]
    for each in (found, found[::-1]):
        assert (judge(each).margin_ns, judge(each).sound) == (margin_ns, margin_ns > 0)


@pytest.mark.parametrize("figure", ["slices", "opening", "arrival"])
@pytest.mark.parametrize("fails", [True, False])
def test_a_figure_that_is_missing_or_failed_is_named(figure: str, fails: bool) -> None:
    found = [row for row in rows("calibration_mps.jsonl") if row["figure"] != figure]
    with pytest.raises(ValueError, match=f"the figure {figure} is missing"):
        judge([*found, {"figure": figure, "error": "not done within 40 s"}] if fails else found)


def test_arrivals_without_all_margins_are_not_judged() -> None:
    found = [row for row in rows("calibration_mps.jsonl") if row.get("side") != "margin_500"]
    with pytest.raises(ValueError, match="not all margins"):
        judge(found)


@pytest.mark.parametrize("late", [1, 3])
def test_nothing_is_found_to_be_late_beside_a_main_job_that_is_late_alone(
    late: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = [{"figure": "device", "uuid": "GPU-1", "name": "H200", "driver": "580.1"}, *rows("calibration_first.jsonl")]
    for row in found:
        if row.get("side") == "none":
            row["started_us"][:late] = [3000] * late
    monkeypatch.setattr(measure, "measure_rows", lambda environment: found)
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    if late == 1:
        assert any(line.startswith("observe only") for line in measure.measure(mps=False, environment=environment))
        return
    assert judge(found).sound
    with pytest.raises(measure.MeasureError, match="not quiet"):
        list(measure.measure(mps=False, environment=environment))
    assert not state_file(environment).exists()


def test_a_row_without_values_is_not_judged() -> None:
    found = rows("calibration_mps.jsonl")
    next(row for row in found if row.get("side") == "margin_500")["started_us"] = []
    with pytest.raises(ValueError, match="without values"):
        judge(found)


def test_what_it_says_names_figures_and_the_decision() -> None:
    lines = list(described(judge(rows("calibration_first.jsonl"))))
    assert lines[0] == "slices: processes take turns of 2.4 ms"
    assert lines[-1].startswith("observe only: the main job's next kernel starts late")
    assert list(described(judge(rows("calibration_mps.jsonl"))))[-1].startswith("sound: ")


def test_a_verdict_is_kept_for_its_device_driver_and_way(tmp_path: Path) -> None:
    file = state_file({"XDG_STATE_HOME": str(tmp_path)})
    assert file == tmp_path / "bubble-squeezer" / "devices.json"
    verdict, other = judge(rows("calibration_mps.jsonl")), judge(rows("calibration_first.jsonl"))
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
            keep("GPU-1", "580.1", judge(rows("calibration_mps.jsonl")), mps=True, file=file)


def test_verdicts_that_are_kept_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    file, verdict = tmp_path / "devices.json", judge(rows("calibration_mps.jsonl"))
    names = [f"GPU-{number}" for number in range(8)]
    with ThreadPoolExecutor(len(names)) as pool:
        for _ in range(5):
            file.unlink(missing_ok=True)
            list(pool.map(lambda name: keep(name, "580.1", verdict, mps=True, file=file), names))
            assert all(kept(name, "580.1", mps=True, file=file) for name in names)


ODD = json.dumps({"1, driver 580.1, MPS": {**asdict(judge(rows("calibration_mps.jsonl"))), "margin_ns": None}})


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"1, driver 580.1, MPS": {"sound": true}}', ODD])
def test_a_file_that_says_nothing_useful_is_no_verdict(tmp_path: Path, text: str) -> None:
    (tmp_path / "devices.json").write_text(text, encoding="utf-8")
    assert kept("GPU-1", "580.1", mps=True, file=tmp_path / "devices.json") is None


def test_the_drivers_version_is_read_from_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) == ""
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC: 13.2.0\n")
    assert driver_version(file) == "580.159.04"
