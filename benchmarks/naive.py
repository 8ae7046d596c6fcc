"""The baseline that everyone tries first: the side task as an ordinary process on the main job's cores, never gated.

It is started before the run, and runs only in the windows that it is given; between them it is stopped, so all
baselines share one run.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from benchmarks.common import ROOT
from ds_hooks.page import Field, Page, PageError

LOOK_EVERY_S = 0.02


class NaiveWindows(threading.Thread):
    """Lets one ungated side task per rank run in some steps of the main job.

    Args:
        pages: below which directory the run's pages will be.
        ranks: how many.
        windows: says of a step, counted from 1, whether the naive task runs in it.
        env: the environment for it.
        study: what it trains.
    """

    def __init__(self, pages: Path, ranks: int, windows: "Windows", env: Mapping[str, str], study: Path) -> None:
        super().__init__(daemon=True)
        self._pages, self._ranks, self._windows = pages, ranks, windows
        command = [sys.executable, "-m", "trials.runner", "--study", str(study), "--measure", "1e9", "--trials", "16"]
        self._tasks = [
            subprocess.Popen(command, env=dict(env), cwd=ROOT, stdout=subprocess.DEVNULL) for _ in range(ranks)
        ]
        self._done = threading.Event()

    def run(self) -> None:
        pages = [self._find_page(rank) for rank in range(self._ranks)]
        bound = False
        running = True  # they import while the job does
        while not self._done.wait(LOOK_EVERY_S):
            if not bound:
                pages = [page or self._find_page(rank) for rank, page in enumerate(pages)]
                bound = self._bind(pages)
                continue
            assert pages[0] is not None
            step = pages[0].words[Field.STEP]
            wanted = self._windows.is_naive(step) if step else running
            if not pages[0].words[Field.MAIN_PID]:
                wanted = False  # the job is over, and its daemon measures the dedicated rate
            if wanted != running:
                self._send(signal.SIGCONT if wanted else signal.SIGSTOP)
                running = wanted
        for page in pages:
            if page is not None:
                page.close()

    def close(self) -> None:
        """End the naive tasks."""
        self._done.set()
        self.join()
        self._send(signal.SIGKILL)
        for task in self._tasks:
            task.wait()

    def _find_page(self, rank: int) -> Page | None:
        for path in self._pages.rglob(f"device{rank}.page"):
            try:
                return Page.open(path, create=False)
            except PageError:
                return None
        return None

    def _bind(self, pages: "list[Page | None]") -> bool:
        """Put each task on the cores of its rank, threads and all."""
        for task, page in zip(self._tasks, pages, strict=True):
            main_pid = page.words[Field.MAIN_PID] if page is not None else 0
            if not main_pid:
                return False
            cores = os.sched_getaffinity(main_pid)
            for thread in Path(f"/proc/{task.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores)
        return True

    def _send(self, number: signal.Signals) -> None:
        for task in self._tasks:
            task.send_signal(number)


class Windows:
    """The cycle of windows of one run: squeezed, alone, naive, and again, after the steps that only observe."""

    def __init__(self, observe: int, squeezed: int, alone: int, naive: int) -> None:
        self.observe, self.squeezed, self.alone, self.naive = observe, squeezed, alone, naive

    @property
    def cycle(self) -> int:
        """Steps of all windows together."""
        return self.squeezed + self.alone + self.naive

    def place(self, step: int) -> tuple[int, str, int]:
        """(cycle, window, place in the window) of a step counted from 1; cycle -1 while observing."""
        since = step - 1 - self.observe
        if since < 0:
            return -1, "observe", since + self.observe
        cycle, at = divmod(since, self.cycle)
        for name, length in (("squeezed", self.squeezed), ("alone", self.alone)):
            if at < length:
                return cycle, name, at
            at -= length
        return cycle, "naive", at

    def is_naive(self, step: int) -> bool:
        """Whether the naive task runs in `step`."""
        return self.place(step)[1] == "naive"
