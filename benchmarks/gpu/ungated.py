"""A side task without a gate, which trains in its own blocks of steps: what ours is compared with.

    naive          as any other process on the device
    low_priority   at the lowest priority that the device knows: of MPS clients on a GPU, the idle class on cores

`gpu_pipeline` starts `python -m benchmarks.gpu.ungated MODE --folder FOLDER --rank N --study FILE --device KIND`. It is
never stopped, as what a GPU has been given would run on; between its blocks it queues nothing.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import torch

from benchmarks.gpu.block_files import RANKS, ready_path, step_word, trained_path
from benchmarks.windows.modes import LOW_PRIORITY, NAIVE, Windows
from ds_hooks.shared.processes.parent import die_with_parent
from launch.rank import core_share
from trials.gate.base import OpenGate
from trials.gate.process import run_when_idle
from trials.side_task.devices import make_side_device
from trials.study import Study, load_study
from trials.training.group import TrialGroup
from trials.training.member import build_member

MEMORY_FRACTION = 0.2
LOOK_EVERY_S = 1e-3
REHEARSED_STEPS = 20


def main() -> None:
    """Train until it is killed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ungated")
    parser.add_argument("mode", choices=(NAIVE, LOW_PRIORITY))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--study", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    options = parser.parse_args()
    die_with_parent()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    finish: Callable[[], object] = torch.cuda.synchronize
    if options.device == "cpu":
        finish = int
        os.sched_setaffinity(0, core_share(sorted(os.sched_getaffinity(0)), options.rank, RANKS))
        if options.mode == LOW_PRIORITY:
            run_when_idle()
    device = make_side_device(options.device, MEMORY_FRACTION)
    study = load_study(options.study)
    device.adopt(study)
    steps = _steps(study, finish)
    for _ in itertools.islice(steps, REHEARSED_STEPS):  # kernels are loaded and chosen now
        pass
    word, windows = step_word(options.folder, options.rank), Windows.of_environment()
    with trained_path(options.folder, options.mode, options.rank).open("w", encoding="ascii", buffering=1) as file:
        ready_path(options.folder, options.mode, options.rank).touch()
        while True:
            round_ = _await_block(word, windows, options.mode)
            trained = 0
            while (at := windows.locate(word[0])).cycle == round_ and at.mode == options.mode:
                next(steps)
                trained += 1
            file.write(json.dumps([round_, trained]) + "\n")


def _await_block(word: "memoryview[int]", windows: Windows, mode: str) -> int:
    """Return the round in which the next block of `mode` begins."""
    while not word[0] or windows.locate(word[0]).mode != mode:
        time.sleep(LOOK_EVERY_S)
    return windows.locate(word[0]).cycle


def _steps(study: Study, finish: Callable[[], object]) -> Iterator[None]:
    """Train for ever, a step at a time. Between steps the device has nothing to do."""
    draws = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    members = [build_member(study, row, study.suggest(draws.ask())) for row in range(study.rows)]
    group = TrialGroup(study, members, OpenGate())
    for epoch in itertools.count():
        for inputs, targets, per_trial in group.batches(epoch % study.epochs):
            group.train_step(inputs, targets, per_trial)
            finish()
            yield
        group.end_epoch()


if __name__ == "__main__":
    main()
