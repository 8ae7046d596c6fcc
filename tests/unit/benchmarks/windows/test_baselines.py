"""When a baseline runs a whole step."""

import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks.ghost.job import StepGrainWakes
from benchmarks.shared.processes import child
from benchmarks.windows import baselines
from benchmarks.windows.baselines import BubbleSteps, log_path, ready_processes
from benchmarks.windows.daemon import FORECASTS
from benchmarks.windows.modes import STEP_GRAIN, Windows
from ds_hooks.shared.page.file import DIRECTORY_VARIABLE, Page, page_path
from ds_hooks.shared.page.layout import Field
from tests.support.sandbox import stat
from trials.gate.base import GATE_SIGNALS


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


def test_a_bubble_wakes_it_in_its_own_windows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(baselines, "POLL_S", 3600.0)
    windows = Windows(observe=1, warm_up=0, cycle=(("alone", 1), ("cooperative", 1), (STEP_GRAIN, 1)))
    page = Page.open(page_path(tmp_path, 0))
    words = page.words
    signal.pthread_sigmask(signal.SIG_BLOCK, GATE_SIGNALS)
    try:
        with child(BubbleSteps(tmp_path, 0).wait, 1e6, core=min(os.sched_getaffinity(0))) as pid:
            while stat(pid)[0] != "S":
                time.sleep(0.01)
            ready = log_path(tmp_path, 0, STEP_GRAIN).with_suffix(".pid")
            ready.write_text(str(pid))
            waits = StepGrainWakes(windows, ready_processes([ready]))
            words[Field.PERMITS + FORECASTS] = 10**9
            words[Field.BUBBLE_START_NS] = time.monotonic_ns()
            words[Field.BUBBLE] = 1
            for step in (2, 3):
                words[Field.STEP] = step
                waits.on_wait()
            time.sleep(0.3)
            assert stat(pid)[0] == "S", "in no window of its own"
            words[Field.STEP] = 4
            waits.on_wait()
            deadline_s = time.monotonic() + 60
            while stat(pid)[0] != "Z":
                assert time.monotonic() < deadline_s
                words[Field.BUBBLE_START_NS] = time.monotonic_ns()  # it lasts, on a busy machine too
                time.sleep(0.01)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, GATE_SIGNALS)
        page.close()
