"""The side task of `benchmarks.real_jobs cost`: `many_digits`, whose units compute nothing in windows of placebos.

They ask the gate as ever, and are stopped and continued with it, but only spin, or run through a buffer as large as the
core's own cache. So what the main job pays there is the gate's cost, and that of a cache that others have filled.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.many_digits import ManyDigits
from benchmarks.windows.modes import CACHE_PLACEBO, PLACEBO, Windows
from ds_hooks.shared.page.file import Page
from ds_hooks.shared.page.layout import Field
from trials import TrialGroup

UNIT_S = 150e-6
"""About as long as one of the digits study's."""
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNKNOWN_CACHE_BYTES = 1 << 20


class PlaceboDigits(ManyDigits):
    """The example's study, with pauses in which its units only pretend."""

    def __init__(self) -> None:
        """Read the data, and look for the page of this process's main job, as the side task is told it."""
        super().__init__()
        if "--page" in sys.argv:
            page = Page.open(Path(sys.argv[sys.argv.index("--page") + 1]), create=False)
            pretend_in_placebos(page, Windows.of_environment())


def pretend_in_placebos(page: Page, windows: Windows) -> None:
    """From now on, groups of this process train no step while the main job is in a window of placebos."""
    buffer = np.zeros(_own_cache_bytes(), dtype=np.uint8)
    placebos: dict[str, Callable[[], None]] = {PLACEBO: _spin, CACHE_PLACEBO: partial(_run_through, buffer)}
    train_step = TrialGroup.train_step

    def pretend_first(group: TrialGroup, *batch: Any) -> None:
        units = group._units
        while (placebo := placebos.get(windows.locate(page.words[Field.STEP]).mode)) is not None:
            if PLACEBO not in units.names:
                units.number(PLACEBO)
                group.use_units()
            units.enter(units.number(PLACEBO))
            placebo()
        train_step(group, *batch)

    setattr(TrialGroup, "train_step", pretend_first)  # noqa: B010, what is replaced is a method


def _spin() -> None:
    end_s = time.perf_counter() + UNIT_S
    while time.perf_counter() < end_s:
        pass


def _run_through(buffer: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
    buffer += 1


def _own_cache_bytes(caches: Path = CACHES) -> int:
    """The size of the largest cache that a core does not share, which is the second level's on most machines."""
    try:
        return int((caches / "index2" / "size").read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return UNKNOWN_CACHE_BYTES
