"""A ghost stage on a device's stream: its waits are as long as the model of its peers says, and hooks find them."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.ghost.model import Timing, steady_bubble_ratio
from benchmarks.ghost.program import GhostShape, programs_of
from benchmarks.gpu.device_kernels import FakeKernels
from benchmarks.gpu.fake_driver import DEFAULT_STREAM, FakeDriver
from benchmarks.gpu.ghost_stream import StreamStage

MS = 1_000_000
STEPS = 6
PATIENCE_S = 60.0
TIMING = Timing(forward_ns=10 * MS, backward_ns=20 * MS, optimizer_ns=5 * MS)

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with FakeDriver() as made:
        yield made


@pytest.mark.parametrize(("stage", "spinning"), [(0, False), (2, True), (3, False)])
def test_the_device_idles_as_the_model_says(stage: int, spinning: bool, driver: FakeDriver, tmp_path: Path) -> None:
    shape = GhostShape(stages=4, stage=stage, micro_batches=4, clipping=False)
    true_stage = StreamStage(
        shape,
        TIMING,
        driver=driver,
        kernels=FakeKernels(driver),
        stream=DEFAULT_STREAM,
        device="cpu",
        spinning=spinning,
        synchronize=lambda: None,
        folder=tmp_path,
    )
    with true_stage:
        for _ in range(STEPS):
            true_stage.train_batch()
        issued = len(driver.kernels)
        computes = STEPS * 9  # four forwards, four backwards and an optimizer's step
        end_s = time.monotonic() + PATIENCE_S
        while sum(kernel.end_ns > 0 for kernel in driver.kernels) < computes:
            assert time.monotonic() < end_s, driver.kernels
            time.sleep(0.01)
    assert issued < computes, "the host ran ahead of the device"
    per_step = computes // STEPS
    ends_ns = [driver.kernels[step * per_step - 1].end_ns for step in range(2, STEPS + 1)]
    busy_ns = per_step and TIMING.optimizer_ns + 4 * (TIMING.forward_ns + TIMING.backward_ns)
    step_ns = (ends_ns[-1] - ends_ns[0]) / (len(ends_ns) - 1)
    modelled_ns = busy_ns / (1 - steady_bubble_ratio(programs_of(shape), TIMING, stage))
    assert step_ns > 0.95 * modelled_ns, "no message came before its time"
