"""Keeps the main job's cores awake in windows of the mode `awake`, and does nothing else there.

A core that sleeps through a bubble computes more slowly for a while when it wakes. So a side task is compared with a
process of the idle class that spins on each core, and touches no memory but the few bytes of its loop.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.shared.processes import child
from benchmarks.windows.baselines import LOOK_EVERY_S, find_page
from benchmarks.windows.modes import AWAKE, Windows
from ds_hooks.shared.page.file import Page
from ds_hooks.shared.page.layout import Field
from trials.gate.process import run_when_idle


@contextmanager
def spinners(pages: Path, ranks: int, windows: Windows) -> Iterator[None]:
    """Let one process per rank spin on its main job's cores in their windows.

    Args:
        pages: a directory above the run's pages.
        ranks: the number of ranks.
        windows: the windows of the run.
    """
    with ExitStack() as ends:
        pids = [ends.enter_context(child(_spin, core=0)) for _ in range(ranks)]
        for pid in pids:
            os.waitid(os.P_PID, pid, os.WSTOPPED)  # else it would undo its binding when it goes on
        over = threading.Event()
        follower = threading.Thread(target=_follow, args=(pages, pids, windows, over), daemon=True)
        follower.start()
        try:
            yield
        finally:
            over.set()
            follower.join()


def _spin() -> None:
    run_when_idle()
    os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        pass


def _follow(pages: Path, pids: list[int], windows: Windows, over: threading.Event) -> None:
    """Look at the main job's steps, and stop and continue the spinners."""
    found: list[Page | None] = [None] * len(pids)
    is_bound = runs = False
    while not over.wait(LOOK_EVERY_S):
        if not is_bound:
            found = [page or find_page(pages, rank) for rank, page in enumerate(found)]
            is_bound = _bind(found, pids)
            continue
        assert found[0] is not None
        words = found[0].words
        wanted = bool(words[Field.MAIN_PID]) and windows.locate(words[Field.STEP]).mode == AWAKE
        if wanted != runs:
            for pid in pids:
                os.kill(pid, signal.SIGCONT if wanted else signal.SIGSTOP)
            runs = wanted
    for page in found:
        if page is not None:
            page.close()


def _bind(pages: list[Page | None], pids: list[int]) -> bool:
    """Put each spinner on the cores of its rank, once the main job is there. Returns whether it is."""
    mains = [page.words[Field.MAIN_PID] if page is not None else 0 for page in pages]
    if not all(mains):
        return False
    for pid, main_pid in zip(pids, mains, strict=True):
        os.sched_setaffinity(pid, os.sched_getaffinity(main_pid))
    return True
