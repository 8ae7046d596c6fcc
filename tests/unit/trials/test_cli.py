"""What `trials explain` prints."""

from pathlib import Path

import pytest

from trials.explain import main

STUDY = """
import torch
from torch import nn
from trials import Study

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.rnn = nn.Linear(4, 4), nn.LSTM(4, 3)
        self.norm = nn.CrossMapLRN2d(3)
        self.scale = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    def forward(self, x):
        y, _ = self.rnn(self.a(x))
        y = self.norm(y.unsqueeze(0))[0]
        return self.scale(y.flip(-1)).logcumsumexp(0)

class Mine(Study):
    trials, epochs = 4, 1
    def suggest(self, trial): return {"lr": trial.suggest_float("lr", 0.1, 1)}
    def model(self, params): return Model()
    def optimizer(self, params, model): return torch.optim.SGD(model.parameters(), params["lr"])
    def loss(self, outputs, targets): return outputs.mean()
    def score(self, outputs, targets): return outputs.mean()
    def batches(self, epoch): return [(torch.randn(5, 2, 4), torch.zeros(5))]
    def validation(self): return self.batches(0)
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["trials", *arguments])
    return main()


def test_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(STUDY)
    assert run(monkeypatch, "explain", str(path)) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "a.Linear rule FusedLinear"
    assert lines[1] == "rnn.LSTM rule FusedRecurrent"
    assert lines[2].startswith(
        "norm.CrossMapLRN2d loop over trials: RuntimeError: In order to use an autograd.Function"
    )
    assert lines[3].startswith("node 'flip' vmap of the call")
    assert lines[4].startswith("scale.ParametrizedLinear vmap: module 'scale' (torch.nn")
    units = lines[lines.index("Units, in the order of a training step:") + 1 :]
    forward = [
        "a.Linear forward",
        "rnn.LSTM forward",
        "norm.CrossMapLRN2d forward",
        "scale.ParametrizedLinear forward",
        "loss",
    ]
    assert units[:5] == forward and units[-1] == "score" and "optimizer step" in units


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", "mine.py: cannot be imported: line 1: SyntaxError"),
        ("x = 1", "defines no subclass of trials.Study"),
        (STUDY.replace("return outputs.mean()", "return outputs"), "Study.loss returned [5, 2, 3]; allowed: a scalar"),
        (STUDY.replace("nn.LSTM(4, 3)", "nn.LSTM(5, 3)"), "mine.py: RuntimeError: input.size(-1) must be equal to"),
        (STUDY.replace("return [(", "return [][:0] and [("), "the study gave no batches in epoch 0"),
    ],
)
def test_bad_study(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert run(monkeypatch, "explain", str(path)) == 2
    assert message in capsys.readouterr().err


def test_missing_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "explain", str(tmp_path / "none.py")) == 2
    assert "no such file; expected a Python file that defines a Study" in capsys.readouterr().err
