"""The main job of the ghost scenarios: one true stage of a ghost pipeline, as a process to squeeze.

    python -m benchmarks.ghost.job --stages 4 --stage 1 --micro-batches 4 --steps 100 [--toggle W --times FILE]

It waits for its side task (`--wait-for-side`) and for files (`--wait-for`), so that no measured step is lost to another
process's imports.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch

from benchmarks.ghost.network import EXAMPLES, Network, of_example
from benchmarks.ghost.program import GhostShape
from benchmarks.ghost.recording import read_recordings
from benchmarks.ghost.stage import GhostStage
from benchmarks.shared.processes import PATIENCE_S, wait_for_files
from benchmarks.shared.toggle import Toggled
from benchmarks.windows.baselines import ready_processes
from benchmarks.windows.modes import ENVIRONMENT, STEP_GRAINS, Windows
from ds_hooks import attach
from ds_hooks.shared.page.file import Page, page_path, runtime_dir
from ds_hooks.shared.page.layout import Field, SideActivity
from ds_hooks.shared.processes.signals import WAKE_SIGNAL


def wait_for_side() -> None:
    """Return when the side task sleeps at the gate."""
    page = Page.open(page_path(runtime_dir(), 0))
    deadline_s = time.monotonic() + PATIENCE_S
    words = page.words
    while time.monotonic() < deadline_s and (
        not words[Field.SIDE_PID] or words[Field.SIDE_ACTIVITY] != SideActivity.ASLEEP
    ):
        time.sleep(0.05)
    page.close()


class StepGrainWakes:
    """Wakes the process of step grain in its windows when a wait begins, as our hooks wake our side task.

    Args:
        windows: the windows of the run.
        baselines: mode -> the process of its baseline.
    """

    def __init__(self, windows: Windows, baselines: Mapping[str, int]) -> None:
        self._windows = windows
        self._baselines = {mode: process for mode, process in baselines.items() if mode in STEP_GRAINS}
        self._page = Page.open(page_path(runtime_dir(), 0))

    def on_wait(self) -> None:
        """A wait begins."""
        process = self._baselines.get(self._windows.locate(self._page.words[Field.STEP]).mode)
        if process is not None:
            os.kill(process, WAKE_SIGNAL)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ghost.job")
    parser.add_argument("--example", choices=list(EXAMPLES), help="what is trained, and its shape; default: blocks")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--dualpipev", action="store_true")
    parser.add_argument("--micro-batch-size", type=int, default=512)
    parser.add_argument("--steps", type=int, help="default: by the windows of the environment, in --seconds")
    parser.add_argument("--seconds", type=float, default=36.0)
    parser.add_argument("--least-cycles", type=int, default=3)
    parser.add_argument("--core", type=int)
    parser.add_argument("--wait-for-side", action="store_true")
    parser.add_argument("--ready", type=Path, metavar="FILE", help="make this file once the side task is there")
    parser.add_argument("--wait-for", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument(
        "--toggle", type=int, default=0, metavar="W", help="attach for W steps, detach for W, and so on"
    )
    parser.add_argument("--recorded", type=Path, metavar="RUN", help="ghosts repeat what the ranks of this run did")
    parser.add_argument("--model", type=Path, help="where to write what the model says of each step's length, in ms")
    parser.add_argument("--times", type=Path, help="with --toggle: where each step's time goes")
    return parser.parse_args()


def main() -> None:
    """Calibrate, attach, train."""
    options = _options()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    torch.set_num_threads(1)
    shape, network = _shape_and_network(options)
    with GhostStage(shape, micro_batch_size=options.micro_batch_size, network=network) as stage:
        if options.wait_for_side:
            wait_for_side()
        if options.ready is not None:
            options.ready.touch()
        wait_for_files(options.wait_for)
        if options.recorded is not None:
            stage.follow(read_recordings(options.recorded, stage.programs))
        else:
            stage.calibrate()  # only when all is quiet: the ghosts become as fast as this stage is now
        if options.toggle:
            _toggle(stage, options)
        else:
            _train(stage, options)


def _shape_and_network(options: argparse.Namespace) -> tuple[GhostShape, Network | None]:
    if options.example is not None:
        return of_example(options.example, options.stage)
    named = {field.name for field in fields(GhostShape)}
    return GhostShape(**{name: value for name, value in vars(options).items() if name in named}), None


def _toggle(stage: GhostStage, options: argparse.Namespace) -> None:
    toggled = Toggled(stage.engine, options.toggle)
    for _ in range(options.steps):
        toggled.before_step()
        stage.train_batch()
        toggled.after_step()
    toggled.close()
    options.times.write_text(json.dumps(toggled.steps))


def _train(stage: GhostStage, options: argparse.Namespace) -> None:
    steps = options.steps
    if ENVIRONMENT in os.environ:
        windows = Windows.of_environment()
        stage.wire.on_wait = StepGrainWakes(windows, ready_processes(options.wait_for)).on_wait
        cycles = max(options.least_cycles, round(options.seconds * 1e3 / stage.step_ms / windows.length))
        steps = steps or windows.first_step(cycles) - 1
    handle = attach(stage.engine)
    for _ in range(steps):
        stage.train_batch()
    handle.detach()
    if options.model is not None:
        options.model.write_text(json.dumps(stage.modelled_step_ms(steps)))


if __name__ == "__main__":
    main()
