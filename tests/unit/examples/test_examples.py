"""The example studies learn: fused trials with sound hyperparameters do, and one that hardly moves does not."""

from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.torchvision_import import make_importable
from trials import TrialGroup, build_member, group_key, load_study
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit
from trials.training.scores.objectives import first_of

DIGITS: dict[str, Any] = {"weight_decay": 0.01, "dropout": 0.1}
IMAGES: dict[str, Any] = {"momentum": 0.9, "smoothing": 0.1, "channels": 8, "batch_size": 32}
CHARACTERS: dict[str, Any] = {"weight_decay": 0.01, "warmup": 10, "dropout": 0.1}
TEXTS: dict[str, Any] = {"decay": 0.01, "weight": 1.2}


@pytest.mark.parametrize(
    ("name", "others", "rates", "epochs", "bad", "good"),
    [
        ("digits", DIGITS, (1e-7, 3e-3, 1e-2), 3, 0.5, 0.85),
        ("images", IMAGES, (1e-7, 0.03, 0.06), 8, 0.3, 0.65),
        ("characters", CHARACTERS, (1e-7, 1e-2, 2e-2), 2, 3.5, 2.8),
        ("hugging_face", TEXTS, (1e-7, 3e-3, 1e-2), None, 0.6, 0.75),
    ],
)
def test_trials_learn(
    name: str, others: dict[str, Any], rates: tuple[float, ...], epochs: int | None, bad: float, good: float
) -> None:
    """In so many epochs, or all."""
    pytest.importorskip("transformers" if name == "hugging_face" else "sklearn")
    make_importable()
    study = load_study(ROOT / "examples" / f"{name}.py")
    members = [build_member(study, n, {"lr": rate, **others}) for n, rate in enumerate(rates)]
    assert len({group_key(member) for member in members}) == 1
    audit = Audit(study)
    group = TrialGroup(study, members, OpenGate(), audit)
    for epoch in range(epochs or study.epochs):
        for batch in group.batches(epoch):
            group.train_step(*batch)
        group.end_epoch()
    scores = list(map(first_of, group.evaluate()))
    sign = 1 if study.direction == "maximize" else -1
    assert sign * scores[0] < sign * bad
    assert min(sign * score for score in scores[1:]) > sign * good
    assert audit.done and not audit.mismatches
