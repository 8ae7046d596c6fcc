"""A side task that pretends in windows of placebos: it goes through the gate, trains nothing, and then goes on."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.studies.placebo_digits import UNKNOWN_CACHE_BYTES, PlaceboDigits, _own_cache_bytes
from benchmarks.windows.modes import AWAKE, CACHE_PLACEBO, PLACEBO, PREEMPTIVE, Windows
from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import Field
from tests.support.fused_and_solo import RecordingGate, ToyStudy, members
from trials import TrialGroup

UNITS = 5
WINDOWS = Windows(observe=0, warm_up=0, cycle=((PREEMPTIVE, 2), (PLACEBO, 2), (AWAKE, 1), (CACHE_PLACEBO, 2)))


class Gate(RecordingGate):
    """Under it the main job's step lasts for `UNITS` units of placebos."""

    def __init__(self, page: Page) -> None:
        super().__init__()
        self._words = page.words

    def enter(self, unit: int) -> None:
        super().enter(unit)
        if self.entered[-UNITS:] == [PLACEBO] * UNITS:
            self._words[Field.STEP] += 1
            self.entered.append("another step")


def test_it_pretends_in_windows_of_placebos_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page.open(page_path(tmp_path / "pages", 0))
    for name, value in WINDOWS.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(TrialGroup, "train_step", TrialGroup.train_step)  # put back afterwards
    study = ToyStudy(lambda n: nn.Linear(3, 1), "sgd", [(torch.ones(2, 3), torch.zeros(2))])
    gates, groups = (Gate(page), Gate(page)), []
    for is_patched, gate in enumerate(gates):
        if is_patched:
            monkeypatch.setattr(sys, "argv", ["main", "--page", str(page.path)])
            PlaceboDigits()
        groups.append(TrialGroup(study, members(study, range(2)), gate))
        page.words[Field.STEP] = 2
        groups[-1].train_step(*study.data[0])
        page.words[Field.STEP] = 3
        groups[-1].train_step(*study.data[0])
    as_ever, pretended = (gate.entered for gate in gates)
    assert PLACEBO not in as_ever
    half = len(as_ever) // 2
    assert pretended == [*as_ever[:half], *([PLACEBO] * UNITS + ["another step"]) * 2, *as_ever[half:]]
    assert page.words[Field.STEP] == 5 and WINDOWS.locate(5).mode == AWAKE
    trained, trained_too = (group.extract(1)[0] for group in groups)
    assert all(torch.equal(trained[key], trained_too[key]) for key in trained)
    page.words[Field.STEP] = 6
    groups[1].train_step(*study.data[0])
    assert page.words[Field.STEP] == 8
    page.close()


def test_the_buffer_is_as_large_as_the_cores_own_cache(tmp_path: Path) -> None:
    (tmp_path / "index2").mkdir()
    (tmp_path / "index2" / "size").write_text("2048K\n")
    assert _own_cache_bytes(tmp_path) == 2 << 20
    assert _own_cache_bytes(tmp_path / "none") == UNKNOWN_CACHE_BYTES
