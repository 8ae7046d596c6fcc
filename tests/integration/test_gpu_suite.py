"""The GPU suite played on the fake driver: two processes, the real hooks, the real gate."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu import stage as gpu_stage
from benchmarks.gpu.parts import Bench, faults, words_between_processes

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def bench(memory_path: Path) -> Iterator[Bench]:
    made = Bench.open("cpu", memory_path, quick=True)
    yield made
    made.close()


def test_a_side_task_at_the_gate_starts_by_the_other_process_device(bench: Bench) -> None:
    (run,) = words_between_processes(bench)
    assert len(run["across_us"]) >= 10 and min(run["across_us"]) > 0


def test_the_device_goes_on_when_a_process_is_killed_whose_stream_waits(bench: Bench) -> None:
    assert faults(bench)[1]["goes_on"]


def test_beside_a_ghost_stage_kernels_start_in_bubbles(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_stage, "WINDOW_STEPS", 4)
    monkeypatch.setattr(gpu_stage, "OBSERVE_STEPS", 4)
    run = gpu_stage._measure(bench, "gate", gpu_stage.QUICK_WINDOWS, spinning=False)
    assert len(run["pairs_ns"]) == gpu_stage.QUICK_WINDOWS
    # a thread that plays a stream may lose its core between the gate and the kernel behind it; naive ones: six of ten
    assert run["kernels"] > 20 and run["outside"] <= run["kernels"] / 20
