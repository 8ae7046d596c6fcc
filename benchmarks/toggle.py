"""Attaches and detaches the hooks in pairs of windows of one run, in random order, and records every step's time.

`python -m benchmarks.toggle WINDOW TIMES train.py …` does so to an ordinary training script; each rank writes
`TIMES.RANK`.
"""

import atexit
import json
import random
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from ds_hooks import Handle, attach


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


class _ToggledEngine:
    """The engine as a training script sees it, with `train_batch` toggled and timed."""

    def __init__(self, engine: Any, toggled: Toggled) -> None:
        self._engine, self._toggled = engine, toggled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        """One step."""
        self._toggled.before_step()
        loss = self._engine.train_batch(*args, **kwargs)
        self._toggled.after_step()
        return loss


def main() -> None:
    """Run the training script with a `deepspeed.initialize` that returns a toggling engine."""
    # DeepSpeed's launcher puts --local_rank before all else
    window, times, script, *rest = (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))
    import deepspeed

    initialize = deepspeed.initialize

    def initialize_toggled(*args: Any, **kwargs: Any) -> Any:
        result = initialize(*args, **kwargs)
        engine = result[0]
        toggled = Toggled(engine, int(window))
        atexit.register(
            lambda: Path(f"{times}.{engine.global_rank}").write_text(json.dumps(toggled.steps), encoding="utf-8")
        )
        return (_ToggledEngine(engine, toggled), *result[1:])

    deepspeed.initialize = initialize_toggled
    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
