"""A true stage on a device's stream, with peers that answer when the device really sends.

The host issues a whole step ahead of the device, so no host call shows when a message leaves. Instead the device
counts, in stream order, on the word SENT how many of the stage's messages it has reached. A separate process (`python
-m benchmarks.gpu.ghost_stream`) simulates the other stages from that, and counts on READY how many messages may pass.
A receive waits for READY: in the stream itself, which takes no multiprocessor, or in a kernel that spins.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, ClassVar, Self

from benchmarks.ghost.model import PipelineModel, Timing
from benchmarks.ghost.program import GhostModelError, GhostShape, Op, programs_of
from benchmarks.gpu.device_kernels import Kernels
from benchmarks.shared.paths import ROOT
from ds_hooks.shared.cuda_driver import DeviceWords, Driver
from squeezer.calibration.measured_device import map_words

SENT, READY, END, PROBE = range(4)
PEERS_NAP_S = {"cuda": 0.0, "cpu": 5e-5}
"""Poll only with a core to spare; two cores have none."""


class StreamStage:
    """One stage, as an engine that hooks can attach to: DeepSpeed's schedule, with kernels of known length as compute.

    A context manager, around the process of its peers.

    Args:
        shape: the pipeline, and the stage.
        timing: compute times of the stage and its peers.
        driver: the device.
        kernels: for it.
        stream: returns the compute stream.
        device: ``"cuda"`` or ``"cpu"`` (the fake driver).
        spinning: whether receives are spinning kernels.
        synchronize: waits until the device has done all that was issued.
        folder: a directory in memory.
    """

    global_rank = 0
    is_data_parallel, is_pipe_parallel = False, True
    module = SimpleNamespace(tied_comms={})
    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {}

    def __init__(
        self,
        shape: GhostShape,
        timing: Timing,
        *,
        driver: Driver,
        kernels: Kernels,
        stream: int,
        device: str,
        spinning: bool,
        synchronize: Callable[[], None],
        folder: Path,
    ) -> None:
        from deepspeed.runtime.pipe import schedule

        self.shape, self._timing = shape, timing
        self.device = SimpleNamespace(type="cuda")
        self.grid = SimpleNamespace(world_size=shape.stages)
        self.stage_id, self.num_stages, self.micro_batches = shape.stage, shape.stages, shape.micro_batches
        self._driver, self._kernels, self._stream, self._spinning = driver, kernels, stream, spinning
        self._synchronize = synchronize
        self._schedule = schedule.TrainSchedule(shape.micro_batches, shape.stages, shape.stage)
        programs = programs_of(shape)
        program = programs[shape.stage]
        self._ops: dict[int, list[Op]] = {}
        for op in program:
            self._ops.setdefault(op.slot, []).append(op)
        self._loss_slot = program[-1].slot
        kinds = {type(command) for commands in self._schedule.steps() for command in commands}
        self._INSTRUCTION_MAP = {kind: StreamStage._run_next for kind in kinds}  # type: ignore[misc]
        self._slot = 0
        self._messages = 0
        self._words = map_words(folder / "ghost")
        self._device_words = DeviceWords(driver, self._words, probe=PROBE)
        settings = {
            "programs": [[astuple(op) for op in own] for own in programs],
            "stage": shape.stage,
            "timing": asdict(timing),
            "words": str(folder / "ghost"),
            "nap_s": PEERS_NAP_S[device],
        }
        self._settings = folder / "ghost.json"
        self._settings.write_text(json.dumps(settings), encoding="utf-8")

    def __enter__(self) -> Self:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, "-m", "benchmarks.gpu.ghost_stream", str(self._settings)]
        self._peers = subprocess.Popen(command, env=environment, cwd=ROOT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._words[READY] = 2**31 - 1  # lets everything through that still waits
        self._words[END] = 1
        try:
            self._peers.wait(30)
        except subprocess.TimeoutExpired:
            self._peers.kill()
            self._peers.wait()
        self._device_words.release()

    def is_last_stage(self) -> bool:
        """As in DeepSpeed."""
        return self.stage_id == self.num_stages - 1

    def train_batch(self) -> float:
        """Issue one step."""
        self._exec_schedule(self._schedule)
        return self._aggregate_total_loss()

    def _exec_schedule(self, schedule: Any) -> None:
        self._slot = 0
        for commands in schedule.steps():
            for command in commands:
                self._INSTRUCTION_MAP[type(command)](self)

    def _aggregate_total_loss(self) -> float:
        self._synchronize()  # as DeepSpeed's does by a copy from pageable memory: its host is no step ahead
        self._slot = self._loss_slot
        self._run_next()
        return 0.0

    def _run_next(self) -> None:
        for op in self._ops.get(self._slot, ()):
            if op.verb == "compute":
                self._kernels.work(self._stream, round(self._timing.compute_ns(self.stage_id, op.what)))
                continue
            self._messages += 1
            self._driver.write_word(self._stream, self._device_words.address(SENT), self._messages)
            if op.verb != "send":
                wait = self._kernels.receive if self._spinning else self._driver.wait_at_least
                wait(self._stream, self._device_words.address(READY), self._messages)
        self._slot += 1


class Peers:
    """All other stages, on this process's clock."""

    def __init__(self, programs: Sequence[Sequence[Op]], stage: int, timing: Timing, words: "memoryview[int]") -> None:
        self._messages = [op for op in programs[stage] if op.verb != "compute"]
        self._programs, self._stage, self._timing, self._words = programs, stage, timing, words
        self._model: PipelineModel | None = None
        self._seen = 0
        self._passed = 0
        self._next_ns: int | None = None
        self._blocked_at = -1

    def play(self, nap_s: float) -> None:
        """Answer until the true stage's process says that it is done, or has ended."""
        parent = os.getppid()
        words = self._words
        while not words[END] and os.getppid() == parent:
            sent = words[SENT]
            now_ns = time.monotonic_ns()
            while self._seen < sent:
                self._see(now_ns)
            self._let_pass(now_ns)
            if nap_s:
                time.sleep(nap_s)

    def _op(self, number: int) -> tuple[int, Op]:
        step, index = divmod(number, len(self._messages))
        return step, self._messages[index]

    def _see(self, now_ns: int) -> None:
        """Record that the true stage's device has reached its next message."""
        if self._model is None:
            self._model = PipelineModel(self._programs, self._timing, true_stage=self._stage, start_ns=now_ns)
        step, op = self._op(self._seen)
        self._seen += 1
        if op.verb in ("send", "sync"):
            self._model.sent(step, op, now_ns)

    def _let_pass(self, now_ns: int) -> None:
        """Count the messages that may pass by now, including those that the true stage has not reached yet."""
        while self._model is not None:
            step, op = self._op(self._passed)
            if op.verb != "send":
                if self._next_ns is None and self._blocked_at == self._seen:
                    return  # wait for the true stage's first message
                try:
                    self._next_ns = self._next_ns or self._model.arrival_ns(step, op)
                except GhostModelError:
                    self._blocked_at = self._seen
                    return
                if self._next_ns > now_ns:
                    return
                self._next_ns = None
            elif self._passed >= self._seen:
                return
            self._passed += 1
            self._words[READY] = self._passed


def main() -> None:
    """Run the peers' process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=Path)
    settings = json.loads(parser.parse_args().settings.read_text(encoding="utf-8"))
    timing = Timing(**{**settings["timing"], "stage_ratios": tuple(settings["timing"]["stage_ratios"])})
    programs = [[Op(*op) for op in own] for own in settings["programs"]]
    Peers(programs, settings["stage"], timing, map_words(Path(settings["words"]))).play(settings["nap_s"])


if __name__ == "__main__":
    main()
