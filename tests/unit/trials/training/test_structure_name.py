"""The name of a structure is the same wherever it is computed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.fused_and_solo import ToyStudy
from tests.support.paths import ROOT
from trials.training.member import build_member, group_key, structure_name

STUDY = """
import torch
from torch import nn
from trials import Study

class Scaled(nn.Module):
    kinds = frozenset({"one", "two", "three", "four"})
    def __init__(self, width):
        super().__init__()
        self.names, self.layer = {"one", "two", "three", "four"}, nn.Linear(3, width)
    def forward(self, x):
        return self.layer(x) * len(self.names) if bool(x.sum() > 0) else self.layer(x)

class Mine(Study):
    trials, epochs = 4, 1
    def suggest(self, trial): return {}
    def model(self, params): return Scaled(4)
    def optimizer(self, params, model): return torch.optim.AdamW(model.parameters())
    def loss(self, outputs, targets): return outputs.mean()
    def score(self, outputs, targets): return outputs.mean()
    def batches(self, epoch): return [(torch.randn(5, 3), torch.zeros(5))]
    def validation(self): return self.batches(0)
"""

NAME = """
import sys
from trials.study import load_study
from trials.training.member import build_member, group_key, structure_name
print(structure_name(group_key(build_member(load_study(sys.argv[1]), int(sys.argv[2]), {}))))
"""


def name_in_another_process(path: Path, number: int, seed: int) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", NAME, str(path), str(number)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_it_is_the_same_in_each_process_wherever_the_studys_file_is(tmp_path: Path) -> None:
    found = set()
    for seed in (1, 3):  # which order sets otherwise
        path = tmp_path / f"host{seed}" / "mine.py"
        path.parent.mkdir()
        path.write_text(STUDY)
        found.add(name_in_another_process(path, number=seed, seed=seed))
    assert len(found) == 1 and len(found.pop()) == 16


def name(width: int, lr: float = 0.1, device: str = "cpu") -> str:
    study = ToyStudy(lambda n: nn.Linear(2, width), lambda n, own: torch.optim.SGD(own, lr))
    key = group_key(build_member(study, 0, {"n": 0}))
    assert isinstance(key, tuple)
    return structure_name(tuple((of, device if of[1] == "device" else value) for of, value in key))


def test_it_differs_with_what_cannot_be_fused_alone() -> None:
    assert name(3) == name(3, lr=0.5) == name(3, device="cuda:0") != name(4)
