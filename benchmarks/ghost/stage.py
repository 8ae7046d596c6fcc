"""One true stage of a pipeline of any size, in one process; DeepSpeed's engine and schedule run untouched.

`torch.distributed`'s fake process group replaces the other ranks. Ghosts replace DeepSpeed's point-to-point functions,
and answer when the real peers would (`model.py`). As under gloo, sender and receiver wait for each other, and a wait
leaves the core free. Use one ghost stage at a time; after `close()` the same process can make another.

`python -m benchmarks.ghost --stages 4 --stage 1 --micro-batches 4` prints each slot's wait beside its forecast.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Self
from unittest import mock

import torch

from benchmarks.ghost.engine import build_engine
from benchmarks.ghost.model import Timing, Wait, replay, steady_bubble_ratio
from benchmarks.ghost.network import Network, blocks
from benchmarks.ghost.program import GhostShape, programs_of
from benchmarks.ghost.recording import Recording


class GhostStage:
    """Context manager around a DeepSpeed `PipelineEngine` whose peers are ghosts.

    The process should compute on as many threads as the rank would (`OMP_NUM_THREADS=1` for one core). At the default
    sizes one forward takes about 10 ms on one core. Call `calibrate` before hooks are attached to `engine`.

    Args:
        shape: the pipeline and the true stage in it.
        hidden: H, width of every Linear+GELU block.
        layers: blocks in each stage; in DualPipeV, in both stages of a rank together.
        micro_batch_size: B, rows of the x_BH that the stages exchange.
        network: what is trained instead of blocks of that size.
        forward_ms_hint: the ghosts' forward time until `calibrate` is called; a backward takes twice as long.

    Raises:
        RuntimeError: if a process group exists already, or DeepSpeed does not run on the CPU.
    """

    def __init__(
        self,
        shape: GhostShape,
        *,
        hidden: int = 512,
        layers: int = 4,
        micro_batch_size: int = 512,
        network: Network | None = None,
        forward_ms_hint: float = 10.0,
    ) -> None:
        self.shape = shape
        self.programs = programs_of(shape)
        self.timing = self._timing(round(forward_ms_hint * 1e6), round(2 * forward_ms_hint * 1e6), 0)
        self._undo = contextlib.ExitStack()
        try:
            network = network or blocks(shape, size_BH=(micro_batch_size, hidden), layers=layers)
            self.engine, self.wire = build_engine(shape, self.programs, network, self._undo)
        except BaseException:
            self.close()
            raise
        self.wire.at_once = False
        self.wire.restart(self.timing)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Put DeepSpeed's own functions back and destroy the process group. May be called twice."""
        self._undo.close()

    def train_batch(self) -> float:
        """Run one step. Returns the loss, or 0.0 where the true stage is not the last one."""
        self.wire.begin()
        return float(self.engine.train_batch())

    @property
    def step_ms(self) -> float:
        """The model's forecast of a step's time, at the present timing."""
        ends_ns = replay(self.programs, self.timing, steps=4)[self.shape.stage].step_ends_ns
        return (ends_ns[-1] - ends_ns[-2]) / 1e6

    def modelled_step_ms(self, steps: int) -> list[float]:
        """The modelled times of the first `steps` steps since the start, each with its own disturbances."""
        ends_ns = replay(self.programs, self.timing, steps=steps)[self.shape.stage].step_ends_ns
        return [(end_ns - begin_ns) / 1e6 for begin_ns, end_ns in pairwise((0, *ends_ns))]

    @property
    def waits(self) -> Sequence[Wait]:
        """Every message since the start, with the gradients' norms and the losses; the newest last.

        Of DualPipeV, which sends in batches, no sends.
        """
        return self.wire.waits

    @property
    def bubble_ratio(self) -> float:
        """Share of this stage's time that the model forecasts to be bubble, at the present timing."""
        return steady_bubble_ratio(self.programs, self.timing, self.shape.stage)

    def measured_bubble_ratio(self, *, skip: int = 1) -> float:
        """Share of this stage's time that was spent in waits, over all steps since the start but the first `skip`."""
        ends_ns = self.wire.step_ends_ns
        first = max(skip, 1)
        if len(ends_ns) <= first:
            raise ValueError(f"{len(ends_ns)} steps have been run: more than {first} are needed")
        idle_ns = sum(wait.idle_ns for wait in self.waits if wait.step >= first)
        return idle_ns / (ends_ns[-1] - ends_ns[first - 1])

    def calibrate(self, steps: int = 5) -> None:
        """Measure this stage's own durations (medians) and give them to the ghosts: the pipeline is then balanced.

        Meanwhile receives answer at once. All time between two computations counts as part of the second, and the rest
        of a step as part of the optimizer, so that the ghosts carry the engine's overhead too. Then the model
        restarts: `waits` is empty, and the next `train_batch` is step 0.
        """
        gaps_ns: dict[str, list[int]] = {"ForwardPass": [], "BackwardPass": [], "rest": []}
        mark_ns = 0

        def timed(name: str, execute: Any) -> Any:
            def run(engine: Any, *args: Any, **kwargs: Any) -> None:
                nonlocal mark_ns
                execute(engine, *args, **kwargs)
                now_ns = time.monotonic_ns()
                gaps_ns[name].append(now_ns - mark_ns)
                mark_ns = now_ns

            return run

        table = self.engine._INSTRUCTION_MAP
        names = {kind: kind.__name__ for kind in table}
        probes = {kind: timed(names[kind], call) if names[kind] in gaps_ns else call for kind, call in table.items()}
        with contextlib.ExitStack() as undo:
            undo.enter_context(mock.patch.object(self.engine, "_INSTRUCTION_MAP", probes))
            undo.enter_context(mock.patch.object(self.wire, "at_once", True))
            self.engine.train_batch()  # the first step allocates
            for gaps in gaps_ns.values():
                gaps.clear()
            for _ in range(steps):
                mark_ns = time.monotonic_ns()
                self.engine.train_batch()
                gaps_ns["rest"].append(time.monotonic_ns() - mark_ns)
        self.timing = self._timing(*(round(statistics.median(gaps)) for gaps in gaps_ns.values()))
        self.wire.restart(self.timing)

    def follow(self, recordings: Sequence[Recording]) -> None:
        """Let the ghosts repeat what all stages did in a real job, in place of `calibrate`."""
        self.timing = replace(self.timing, recorded=tuple(recordings))
        self.wire.restart(self.timing)

    def _timing(self, forward_ns: int, backward_ns: int, optimizer_ns: int) -> Timing:
        """An ordinary stage's durations, from the true stage's."""
        shape = self.shape
        is_last = shape.stage == shape.stages - 1
        # A true last stage is itself the slow one, so its ghosts are faster by the same ratio.
        own_ratio = shape.slow_last if is_last else 1.0
        return Timing(
            forward_ns=round(forward_ns / own_ratio),
            backward_ns=round(backward_ns / own_ratio),
            optimizer_ns=round(optimizer_ns / own_ratio),
            latency_ns=round(shape.latency_us * 1e3),
            meets=not shape.dualpipev,  # whose sends and receives are launched in batches
            stage_ratios=(*[1.0] * (shape.stages - 1), shape.slow_last),
            jitter=shape.jitter,
            steady_stage=shape.stage,
            seed=shape.seed,
        )


def _print_waits(stage: GhostStage, steps: int) -> None:
    """One line for each slot: the median wait beside the model's, all stages being ghosts."""
    trace = replay(stage.programs, stage.timing, steps=steps)[stage.shape.stage]
    print(f"{'slot':>4} {'waits for':<15} {'measured ms':>11} {'forecast ms':>11} {'late us':>8}")
    for slot in sorted({wait.slot for wait in trace.waits}):
        measured = [wait for wait in stage.waits if wait.slot == slot and wait.step >= 1]
        forecast_ms = statistics.median(w.idle_ns for w in trace.waits if w.slot == slot and w.step >= 1) / 1e6
        measured_ms = statistics.median(wait.idle_ns for wait in measured) / 1e6
        late = [wait.end_ns - wait.arrival_ns for wait in measured if wait.idle_ns]
        late_us = f"{statistics.median(late) / 1e3:8.0f}" if late else f"{'-':>8}"
        name = f"{measured[0].what} {measured[0].micro_batch}"
        print(f"{slot:>4} {name:<15} {measured_ms:>11.2f} {forecast_ms:>11.2f} {late_us}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one ghost stage and print its waits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ghost", description=main.__doc__)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="steps after the first")
    parser.add_argument("--slow-last", type=float, default=1.0)
    parser.add_argument("--jitter", type=float, default=0.0)
    parser.add_argument("--latency-us", type=float, default=0.0)
    parser.add_argument("--dualpipev", action="store_true")
    parser.add_argument("--no-clipping", dest="clipping", action="store_false")
    options = vars(parser.parse_args(argv))
    steps = options.pop("steps")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_LOG_LEVEL", "warning")
    torch.set_num_threads(1)
    with GhostStage(GhostShape(**options)) as stage:
        stage.calibrate()
        for _ in range(steps + 1):
            stage.train_batch()
        forward_ms, backward_ms = stage.timing.forward_ns / 1e6, stage.timing.backward_ns / 1e6
        print(f"ms: forward {forward_ms:.2f}, backward {backward_ms:.2f}, rest {stage.timing.optimizer_ns / 1e6:.2f}")
        _print_waits(stage, steps + 1)
        print(f"bubble ratio: {stage.measured_bubble_ratio():.3f} measured, {stage.bubble_ratio:.3f} forecast")
