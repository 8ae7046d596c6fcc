"""Attaches and detaches the hooks in pairs of windows of one run, in random order, and records every step's time.

`python -m benchmarks.shared.toggle WINDOW TIMES train.py …` does so to an ordinary training script, with each rank on
its own core, as `ds_squeeze` binds it; each rank writes `TIMES.RANK`.
"""

import atexit
import json
import os
import random
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ds_hooks import Handle, attach
from launch.rank import core_share


class StepWatch(Protocol):
    """What is called around each step of a training script."""

    def before_step(self) -> None:
        """A step begins."""

    def after_step(self) -> None:
        """It has ended."""


class Toggled:
    """Attaches hooks to `engine` for `window` steps of each pair of windows, either the first or the others."""

    def __init__(self, engine: Any, window: int) -> None:
        self._engine = engine
        self._window = window
        self._handle: Handle | None = None
        self._start_ns = 0
        self.steps: list[tuple[bool, float]] = []
        """(hooks on, ms) of each step."""

    def before_step(self) -> None:
        """Switch if a window begins."""
        pair, is_second = divmod(len(self.steps) // self._window, 2)
        wanted = bool(is_second) == random.Random(pair).choice([True, False])  # all ranks draw alike
        if wanted and self._handle is None:
            self._handle = attach(self._engine)
        elif not wanted and self._handle is not None:
            self._handle.detach()
            self._handle = None
        self._start_ns = time.monotonic_ns()

    def after_step(self) -> None:
        """Record the step's time."""
        self.steps.append((self._handle is not None, (time.monotonic_ns() - self._start_ns) / 1e6))

    def close(self) -> None:
        """Leave the engine as it was."""
        if self._handle is not None:
            self._handle.detach()


class _WatchedEngine:
    """The engine as a training script sees it, with a watch around `train_batch`."""

    def __init__(self, engine: Any, watch: StepWatch) -> None:
        self._engine, self._watch = engine, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        """One step."""
        self._watch.before_step()
        loss = self._engine.train_batch(*args, **kwargs)
        self._watch.after_step()
        return loss


def run_watched(script: str, arguments: Sequence[str], watch: Callable[[Any], StepWatch]) -> None:
    """Run a training script with a `deepspeed.initialize` whose engine has a watch around each step.

    Args:
        script: its path.
        arguments: its own.
        watch: makes the watch of an engine.
    """
    import deepspeed

    initialize = deepspeed.initialize

    def initialize_watched(*args: Any, **kwargs: Any) -> Any:
        result = initialize(*args, **kwargs)
        return (_WatchedEngine(result[0], watch(result[0])), *result[1:])

    deepspeed.initialize = initialize_watched
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Toggle the hooks of a training script."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, core_share(cores, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_SIZE"])))
    # DeepSpeed's launcher puts --local_rank before all else
    window, times, script, *rest = (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))

    def toggled(engine: Any) -> Toggled:
        made = Toggled(engine, int(window))
        path = Path(f"{times}.{engine.global_rank}")
        atexit.register(lambda: path.write_text(json.dumps(made.steps), encoding="utf-8"))
        return made

    run_watched(script, rest, toggled)


if __name__ == "__main__":
    main()
