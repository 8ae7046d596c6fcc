"""A rank of `benchmarks.gpu_pipeline`: trains a script, takes our hooks off in some blocks of steps, times every step.

`ds_squeeze --module benchmarks.gpu.blocks FOLDER SCRIPT …` starts it, and attaches the hooks as ever.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.gpu.block_files import step_word, steps_path
from benchmarks.shared.toggle import run_watched
from benchmarks.windows.modes import UNHOOKED, Windows
from ds_hooks import handle


class Blocks:
    """Takes the hooks off and puts them on again as the windows say. A step lasts until the next one begins.

    Args:
        engine: with its hooks.
        hooks: their handle.
        folder: for the step's word and times.
    """

    def __init__(self, engine: Any, hooks: handle.Handle, folder: Path) -> None:
        self._handle, self._windows = hooks, Windows.of_environment()
        self._word = step_word(folder, engine.global_rank)
        self._times = steps_path(folder, engine.global_rank).open("w", encoding="ascii", buffering=1)
        self._step = 0
        self._begin_ns = 0

    def before_step(self) -> None:
        """See `StepWatch`.

        Raises:
            RuntimeError: the hooks have switched themselves off, so there is nothing to measure.
        """
        if self._handle.fault is not None:
            raise RuntimeError(f"the hooks are off: {self._handle.fault}")
        now_ns = time.monotonic_ns()
        if self._step:
            self._times.write(json.dumps([self._step, round((now_ns - self._begin_ns) / 1e6, 4)]) + "\n")
        self._step, self._begin_ns = self._step + 1, now_ns
        self._set_hooks(self._windows.locate(self._step).mode != UNHOOKED)
        self._word[0] = self._step

    def after_step(self) -> None:
        """See `StepWatch`: what the script does until the next step belongs to this one."""

    def _set_hooks(self, wanted: bool) -> None:
        instrument, hooks = self._handle._instrument, self._handle._hooks
        assert instrument is not None and hooks is not None
        if wanted and not instrument.active:
            hooks._step = self._step - 1  # the daemon's windows go by this number
            instrument.wrap()
        elif not wanted and instrument.active:
            instrument.unwrap()


def main() -> None:
    """Run the training script."""
    # DeepSpeed's launcher puts --local_rank before all else
    folder, script, *rest = (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))
    attached: list[handle.Handle] = []
    attach = handle.attach

    def keep(*args: Any, **kwargs: Any) -> handle.Handle:
        attached.append(attach(*args, **kwargs))
        return attached[-1]

    with mock.patch.object(handle, "attach", keep):
        run_watched(script, rest, lambda engine: Blocks(engine, attached[-1], Path(folder)))


if __name__ == "__main__":
    main()
