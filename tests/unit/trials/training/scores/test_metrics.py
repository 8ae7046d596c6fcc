"""Metrics over the whole validation set are those of each trial alone, whether they are its score or not."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import OPTIMIZERS, RecordingGate, Solo, called, close, members
from tests.support.logged import logged
from tests.support.rich_study import RichSolo, RichStudy
from tests.support.side_task_runs import Seven, Starving, data, make_study, run
from trials import FuseError, TrialGroup
from trials.gate.base import OpenGate
from trials.study import load_study
from trials.study_error import StudyError
from trials.training.audits.audit import Audit


@pytest.fixture(autouse=True)
def set_up() -> Iterator[None]:
    with logged():
        yield


class Scored(RichStudy):
    """Has metrics that are no mean over batches."""

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"], targets["class"])

    def score(self, outputs: Any, targets: Any) -> Tensor:
        return self.loss(outputs, targets)

    def metrics(self, outputs: Any, targets: Any) -> Mapping[str, Any]:
        assert outputs["logits"].device.type == "cpu" and not outputs["logits"].requires_grad
        guess, truth = outputs["logits"].argmax(-1), targets["class"]
        right = ((guess == 1) & (truth == 1)).sum()
        both = (guess == 1).sum() + (truth == 1).sum()
        targets["class"].zero_()  # its own, so that no other trial sees this
        spread = outputs["logits"].std() + outputs["mean"].max() + outputs["inner"][0].sum()
        return {"f1": 2 * right / both.clamp(min=1), "spread": spread, "count": len(truth), "kind": outputs["kind"]}


class Model(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.layers(x)
        return {"logits": y, "mean": y.mean(), "inner": (y[:, :1], None), "kind": 3}


def study_of(kind: type[Scored] = Scored) -> Scored:
    draws = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(size, 4, generator=draws).double(), {"class": torch.randint(3, (size,), generator=draws)})
        for size in (6, 6, 4)
    ]
    return kind(lambda n: Model(n).double(), OPTIMIZERS["adamw"], data)


@torch.no_grad()
def metrics_alone(solo: Solo) -> dict[str, float]:
    """As anyone would compute them of one model."""
    solo.model.eval()
    batches = list(solo.study.validation())
    outputs = [called(solo.model, inputs) for inputs, _ in batches]
    whole = {
        "logits": torch.cat([each["logits"] for each in outputs]),
        "mean": torch.stack([each["mean"] for each in outputs]),
        "inner": (torch.cat([each["inner"][0] for each in outputs]), None),
        "kind": 3,
    }
    found = solo.study.metrics(whole, {"class": torch.cat([targets["class"] for _, targets in batches])})
    return {name: float(value) for name, value in found.items()}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("metric", [None, "f1", "spread"])
def test_they_are_those_of_each_trial_alone(size: int, metric: str | None) -> None:
    study = study_of()
    study.metric = metric
    audit = Audit(study)
    group = TrialGroup(study, members(study, range(size)), OpenGate(), audit)
    solos = [Solo(study, number) for number in range(size)]
    for _ in range(4):
        for batch in study.data:
            group.train_step(*batch)
            for solo in solos:
                solo.step(*batch)
    scores, alone = group.evaluate(), [metrics_alone(solo) for solo in solos]
    for found, expected in zip(group.metrics, alone, strict=True):
        assert found.keys() == expected.keys()
        close(torch.tensor(list(found.values())), torch.tensor(list(expected.values())), "metrics")
    assert len({each["spread"] for each in alone}) == size
    close(scores, [each[metric] for each in alone] if metric else [solo.score() for solo in solos], "score")
    assert group.evaluate() == scores
    assert audit.done >= 2 and not audit.mismatches


def test_each_trials_metrics_are_a_unit() -> None:
    study, gate = study_of(), RecordingGate()
    group = TrialGroup(study, members(study, range(2)), gate)
    group.evaluate()
    assert gate.entered[-3:] == ["metrics", "metrics", "rest"]


class Picky(Scored):
    def metrics(self, outputs: Any, targets: Any) -> Mapping[str, Any]:
        if outputs["logits"].isnan().any():
            raise ValueError("Input contains NaN")
        return super().metrics(outputs, targets)


def test_a_trial_whose_metrics_fail_has_none_and_the_others_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    study = study_of(Picky)
    study.metric = "spread"
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    with torch.no_grad():
        group._fused.rows.parameters["layers.4.bias"][1] = torch.nan
    scores = group.evaluate()
    assert [score == score for score in scores] == [True, False, True] and group.metrics[1] == {}
    close([scores[0], scores[2]], [metrics_alone(Solo(study, n))["spread"] for n in (0, 2)], "score")
    assert capsys.readouterr().err.count("Study.metrics failed for trial 1: ValueError: Input contains NaN") == 1
    group.keep([1])
    with pytest.raises(ValueError, match="Input contains NaN"):
        group.evaluate()


class Uneven(Model):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {**super().forward(x), "inner": (x.new_zeros(1, len(x)), None)}


class Counting(Model):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {**super().forward(x), "kind": len(x)}


BAD: dict[str, tuple[Callable[[Scored], None], str]] = {
    "another metric": (
        lambda s: setattr(s, "metric", "f2"),
        r"is 'f2', and Study\.metrics gave \['count",
    ),
    "no dict": (lambda s: setattr(s, "metrics", lambda o, t: 0.5), r"Study\.metrics returned a float; allowed: a dict"),
    "no number": (
        lambda s: setattr(s, "metrics", lambda o, t: {"a": "b"}),
        "that is not a number: could not",
    ),
    "a matrix": (
        lambda s: setattr(s, "metrics", lambda o, t: {"a": torch.ones(2)}),
        "returned something that is not a number",
    ),
    "shapes": (lambda s: setattr(s, "make", lambda n: Uneven(n).double()), "differ in type, or in shape beyond the"),
    "plain values": (lambda s: setattr(s, "make", lambda n: Counting(n).double()), "differ in plain values"),
    "targets": (lambda s: s.data.append((s.data[0][0], None)), "the targets of the validation batches differ in their"),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_refused(name: str) -> None:
    study = study_of()
    change, message = BAD[name]
    change(study)
    if name == "targets":
        study.score = lambda outputs, targets: outputs["logits"].mean()  # type: ignore[method-assign]
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    with pytest.raises(FuseError, match=message):
        group.evaluate()


class SevenScored(Seven):
    metric = "spread"

    def metrics(self, outputs: Any, targets: Any) -> Mapping[str, Any]:
        return {"spread": outputs.std(), "other": 0}


class SoloScored(RichSolo):
    @torch.no_grad()
    def score(self) -> float:
        self.model.eval()
        return torch.cat([self.model(x) for x, _ in self.study.validation()]).std().item()


def test_rungs_and_schedulers_get_the_metric() -> None:
    plain = make_study(False)
    study = SevenScored(plain.make, plain.make_optimizer, data(0, 3), schedule=plain.schedule)
    study.length = plain.length
    trials, _ = run(False, Starving(()), study)
    assert any(trial.intermediate_values for trial in trials)
    for trial in trials:
        solo = SoloScored(study, trial.number)
        for epoch in range(1, max(trial.intermediate_values, default=0) + 1):
            solo.epoch()
            close(trial.intermediate_values[epoch], solo.score(), f"trial {trial.number} epoch {epoch}")


FILE = """
from trials import Study
class Own(Study):
    trials = epochs = 1
    {}
    def suggest(self, trial): return {{}}
    def model(self, params): ...
    def optimizer(self, params, model): ...
    def loss(self, outputs, targets): ...
    def batches(self, epoch): ...
    def validation(self): ...
"""


def test_a_study_with_a_metric_needs_no_score(tmp_path: Path) -> None:
    def load(body: str) -> Any:
        path = tmp_path / "own.py"
        path.write_text(FILE.format(body))
        return load_study(path)

    with_metrics = "metrics = lambda self, outputs, targets: {'f1': 0.5}"
    study = load(f"metric = 'f1'; {with_metrics}")
    assert study.metric == "f1" and study.has_metrics
    with pytest.raises(StudyError, match="lacks the methods score"):
        load(with_metrics)
    with pytest.raises(StudyError, match="metric = 'f1'; allowed: None, or the name of a number that its method"):
        load("metric = 'f1'")
    with pytest.raises(StudyError, match="metric = 3; allowed: None, or the name"):
        load(f"metric = 3; {with_metrics}")
