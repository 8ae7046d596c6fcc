"""The GPU suite played on the fake driver: two processes, the real hooks, the real gate."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_suite
from benchmarks.gpu import stage as gpu_stage
from benchmarks.gpu.parts import Bench, context_changes, sigkill, words_between_processes
from benchmarks.shared.results import machine
from tests.support.paths import ROOT
from tests.support.sandbox import is_alive, wait_for
from tests.support.struck_limits import LIMIT_S, strike_the_first

pytestmark = pytest.mark.integration


@pytest.fixture
def bench(memory_path: Path) -> Iterator[Bench]:
    made = Bench.open("cpu", memory_path, quick=True)
    yield made
    made.close()


@pytest.mark.slow
def test_a_side_task_at_the_gate_starts_by_the_other_process_device(bench: Bench) -> None:
    run = words_between_processes(bench)
    assert len(run["across_us"]) >= 10 and min(run["across_us"]) > 0


@pytest.mark.slow
def test_the_device_goes_on_when_a_process_is_killed_whose_stream_waits(bench: Bench) -> None:
    assert sigkill(bench)["goes_on"]


@pytest.mark.slow
def test_beside_a_ghost_stage_kernels_start_in_bubbles(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_stage, "WINDOW_STEPS", 4)
    monkeypatch.setattr(gpu_stage, "OBSERVE_STEPS", 4)
    run = gpu_stage.ghost_stage(bench, "gate", "waiting")
    assert len(run["pairs_ns"]) == gpu_stage.QUICK_WINDOWS
    # a thread that plays a stream may lose its core between the gate and the kernel behind it; naive ones: six of ten
    assert run["kernels"] > 20 and run["outside"] <= run["kernels"] / 20


def test_a_side_task_whose_stream_waits_lets_it_through_when_it_is_asked_to_end(bench: Bench) -> None:
    with bench.side("waiting") as side:
        side.process.terminate()
        assert side.process.wait(60) == 0
        assert len(side.stamps()) == 1, "the kernel behind the gate"


def test_gaps_are_timed_while_a_context_comes_and_goes(bench: Bench) -> None:
    found = context_changes(bench)
    assert len(found["alone_gaps_us"]) == len(found["beside_gaps_us"]) == 20
    assert min(found["alone_gaps_us"] + found["beside_gaps_us"]) >= 0 < min(found["start_s"], found["end_s"])


WORDS = {"scenario": "words", "device": "fake driver", "to_host_us": [1.0], "round_trip_us": [1.0], "across_us": []}


def measured(*runs: dict[str, Any]) -> dict[str, Any]:
    """A file of the suite, measured here on the fake driver with `--quick`."""
    return {"quick": True, "machine": machine(), "runs": [*runs]}


def suite(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the suite on the fake driver. Returns its status, and what it has written."""
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--device", "cpu", "--quick", "--json", str(folder), *options])
    status = gpu_suite.main()
    return status, json.loads((folder / "gpu_suite.json").read_text())["runs"]


@pytest.mark.parametrize("hears", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_figure_that_hangs_ends_alone_and_can_be_measured_later(
    hears: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs in the driver, beside a side task at the gate; where it does not hear, Python gets no signal there."""
    hangs = tmp_path / "hangs"
    strike_the_first(monkeypatch, lambda: hangs.exists() and hangs.read_text(), 60.0 if hears else 0.5)
    monkeypatch.setenv("HANGING_FIGURE", str(hangs))
    monkeypatch.setenv("HEARS", str(hears))
    monkeypatch.setattr(gpu_suite, "ONE_FIGURE", "tests.support.hanging_figure")
    status, runs = suite(monkeypatch, tmp_path, "--only", "faults", "--limit-s", str(LIMIT_S))
    hung, measured = runs
    assert status == 1 and hung == {"scenario": "sigstop", "error": f"not done within {LIMIT_S:g} s"}
    assert measured["scenario"] == "sigkill" and measured["goes_on"]
    pids = [int(number) for number in hangs.read_text().split()]
    assert len(pids) == 2 and not any(map(is_alive, pids))

    monkeypatch.setattr(gpu_suite, "ONE_FIGURE", "benchmarks.gpu.one_figure")
    _, runs = suite(monkeypatch, tmp_path, "--only", "faults", "--resume")
    assert sorted(run["scenario"] for run in runs) == ["sigkill", "sigstop"]
    assert measured in runs and not any("error" in run for run in runs)


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": [3]}'])
def test_a_file_of_something_else_is_left_as_it_is(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu_suite.json").write_text(text)
    with pytest.raises(SystemExit, match="is no file of this suite"):
        suite(monkeypatch, tmp_path, "--resume")
    assert (tmp_path / "gpu_suite.json").read_text() == text


def figure(*program: str, folder: Path) -> "subprocess.Popen[bytes]":
    """Start the figure `sigstop` of a program, on the fake driver."""
    command = [sys.executable, *program, "sigstop", "--device", "cpu", "--quick", "--folder", str(folder)]
    return subprocess.Popen(command, cwd=ROOT)


NEVER_CLOSES = """
import time
from benchmarks.gpu import one_figure
from benchmarks.gpu.parts import Bench

Bench.close = lambda self: time.sleep(1000)
one_figure.main()
"""


def test_what_was_measured_is_on_disk_before_anything_can_hang_at_its_end(memory_path: Path) -> None:
    with figure("-c", NEVER_CLOSES, folder=memory_path) as process:
        row = wait_for(lambda: (memory_path / "row.json").exists() and (memory_path / "row.json").read_text(), "a row")
        assert process.poll() is None
        process.kill()
    assert json.loads(row)["queued"]


def test_a_side_task_ends_with_a_figure_that_is_killed(
    memory_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("HANGING_FIGURE", str(pids))
    monkeypatch.setenv("HEARS", "True")
    with figure("-m", "tests.support.hanging_figure", folder=memory_path) as process:
        _, side = map(int, wait_for(lambda: pids.exists() and pids.read_text(), "its side task").split())
        process.kill()
    wait_for(lambda: not is_alive(side), "its end")


def test_without_a_server_none_is_used_although_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"  # notes what a figure's processes have in their environment
    tool.write_text('#!/bin/sh\ncase "$*" in *loop*) echo "at $CUDA_MPS_PIPE_DIRECTORY"; exec sleep 1000;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    _, runs = suite(monkeypatch, tmp_path, "--only", "faults")
    assert {line for run in runs for line in run["meters"]} == {"at /dev/null"}


def test_where_no_server_starts_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match=r"no MPS server starts: .*nvidia-cuda-mps-control"):
        suite(monkeypatch, tmp_path, "--mps")


def test_a_part_that_is_named_leaves_what_was_measured_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {"scenario": "sigkill", "error": "not done within 90 s"}
    (tmp_path / "gpu_suite.json").write_text(json.dumps(measured(WORDS, before)))
    _, runs = suite(monkeypatch, tmp_path, "--only", "faults")
    assert [run["scenario"] for run in runs] == ["words", "sigstop", "sigkill"]
    assert runs[0] == WORDS and before not in runs


@pytest.mark.parametrize("way", [("--resume",), ("--only", "faults")])
@pytest.mark.parametrize(
    ("otherwise", "said"),
    [
        ({"quick": False}, "quick False, now True"),
        ({"machine": {**machine(), "gpu": "NVIDIA H200, 580.159.04"}}, "gpu NVIDIA H200, 580.159.04, now "),
        ({"machine": {**machine(), "torch": "0.1"}}, "torch 0.1, now "),
        ({"runs": [{**WORDS, "device": "NVIDIA H200"}]}, "device NVIDIA H200, now cpu"),
    ],
)
def test_nothing_is_added_to_what_was_measured_otherwise(
    way: tuple[str, ...], otherwise: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({**measured(WORDS), **otherwise})
    (tmp_path / "gpu_suite.json").write_text(text)
    with pytest.raises(SystemExit, match=f"measured otherwise .*{said}"):
        suite(monkeypatch, tmp_path, *way)
    assert (tmp_path / "gpu_suite.json").read_text() == text
