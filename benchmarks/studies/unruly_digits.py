"""A side task that becomes more harmful than forecast, for the scenarios `guarded_loader` and `guarded_costs`.

It does so while the main job's step is in the range that `BENCHMARK_UNRULY` gives, "loader:120:240" or "costs:120:240".

    loader  a process beside it loads its batches and takes a third of the core, in bubbles and out of them, where no
            gate sees it. When the side task is shut out it asks for no more batches, and the loader rests
    costs   its batches are eight times as large, so its units take longer than forecast
"""

import os
import subprocess
import sys
from collections.abc import Iterator

from torch import Tensor

from benchmarks.studies.endless_digits import EndlessDigits
from ds_hooks.shared.page.file import Page, page_path, runtime_dir
from ds_hooks.shared.page.layout import Field

ENVIRONMENT = "BENCHMARK_UNRULY"
TIMES_AS_LARGE = 8


class UnrulyDigits(EndlessDigits):
    """The digits study, with a loader or with larger batches for a while."""

    def __init__(self) -> None:
        """Read the data."""
        super().__init__()
        self._how, *steps = os.environ[ENVIRONMENT].split(":")
        self._first, self._until = map(int, steps)
        self._page: Page | None = None
        self._loader: subprocess.Popen[bytes] | None = None
        self._is_loading = False

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """As the digits study's."""
        for inputs, targets in super().batches(epoch):
            unruly = self._is_unruly()
            if self._how == "loader":
                self._load_ahead(unruly)
            elif unruly:
                inputs, targets = inputs.repeat(TIMES_AS_LARGE, 1), targets.repeat(TIMES_AS_LARGE)
            yield inputs, targets

    def _is_unruly(self) -> bool:
        if self._page is None:
            self._page = Page.open(page_path(runtime_dir(), 0), create=False)
        return self._first <= self._page.words[Field.STEP] < self._until

    def _load_ahead(self, unruly: bool) -> None:
        if (
            self._loader is None
        ):  # with the first batch, in the rehearsal, so that it does not inherit the side task's niceness
            command = [sys.executable, "-m", "benchmarks.studies.unruly_loader"]
            self._loader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            assert self._loader.stdout is not None
            os.set_blocking(self._loader.stdout.fileno(), False)
        assert self._loader.stdin is not None and self._loader.stdout is not None
        if self._loader.stdout.read(1):
            self._is_loading = False
        if unruly and not self._is_loading:
            self._loader.stdin.write(b".")
            self._is_loading = True
