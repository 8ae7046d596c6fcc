"""When a baseline runs a whole step."""

import time
from pathlib import Path

from benchmarks.windows.baselines import BubbleSteps
from benchmarks.windows.daemon import FORECASTS
from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import Field


def test_a_whole_step_runs_if_it_fits_into_what_is_left_of_the_bubble(tmp_path: Path) -> None:
    page = Page.open(page_path(tmp_path / "pages", 0))
    words = page.words
    baseline = BubbleSteps(tmp_path / "pages", 0)
    words[Field.SLOT] = 5
    words[Field.PERMITS + FORECASTS + 5] = 10**7
    words[Field.BUBBLE_START_NS] = time.monotonic_ns()
    assert not baseline._fits(1.0), "no bubble"
    words[Field.BUBBLE] = 3
    assert baseline._fits(8.0e9) and not baseline._fits(8.4e9), "1.2 times the step"
    words[Field.BUBBLE_START_NS] -= 5 * 10**9
    assert baseline._fits(4.0e9) and not baseline._fits(4.3e9), "what is left"
    words[Field.SLOT] = 6
    assert not baseline._fits(1.0), "no forecast"
    page.close()
