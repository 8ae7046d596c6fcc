"""The measurements of a device, on the fake driver: two processes, real words between them, and every figure ends."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.gpu.fake_calibration import SWITCH_S, Unkind, fake_device
from benchmarks.gpu.fake_driver import FakeDriver
from squeezer.calibration import __main__ as calibration
from squeezer.calibration import figures as figures_module
from squeezer.calibration import measure as measure_module
from squeezer.calibration.figures import MARGINS_US, Figures, driver_messages
from squeezer.calibration.measure import MeasureError, described, measure
from squeezer.calibration.measured_device import LateError, MeasuredDevice, Word
from squeezer.calibration.peer import Peer
from squeezer.calibration.verdict import QUEUE_DEPTH, Verdict, judge
from tests.support.measured_rows import WITH_MPS as MEASURED
from tests.support.sandbox import is_alive, wait_for
from tests.support.struck_limits import LIMIT_S, strike_the_first

pytestmark = [pytest.mark.integration, pytest.mark.alone]

PROGRAM = "benchmarks.gpu.fake_calibration"
REPETITIONS = 3


@pytest.fixture(autouse=True)
def streams_run_at_once() -> Iterator[None]:
    """Threads that play streams do not wait for one that polls: with a core for each process, none runs too often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def device(memory_path: Path) -> Iterator[MeasuredDevice]:
    made = fake_device(memory_path / "words")
    yield made
    made.open_all()
    cast(FakeDriver, made.driver).close()


def rows(
    device: MeasuredDevice, path: Path, monkeypatch: pytest.MonkeyPatch, *figures: str, side: Unkind | None = None
) -> list[dict[str, Any]]:
    monkeypatch.setattr(Figures, "_count", lambda self, full: REPETITIONS)
    monkeypatch.setattr(MeasuredDevice.offset_ns, "__defaults__", (REPETITIONS,))
    monkeypatch.setattr(figures_module, "_OPENS_AFTER_S", 1.0)
    environment = {} if side is None else side.environment()
    made = Figures(device, path, environment, quick=True, program=PROGRAM)
    return [{"figure": figure, **row} for figure in figures for row in getattr(made, figure)()]


def test_every_figure_that_decides_comes_to_an_end_and_is_judged(
    device: MeasuredDevice, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rows(device, memory_path / "words", monkeypatch, *measure_module.FIGURES)
    arrivals = [row for row in found if row["figure"] == "arrival"]
    assert all(len(row["started_us"]) == REPETITIONS for row in arrivals)
    margins = {f"margin_{margin}" for margin in MARGINS_US}
    assert {row["side"] for row in arrivals} == {"none", "idle", "waiting", "busy"} | margins
    assert all(row["side_kernels"] > 0 for row in found if row["figure"] == "slices")
    verdict = judge(found, mps=False)
    assert set(verdict.late_us) == {"spin", "stream"}
    assert verdict.queue_depth == QUEUE_DEPTH and not verdict.is_old
    assert "main job waits" not in verdict.reason


# What figures 5 and 6 decide, beside other figures that were measured on an H200 with MPS and let a side task run


def judged(found: list[dict[str, Any]]) -> Verdict:
    others = {row["figure"] for row in MEASURED} - {row["figure"] for row in found}
    return judge([*found, *(row for row in MEASURED if row["figure"] in others)], mps=True)


@pytest.mark.parametrize(
    ("side", "said"),
    [
        (Unkind(waits=("launch",)), "launch, behind the wait took"),
        (Unkind(waits=("cuMemFree",), depth=32), "launches have room"),
    ],
)
def test_a_device_that_takes_little_work_behind_a_shut_gate_is_given_one_unit_in_an_open_bubble(
    side: Unkind, said: str, device: MeasuredDevice, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = judged(rows(device, memory_path / "words", monkeypatch, "blocking", side=side))
    assert verdict.sound and verdict.queue_depth == 1
    assert said in verdict.queue_reason
    assert any("one unit, and none before its bubble has begun" in line for line in described(verdict))


def test_where_the_main_job_would_wait_for_a_side_task_that_waits_bubbles_are_only_observed(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unkind = Unkind(locks=("cuMemFree", "cuMemAlloc"))
    made = fake_device(memory_path / "words", unkind)
    verdict = judged(rows(made, memory_path / "words", monkeypatch, "blocking", side=unkind))
    made.open_all()
    cast(FakeDriver, made.driver).close()
    assert not verdict.sound and verdict.queue_depth == QUEUE_DEPTH
    assert "the main job waits for a side task whose host waits at the gate: cuMemAlloc took" in verdict.reason


def test_words_that_take_the_main_jobs_device_too_long_leave_bubbles_observed(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_ns = 500_000
    made = fake_device(memory_path / "words", Unkind(late_ns=late_ns))
    verdict = judged(rows(made, memory_path / "words", monkeypatch, "words"))
    cast(FakeDriver, made.driver).close()
    assert verdict.words_ns > 5 * late_ns and not verdict.sound
    assert verdict.reason.startswith("the words of each bubble take the main job's device")


def test_units_are_timed_as_graphs_and_one_by_one(
    device: MeasuredDevice, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rows(device, memory_path / "words", monkeypatch, "graphs")
    assert [(row["graph"], row["live"], len(row["to_end_us"])) for row in found] == [
        (graph, live, REPETITIONS) for graph in (False, True) for live in (False, True)
    ]


def test_marks_are_timed_in_every_way(
    device: MeasuredDevice, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = rows(device, memory_path / "words", monkeypatch, "words")
    ways = ("nothing", "events", "one_word_each", "batches", "two_streams")
    assert {len(row["device_us_per_bubble"][way]) for way in ways} == {REPETITIONS}


@pytest.mark.parametrize("has_log", [True, False])
def test_what_waits_at_a_gate_that_stays_shut_comes_through_and_the_kernels_log_is_kept(
    has_log: bool, device: MeasuredDevice, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = ["[1.0] NVRM: loading"]
    monkeypatch.setattr(figures_module, "SHUT_S", 2.0)
    monkeypatch.setattr(figures_module, "driver_messages", lambda: [*logged] if has_log else None)
    monkeypatch.setattr(device, "open_all", lambda: logged.append("[2.0] NVRM: Xid 31"))
    (row,) = rows(device, memory_path / "words", monkeypatch, "shut")
    assert row["came_through"] and row["main_us"] and row["shut_s"] == 0.5
    assert row["kernel_log"] == (["[2.0] NVRM: Xid 31"] if has_log else None)


def test_only_the_drivers_own_lines_are_read_of_the_kernels_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_messages() is None, "there is no such tool"
    tool = tmp_path / "dmesg"
    tool.write_text("#!/bin/sh\necho '[1] usb 1-1'; echo '[2] NVRM: Xid (PCI:0): 31'; exit $FAILS\n")
    tool.chmod(0o755)
    monkeypatch.setenv("FAILS", "0")
    assert driver_messages() == ["[2] NVRM: Xid (PCI:0): 31"]
    monkeypatch.setenv("FAILS", "1")
    assert driver_messages() is None, "this user may not read it"


def test_a_second_process_that_does_not_answer_is_ended_and_named(device: MeasuredDevice, memory_path: Path) -> None:
    other = Peer(device, memory_path / "words", {}, PROGRAM)
    other.tell("gated", count=1, us=1)  # nobody opens the gate
    with pytest.raises(LateError, match="did not answer"):
        other.answer(0.2)
    other.close()
    assert other.process.poll() is not None
    assert device.words[Word.STOP] == 1


KILLED = """
import os, sys
from pathlib import Path
from benchmarks.gpu.fake_calibration import Unkind, fake_device
from squeezer.calibration.measured_device import Word
from squeezer.calibration.peer import Peer, started

path = Path(sys.argv[1])
device = fake_device(path)
other = Peer(device, path, {}, "benchmarks.gpu.fake_calibration")
other.tell("busy", us=100)
started(device)
device.words[Word.RUN] = 1
print(other.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_second_process_does_not_compute_on_when_the_first_was_killed(memory_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(memory_path / "words")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        other = int(first.stdout.readline())
    try:
        wait_for(lambda: not is_alive(other), "its end")
    finally:
        if is_alive(other):
            os.kill(other, signal.SIGKILL)


@pytest.mark.parametrize(
    ("rows", "said"),
    [([], "nothing was measured"), ([{"figure": "slices", "error": "no CUDA driver"}], "no CUDA driver")],
)
def test_a_device_that_cannot_be_measured_is_not_judged(
    rows: list[dict[str, Any]], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], *_: object, **__: object) -> None:
        if rows:
            Path(command[3]).write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(measure_module, "run_limited", run)
    with pytest.raises(MeasureError, match=said):
        list(measure(mps=True, environment={"XDG_STATE_HOME": str(tmp_path)}))
    assert not (tmp_path / "bubble-squeezer").exists()


def test_rows_that_were_cut_off_allow_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        measure_module, "run_limited", lambda command, *_, **__: Path(command[3]).write_text('{"figure": "sli')
    )
    with pytest.raises(MeasureError, match="rows were cut off"):
        list(measure(mps=True))


def test_where_launches_block_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "run_limited", lambda *_, **__: pytest.fail("it would hang until its limit"))
    with pytest.raises(MeasureError, match="CUDA_LAUNCH_BLOCKING is 1"):
        list(measure(mps=True, environment={"CUDA_LAUNCH_BLOCKING": "1"}))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_row_is_on_disk_before_the_next_one_is_measured(
    device: MeasuredDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "rows.jsonl", []

    class Dying:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def slices(self) -> Iterator[dict[str, Any]]:
            for number in range(2):
                yield {"number": number}
                seen.append([row["number"] for row in rows_of(file) if "number" in row])
            raise LateError("the device is gone")

    monkeypatch.setattr(MeasuredDevice, "open", lambda path: device)
    monkeypatch.setattr(device, "uuid", lambda: "GPU-1")
    monkeypatch.setattr(calibration, "Figures", Dying)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["", str(file), "--one", str(tmp_path), "--figures", "slices"])
    assert calibration.main() == 1
    assert seen == [[0], [0, 1]]
    assert rows_of(file)[0]["uuid"] == "GPU-1" and "the device is gone" in rows_of(file)[-1]["error"]


def test_a_figure_that_takes_too_long_ends_alone(
    memory_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two is held by the driver, as is its second process, where the gate is shut."""
    file = tmp_path / "rows.jsonl"
    monkeypatch.setattr(calibration, "PROGRAM", "tests.support.hanging_calibration")
    monkeypatch.setattr(calibration, "FIGURE_LIMIT_S", LIMIT_S)
    strike_the_first(monkeypatch, lambda: file.exists() and '"pids"' in file.read_text())
    monkeypatch.setattr(sys, "argv", ["", str(file), "--figures", "slices,words", "--quick"])
    assert calibration.main() == 1
    begun, late, words = (row for row in rows_of(file) if row["figure"] != "device")
    assert (late["figure"], late["error"]) == ("slices", f"not done within {LIMIT_S:g} s")
    assert words["figure"] == "words" and "error" not in words
    assert not any(map(is_alive, begun["pids"])), "nothing is left of it"
    assert begun["words"].startswith("/dev/shm/bsq-") and not Path(begun["words"]).parent.parent.exists()
