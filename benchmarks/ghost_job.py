"""A main job that is one true stage of a ghost pipeline: the process that the benchmarks squeeze.

    python -m benchmarks.ghost_job --stages 4 --stage 1 --micro-batches 4 --steps 100 [--toggle W --times FILE]

Waits for its side task (if `--wait-for-side`) so that no measured step is lost to another process's imports.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch

from benchmarks.ghost import GhostShape, GhostStage
from benchmarks.toggle import Toggled
from ds_hooks import attach
from ds_hooks.page import Doing, Field, Page, page_path, runtime_dir

SIDE_PATIENCE_S = 120.0


def wait_for_side() -> None:
    """Return when the side task sleeps at the gate."""
    page = Page.open(page_path(runtime_dir(), 0))
    deadline_s = time.monotonic() + SIDE_PATIENCE_S
    words = page.words
    while time.monotonic() < deadline_s and (not words[Field.SIDE_PID] or words[Field.SIDE_DOING] != Doing.ASLEEP):
        time.sleep(0.05)
    page.close()


def main() -> None:
    """Calibrate, attach, train."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ghost_job")
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--slow-last", type=float, default=1.0)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--core", type=int)
    parser.add_argument("--wait-for-side", action="store_true")
    parser.add_argument(
        "--toggle", type=int, default=0, metavar="W", help="attach for W steps, detach for W, and so on"
    )
    parser.add_argument("--times", type=Path, help="with --toggle: where each step's time goes")
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    torch.set_num_threads(1)
    shape = GhostShape(
        stages=options.stages, stage=options.stage, micro_batches=options.micro_batches, slow_last=options.slow_last
    )
    with GhostStage(shape) as stage:
        stage.calibrate()
        if options.wait_for_side:
            wait_for_side()
        if options.toggle:
            toggled = Toggled(stage.engine, options.toggle)
            for _ in range(options.steps):
                toggled.before_step()
                stage.train_batch()
                toggled.after_step()
            toggled.close()
            options.times.write_text(json.dumps(toggled.steps))
            return
        handle = attach(stage.engine)
        for _ in range(options.steps):
            stage.train_batch()
        handle.detach()


if __name__ == "__main__":
    main()
