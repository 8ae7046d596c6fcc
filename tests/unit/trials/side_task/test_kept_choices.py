"""How many trials to fuse is measured once, and again when anything differs that decides it."""

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.paths import STUDIES
from tests.support.slow_cases import others_slow
from trials.side_task import kept_choices
from trials.side_task.kept_choices import HOLDS_S, MOST_KEPT, NAME, KeptChoices
from trials.study import Study, load_study
from trials.training import most_fused
from trials.training.most_fused import MostFused
from trials.training.rehearsal import rehearse

AGAIN = "as measured before"


def new_study(file: Path = STUDIES / "tiny.py") -> Study:
    study = load_study(file)
    study.fused, study.trials = "auto", 4
    return study


@pytest.fixture(autouse=True)
def soon_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found does not matter here."""
    monkeypatch.setattr(most_fused, "ENOUGH_S", 0.0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what one rehearsal has measured."""
    directory = tmp_path_factory.mktemp("measured")
    assert rehearse(new_study(), KeptChoices(directory)).gain is not None
    return directory


@pytest.fixture
def rehearsed(measured: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., bool]:
    """Rehearses a study where the usual one was measured before; returns whether it was measured again."""
    caplog.set_level(logging.INFO)
    shutil.copytree(measured, tmp_path / "studies" / "tiny")

    def run(study: Study | None = None) -> bool:
        caplog.clear()
        found = rehearse(study or new_study(), KeptChoices(tmp_path / "studies" / "tiny"))
        assert found.gain is not None and f"trials that train at once: {found.trials}" in caplog.text
        return AGAIN not in caplog.text

    return run


def test_the_next_side_task_trains_as_many_without_measuring(
    rehearsed: Callable[..., bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = (tmp_path / "studies" / "tiny" / NAME).read_text()
    monkeypatch.setattr("trials.training.rehearsal.most_fused", None)  # whoever measures would fail
    assert not rehearsed()
    assert (tmp_path / "studies" / "tiny" / NAME).read_text() == kept
    assert (tmp_path / "studies" / "tiny" / NAME).stat().st_mode & 0o77 == 0


def wider(study: Study) -> None:
    vars(study)["model"] = lambda params: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))


def larger_batches(study: Study) -> None:
    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(3):
            yield torch.rand(8, 4), torch.rand(8, 1)

    vars(study)["batches"] = batches


def another_optimizer(study: Study) -> None:
    vars(study)["optimizer"] = lambda params, model: torch.optim.Adam(model.parameters())


def fewer_trials(study: Study) -> None:
    study.trials = 2


@pytest.mark.parametrize("changed", [wider, larger_batches, another_optimizer, fewer_trials])
def test_another_study_is_measured(rehearsed: Callable[..., bool], changed: Callable[[Study], None]) -> None:
    study = new_study()
    changed(study)
    assert rehearsed(study)
    assert not rehearsed(), "the first is still known"


def test_so_is_one_whose_code_has_changed(rehearsed: Callable[..., bool], tmp_path: Path) -> None:
    file = tmp_path / "tiny.py"
    file.write_text((STUDIES / "tiny.py").read_text() + "\n# nobody knows what this changes\n")
    assert rehearsed(new_study(file))


@pytest.mark.parametrize(
    ("name", "value"),
    [("version", lambda: "another"), ("_processor", lambda: ["model name : another"])],
)
def test_so_it_is_with_another_version_or_processor(
    rehearsed: Callable[..., bool], name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_choices, name, value)
    assert rehearsed()


def test_so_it_is_with_more_threads(rehearsed: Callable[..., bool]) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert rehearsed()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("later_s", [HOLDS_S + 1, -60.0])
def test_none_holds_for_ever(rehearsed: Callable[..., bool], later_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    monkeypatch.setattr("trials.side_task.kept_choices.time.time", lambda: now_s + later_s)
    assert rehearsed()


@pytest.mark.parametrize("content", others_slow(["", "[]", "{", '{"x": 1}', "\xff"], ["{", '{"x": 1}']))
def test_a_damaged_file_is_as_good_as_none(rehearsed: Callable[..., bool], content: str, tmp_path: Path) -> None:
    (tmp_path / "studies" / "tiny" / NAME).write_bytes(content.encode("latin-1"))
    assert rehearsed()
    assert not rehearsed()


def test_what_a_directory_keeps_is_limited_and_a_full_disk_is_no_matter(tmp_path: Path) -> None:
    kept = KeptChoices(tmp_path / "study")
    for number in range(MOST_KEPT + 1):
        kept.keep(str(number), MostFused(2, 1.5))
    assert kept.find("0") is None and kept.find("1") == MostFused(2, 1.5)
    kept.keep("2", MostFused(1))
    assert kept.find("2") == MostFused(2, 1.5), "memory was short, which may pass"
    assert [each.name for each in (tmp_path / "study").iterdir()] == [NAME]
    KeptChoices(tmp_path / "study" / NAME).keep("0", MostFused(2, 1.5))  # no directory
