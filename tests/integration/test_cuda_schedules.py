"""The gate of a device that follows real schedules, with evaluations and checkpoints between steps.

The device is a driver whose streams are threads. What it finds on the page when it comes to an instruction is a matter
of the stream's order, not of time.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from deepspeed.runtime.pipe import schedule as schedules

from benchmarks.gpu.fake_driver import DEFAULT_STREAM, FakeDriver
from benchmarks.gpu.fake_torch import fake_torch
from ds_hooks import attach
from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import DeviceGate, Field
from ds_hooks.shared.page.plan import plan_slot, plan_steps

MS = 1_000_000
SLOTS = 400
"""More than any of these schedules has instructions."""
P2P = {"SendActivation", "SendGrad", "RecvActivation", "RecvGrad"}
LOSS, EVALUATION, CHECKPOINT = "loss", "evaluation", "checkpoint"

DualPipeV = getattr(schedules, "DualPipeVSchedule", None)
NEEDS_DUALPIPEV = pytest.mark.skipif(DualPipeV is None, reason="this release of DeepSpeed has no DualPipeV")


class Engine:
    """One of four stages. Each instruction notes whether the device finds the gate open when it comes to it."""

    global_rank, num_stages, micro_batches = 0, 4, 16
    device = SimpleNamespace(type="cuda")
    is_data_parallel, is_pipe_parallel = False, True
    grid = SimpleNamespace(world_size=4)
    module = SimpleNamespace(tied_comms={})
    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {}

    def __init__(self, kind: Any, stage: int, driver: FakeDriver, words: "memoryview[int]") -> None:
        self.stage_id, self.kind = stage, kind
        self._driver, self._words = driver, words
        self.found: list[tuple[str, bool, bool]] = []
        both = (self._schedule(), self._evaluation())
        commands = {type(each) for schedule in both for step in schedule.steps() for each in step}
        self._INSTRUCTION_MAP = {
            command: lambda engine, name=command.__name__, **_: engine._run(name) for command in commands
        }

    def _schedule(self) -> Any:
        return self.kind(self.micro_batches, self.num_stages, self.stage_id)

    def _evaluation(self) -> Any:
        return schedules.InferenceSchedule(self.micro_batches, self.num_stages, self.stage_id)

    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1

    def _run(self, name: str) -> None:
        words = self._words

        def note() -> None:
            self.found.append((name, words[Field.DEVICE_GATE] > DeviceGate.CLOSED, bool(words[Field.BUBBLE] & 1)))

        self._driver.queue(DEFAULT_STREAM, note)

    def _exec_schedule(self, schedule: Any) -> None:
        for step in schedule.steps():
            for command in step:
                self._INSTRUCTION_MAP[type(command)](self)

    def _aggregate_total_loss(self) -> float:
        self._run(LOSS)
        return 0.5

    def train_batch(self) -> float:
        self._exec_schedule(self._schedule())
        return self._aggregate_total_loss()

    def eval_batch(self) -> None:
        """Its waits are none of a step's."""
        self._run(EVALUATION)
        self._exec_schedule(self._evaluation())
        self._run(EVALUATION)

    def save_checkpoint(self) -> None:
        self._driver.synchronize()
        self._run(CHECKPOINT)
        self._driver.synchronize()


@pytest.fixture
def driver(memory_path: Path) -> Iterator[FakeDriver]:
    with FakeDriver() as made, fake_torch(made):
        yield made


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", [schedules.TrainSchedule, pytest.param(DualPipeV, marks=NEEDS_DUALPIPEV)])
def test_the_gate_is_open_in_waits_and_shut_wherever_the_device_computes(
    kind: Any, stage: int, memory_path: Path, driver: FakeDriver
) -> None:
    directory = memory_path / "pages"
    page = Page.open(page_path(directory, 0))
    for slot in range(SLOTS):
        plan_slot(page.words, slot, 5 * MS)
    plan_steps(page.words, 1, 100)
    engine = Engine(kind, stage, driver, page.words)
    handle = attach(engine, directory=directory, local_rank=0)
    assert handle.enabled, handle.fault
    for step in range(3):
        engine.train_batch()
        engine.eval_batch()
        if step == 1:
            engine.save_checkpoint()
    driver.synchronize()
    assert handle.enabled, handle.fault
    handle.detach()
    page.close()

    waits = {"CommitP2P"} if kind is DualPipeV else P2P
    evaluates, steps, opened = False, 0, 0
    for name, gate, bubble in engine.found:
        assert gate == bubble, "both words agree wherever the device computes or waits"
        evaluates ^= name == EVALUATION
        steps += name == LOSS
        if evaluates or name in (EVALUATION, CHECKPOINT) or name not in waits | P2P | {LOSS}:
            assert not gate, f"step {steps}: {name} finds the gate open"
        elif name in waits:
            assert gate, f"step {steps}: {name} finds the gate shut"
            opened += 1
    assert steps == 3 and opened >= 3 * 2 * Engine.micro_batches / 2
