"""The benchmarks' baselines as processes: each runs in its own windows, and by its own rule."""

import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.shared.processes import environment
from benchmarks.studies import ENDLESS_DIGITS
from benchmarks.windows.baselines import Baselines
from benchmarks.windows.daemon import FORECASTS
from benchmarks.windows.modes import DEDICATED, NAIVE, SCHED_IDLE, STEP_GRAIN, Windows
from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import Field
from tests.support.sandbox import stat

BASELINES = (NAIVE, SCHED_IDLE, STEP_GRAIN)
pytestmark = [pytest.mark.integration, pytest.mark.slow]

WINDOWS = Windows(
    observe=1, warm_up=0, cycle=((DEDICATED, 1), ("alone", 1), (SCHED_IDLE, 1), (STEP_GRAIN, 1), ("preemptive", 1))
)


def test_each_baseline_runs_in_its_windows_alone(tmp_path: Path) -> None:
    page = Page.open(page_path(tmp_path / "pages", 0))
    words = page.words
    study = ENDLESS_DIGITS
    env = environment(tmp_path / "pages")
    baselines = Baselines(pages=tmp_path / "pages", ranks=1, windows=WINDOWS, env=env, study=study, logs=tmp_path)
    main_job = subprocess.Popen(["sleep", "600"])
    baselines.start()
    try:
        deadline_s = time.monotonic() + 60
        while not all(file.exists() for file in baselines.ready_files):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        words[Field.STEP] = 1
        words[Field.MAIN_PID] = main_job.pid

        def grown(step: int, seconds: float) -> dict[str, int]:
            """How many steps each baseline has trained in this step of the main job."""
            before = {name: len(baselines.steps(0, name)) for name in BASELINES}
            words[Field.STEP] = step
            time.sleep(seconds)
            return {name: len(baselines.steps(0, name)) - before[name] for name in BASELINES}

        grown(1, 0.5)
        steps = grown(2, 1.5)
        assert [name for name in BASELINES if steps[name] > 1] == [NAIVE], steps
        assert not any(grown(2, 0.5).values()), "it was for the dedicated rate, once a cycle"
        grown(4, 0.5)
        steps = grown(4, 1.5)
        assert [name for name in BASELINES if steps[name] > 1] == [SCHED_IDLE], steps
        grown(3, 1.5)
        grown(5, 1.5)
        assert not any(grown(3, 0.5).values()), "a window without a baseline"

        slot = Field.PERMITS + FORECASTS
        assert not any(grown(5, 0.5).values()), "whole steps wait for a bubble"
        words[slot] = 1_000
        words[Field.BUBBLE_START_NS] = time.monotonic_ns()
        words[Field.BUBBLE] = 1
        assert not any(grown(5, 0.5).values()), "and for one that is long enough"
        words[slot] = 10**9
        assert grown(5, 1.5)[STEP_GRAIN] > 1
        words[Field.BUBBLE] = 2
        grown(5, 0.2)
        assert not any(grown(5, 0.5).values()), "the bubble is over"

        words[Field.MAIN_PID] = 0
        (rates,) = baselines.finish()
        assert set(rates) == {0} and rates[0] > 0
        assert stat(main_job.pid)[0] == "S", "it was stopped for a moment only"
    finally:
        baselines.close()
        page.close()
        main_job.kill()
        main_job.wait()
