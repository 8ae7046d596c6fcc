"""The benchmarks' side task that goes astray: in the given steps of the main job, and only there."""

import time
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.studies import unruly_digits
from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import Field

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_batches_are_large_in_the_unruly_steps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEEZER_DIR", str(tmp_path / "pages"))
    monkeypatch.setenv(unruly_digits.ENVIRONMENT, "costs:5:7")
    page = Page.open(page_path(tmp_path / "pages", 0))
    batches = unruly_digits.UnrulyDigits().batches(0)
    rows = []
    for step in range(3, 9):
        page.words[Field.STEP] = step
        inputs, targets = next(batches)
        assert len(inputs) == len(targets)
        rows.append(len(inputs))
    assert rows == [32, 32, 256, 256, 32, 32]
    page.close()


def test_the_loader_computes_in_the_unruly_steps_alone_and_ends_with_the_side_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEEZER_DIR", str(tmp_path / "pages"))
    monkeypatch.setenv(unruly_digits.ENVIRONMENT, "loader:5:7")
    page = Page.open(page_path(tmp_path / "pages", 0))
    study = unruly_digits.UnrulyDigits()

    def cpu_s(batches: int) -> float:
        """What the loader computes while so many batches are read."""
        before = _cpu_s(study)
        for _ in islice(study.batches(0), batches):
            time.sleep(0.05)
        time.sleep(0.5)
        return _cpu_s(study) - before

    page.words[Field.STEP] = 4
    cpu_s(1)  # it starts
    assert cpu_s(10) < 0.01
    page.words[Field.STEP] = 5
    assert cpu_s(10) > 0.03
    page.words[Field.STEP] = 7
    assert cpu_s(10) < 0.01
    loader = study._loader
    assert loader is not None and loader.stdin is not None
    loader.stdin.close()
    assert loader.wait(10) == 0
    page.close()


def _cpu_s(study: unruly_digits.UnrulyDigits) -> float:
    if study._loader is None:
        return 0.0
    return time.clock_gettime(~study._loader.pid << 3 | 2)
