"""The examples in the documents run as they stand there."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import trials
from tests.support.paths import ROOT
from trials.explain import check
from trials.study import load_study

STUDIES_DOCUMENT = ROOT / "docs" / "studies.md"


def example(document: Path, contains: str) -> str:
    """The one block of Python in `document` with this text in it."""
    blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if contains in block]
    return found


@pytest.mark.parametrize(
    ("document", "contains"),
    [(STUDIES_DOCUMENT, "class Small(Study):"), (ROOT / "README.md", "(Study):")],
    ids=("studies", "readme"),
)
def test_the_study_trains(document: Path, contains: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inputs, targets = torch.randn(256, 64), torch.randint(10, (256,))
    torch.save({"inputs": inputs, "targets": targets, "held_out": (inputs, targets)}, "train.pt")
    file = tmp_path / f"study_of_{document.stem.lower()}.py"
    file.write_text(example(document, contains), encoding="utf-8")
    assert check(load_study(file))[0].startswith("study   ")


def test_the_study_with_two_optimizers_trains(tmp_path: Path) -> None:
    rest = """
    trials, epochs = 4, 2
    def suggest(self, trial):
        return {key: trial.suggest_float(key, 1e-4, 1e-2) for key in ("judge_lr", "maker_lr")}
    def model(self, params):
        return Pair()
    def batches(self, epoch):
        return [(torch.randn(8, 320), torch.zeros(8))]
    def validation(self):
        return self.batches(-1)
    def score(self, outputs, targets):
        return outputs.mean()
"""
    before = """
import torch
from torch import nn
from torch.nn.functional import softplus
from trials import Study
def maker(): return nn.Sequential(nn.Linear(64, 256), nn.Unflatten(1, (1, 16, 16)))
def judge(): return nn.Sequential(nn.Flatten(), nn.Linear(256, 1))
"""
    file = tmp_path / "adversaries.py"
    file.write_text(before + example(STUDIES_DOCUMENT, "class Adversaries(Study)") + rest, encoding="utf-8")
    assert check(load_study(file))[0].startswith("study   Adversaries")


def test_the_loop_without_a_study_gives_a_trained_model_back() -> None:
    models = [nn.Linear(5, 4) for _ in range(2)]
    first = models[1].weight.detach().clone()
    names = {
        "trials": trials,
        "torch": torch,
        "loss": cross_entropy,
        "batches": [(torch.randn(8, 5), torch.randint(4, (8,)))] * 3,
        **{f"model_{number}": model for number, model in enumerate(models)},
        **{f"optimizer_{number}": torch.optim.Adam(model.parameters()) for number, model in enumerate(models)},
    }
    exec(example(ROOT / "docs" / "fusing.md", "trials.fuse_optimizers"), names)
    trained = names["model"]
    assert isinstance(trained, nn.Linear)
    assert not torch.equal(trained.weight, first)
