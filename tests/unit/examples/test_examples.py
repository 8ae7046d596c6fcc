"""The example studies learn: fused trials with sound hyperparameters do, and one that hardly moves does not."""

from itertools import islice
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.torchvision_import import make_importable
from trials import Study, TrialGroup, build_member, group_key, load_study
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit
from trials.training.scores.objectives import first_of

CASES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "digits": ({"weight_decay": 0.01, "dropout": 0.1}, (1e-7, 3e-3, 1e-2)),
    "images": ({"momentum": 0.9, "smoothing": 0.1, "channels": 8, "batch_size": 32}, (1e-7, 0.03, 0.06)),
    "characters": ({"weight_decay": 0.01, "warmup": 10, "dropout": 0.1}, (1e-7, 1e-2, 2e-2)),
    "hugging_face": ({"decay": 0.01, "weight": 1.2}, (1e-7, 3e-3, 1e-2)),
}
"""Example -> (what its trials have in common, their rates)."""
STEPS = 20


def made(name: str) -> tuple[Study, TrialGroup, Audit]:
    """Three fused trials of an example, of which one hardly moves."""
    pytest.importorskip("transformers" if name == "hugging_face" else "sklearn")
    make_importable()
    study = load_study(ROOT / "examples" / f"{name}.py")
    others, rates = CASES[name]
    members = [build_member(study, n, {"lr": rate, **others}) for n, rate in enumerate(rates)]
    assert len({group_key(member) for member in members}) == 1
    audit = Audit(study)
    return study, TrialGroup(study, members, OpenGate(), audit), audit


@pytest.mark.parametrize(
    ("name", "epochs", "bad", "good"),
    [
        ("digits", 3, 0.5, 0.85),
        pytest.param("images", 8, 0.3, 0.65, marks=pytest.mark.slow),
        pytest.param("characters", 2, 3.5, 2.8, marks=pytest.mark.slow),
        ("hugging_face", None, 0.6, 0.75),
    ],
)
def test_trials_learn(name: str, epochs: int | None, bad: float, good: float) -> None:
    """In so many epochs, or all."""
    study, group, audit = made(name)
    for epoch in range(epochs or study.epochs):
        for batch in group.batches(epoch):
            group.train_step(*batch)
        group.end_epoch()
    scores = list(map(first_of, group.evaluate()))
    sign = 1 if study.direction == "maximize" else -1
    assert sign * scores[0] < sign * bad
    assert min(sign * score for score in scores[1:]) > sign * good
    assert audit.done and not audit.mismatches


@pytest.mark.parametrize("name", ["images", "characters"])
def test_trials_train_as_alone(name: str) -> None:
    """For some steps, and are scored; that those with sound rates learn more is a slow test."""
    _, group, audit = made(name)
    for batch in islice(group.batches(0), STEPS):
        group.train_step(*batch)
    assert audit.done and not audit.mismatches
    hardly_moved, *others = map(first_of, group.evaluate())
    assert hardly_moved not in others
