"""The example study learns."""

import pytest

from tests.support.paths import ROOT
from trials import TrialGroup, build_member, load_study
from trials.gate.base import OpenGate

EXAMPLE = ROOT / "examples" / "digits.py"


def test_digits() -> None:
    pytest.importorskip("sklearn")
    study = load_study(EXAMPLE)
    rates = (1e-7, 3e-3, 1e-2)
    settings = [{"lr": rate, "weight_decay": 0.01, "dropout": 0.1 * n} for n, rate in enumerate(rates)]
    group = TrialGroup(study, [build_member(study, n, params) for n, params in enumerate(settings)], OpenGate())
    for epoch in range(study.epochs):
        for inputs, targets in study.batches(epoch):
            group.train_step(inputs, targets)
    scores = group.evaluate()
    assert scores[0] < 0.5
    assert min(scores[1:]) > 0.9
