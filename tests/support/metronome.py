"""A main job without DeepSpeed: as much of a pipeline engine as the hooks touch, with even waits.

    python -m tests.support.metronome [--bubble-ms 30] [--compute-ms 5] [--steps N] [--core C] [--local-rank R]

Stage 0 of 2: a step computes, waits for a gradient, computes, and waits for the loss. It prints a line per step, and
ends with status 0 after its steps or when its standard input ends. A line of JSON on standard input, such as
`{"bubble_ms": 0}`, changes what its next steps do; `stall_ms` is spent outside bubbles and without computing, and so is
the wait for the file lock that `lock` names. `{"detach": true}` detaches the hooks, and the steps go on.
`{"engine": 1}` trains another engine from now on, with hooks and settings of its own; `{"engine": 0}` is the first.
`{"run": "import gc; gc.freeze()"}` runs Python between two steps.
"""

import argparse
import fcntl
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import ClassVar

from ds_hooks import Handle, attach


class ForwardPass: ...


class RecvGrad: ...


class BackwardPass: ...


class Schedule:
    """One micro-batch."""

    micro_batches, stages, stage_id = 1, 2, 0

    def steps(self) -> Iterator[list[object]]:
        """As DeepSpeed's: lists of instructions."""
        yield [ForwardPass()]
        yield [RecvGrad(), BackwardPass()]


class Metronome:
    """The engine."""

    device = SimpleNamespace(type="cpu")
    global_rank = stage_id = 0
    num_stages, micro_batches = 2, 1
    is_data_parallel, is_pipe_parallel = False, True
    grid = SimpleNamespace(world_size=2)
    module = SimpleNamespace(tied_comms={})

    def __init__(self, bubble_ms: float, compute_ms: float) -> None:
        self.bubble_ms, self.compute_ms, self.stall_ms = bubble_ms, compute_ms, 0.0
        self.lock, self.detach = "", False

    def is_last_stage(self) -> bool:
        return False

    def _stall(self) -> None:
        time.sleep(self.stall_ms / 1e3)
        if self.lock:
            with open(self.lock, "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
        self._compute()

    def _compute(self) -> None:
        end_s = time.thread_time() + self.compute_ms / 2e3
        while time.thread_time() < end_s:
            pass

    def _wait(self) -> None:
        time.sleep(self.bubble_ms / 1e3)

    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[["Metronome"], None]]] = {
        ForwardPass: _stall,
        RecvGrad: _wait,
        BackwardPass: _compute,
    }

    def _exec_schedule(self, schedule: Schedule) -> None:
        for commands in schedule.steps():
            for command in commands:
                self._INSTRUCTION_MAP[type(command)](self)

    def _aggregate_total_loss(self) -> float:
        self._wait()
        return 0.5

    def train_batch(self) -> float:
        self._exec_schedule(Schedule())
        return self._aggregate_total_loss()


def orders() -> Iterator[bytes]:
    """What has come on standard input since the last call, line by line; an empty line: it has ended."""
    while select.select([0], [], [], 0)[0]:
        data = os.read(0, 65536)
        yield from data.splitlines() or [b""]
        if not data:
            return


def main() -> None:
    """Attach the real hooks, and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=sys.maxsize)
    parser.add_argument("--bubble-ms", type=float, default=30.0)
    parser.add_argument("--compute-ms", type=float, default=5.0)
    parser.add_argument("--core", type=int)
    parser.add_argument("--local-rank", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    engines: list[Metronome] = []
    handles: list[Handle] = []

    def build() -> Metronome:
        engines.append(Metronome(arguments.bubble_ms, arguments.compute_ms))
        handles.append(attach(engines[-1], local_rank=arguments.local_rank))
        return engines[-1]

    def detach() -> None:
        for handle in handles:
            handle.detach()

    engine = build()
    for step in range(1, arguments.steps + 1):
        for order in orders():
            if not order:
                detach()
                return
            changes = json.loads(order)
            exec(changes.pop("run", ""), {})
            number = changes.pop("engine", engines.index(engine))
            engine = engines[number] if number < len(engines) else build()
            vars(engine).update(changes)
            if engine.detach:
                detach()
        engine.train_batch()
        print(f"step {step}", flush=True)
    detach()


if __name__ == "__main__":
    main()
