"""What a hyperparameter changes tells whether it transfers."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.fused_and_solo import ToyStudy
from trials import Shrink, ShrinkError, ShrinkWarning, build_member
from trials.training.transferable import what_transfers

RANGES: dict[str, Any] = {
    "lr": (1e-3, 1e-1),
    "momentum": (0.0, 0.9),
    "weight_decay": (0.0, 0.1),
    "dropout": (0.0, 0.5),
    "width": (16, 32),
    "kernel": (2, 3),
    "gamma": (0.5, 0.9),
    "clip": (0.1, 1.0),
    "negative_slope": (0.1, 0.2),
    "temperature": (1.0, 2.0),
    "kind": ["SGD", "AdamW"],
}


class Varied(ToyStudy):
    """Suggests what it is told."""

    shrink = Shrink(4)

    def __init__(self, *names: str) -> None:
        super().__init__(lambda n: nn.Identity(), batches=[(torch.randn(2, 3, 4), torch.zeros(2))])
        self.names = names

    def suggest(self, trial: Any) -> dict[str, Any]:
        params: dict[str, Any] = {}
        for name in self.names:
            low = RANGES[name]
            if isinstance(low, list):
                params[name] = trial.suggest_categorical(name, low)
            elif isinstance(low[0], int):
                params[name] = trial.suggest_int(name, *low)
            else:
                params[name] = trial.suggest_float(name, *low)
        return params

    def model(self, params: dict[str, Any]) -> nn.Module:
        width = params.get("width", 16)
        return nn.Sequential(
            *(nn.Conv1d(3, width, params.get("kernel", 2)), nn.LeakyReLU(params.get("negative_slope", 0.1))),
            *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Dropout(params.get("dropout", 0.1)), nn.Linear(width, 2)),
        )

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        lr, decay = params.get("lr", 0.1), params.get("weight_decay", 0.01)
        if params.get("kind") == "AdamW":
            return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=params.get("momentum", 0.5), weight_decay=decay)

    def scheduler(self, params: dict[str, Any], optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, params.get("gamma", 0.9))

    def clip_norm(self, params: dict[str, Any]) -> float:
        return float(params.get("clip", 1.0))


@pytest.fixture(autouse=True)
def _narrow() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkWarning)
        yield


def test_each_is_told_by_what_it_changes() -> None:
    found = {each.name: (each.fate, each.changes) for each in what_transfers(Varied(*RANGES))}
    assert found == {
        "lr": ("transfers", "lr of the optimizer"),
        "momentum": ("transfers", "momentum of the optimizer"),
        "weight_decay": ("regularizer", "weight_decay of the optimizer"),
        "dropout": ("regularizer", "dropout of module '4'"),
        "width": ("width", "axis 0 of '0.weight'"),
        "kernel": ("unknown", "axis 2 of '0.weight'"),
        "gamma": ("transfers", "gamma of schedule 0"),
        "clip": ("transfers", "clip_norm of clipping"),
        "negative_slope": ("unknown", "negative_slope of module '1'"),
        "temperature": ("unknown", "nothing that was seen"),
        "kind": ("transfers", "class of the optimizer"),
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("weight_decay", "'weight_decay' changes weight_decay of the optimizer.*regularizers=True"),
        ("dropout", "'dropout' changes dropout of module '4'"),
        ("width", "'width' changes axis 0 of '0.weight', which shrinks"),
    ],
)
def test_what_does_not_transfer_is_refused(name: str, said: str) -> None:
    study = Varied("lr", name)
    with pytest.raises(ShrinkError, match=said):
        build_member(study, 0, {"lr": 0.1, name: RANGES[name][1]})


def test_regularizers_may_be_searched_nevertheless() -> None:
    study = Varied("lr", "weight_decay", "dropout")
    study.shrink = Shrink(4, regularizers=True)
    assert build_member(study, 0, {"lr": 0.1, "weight_decay": 0.1, "dropout": 0.5}).roles is not None


def test_studies_that_do_not_shrink_may_search_all() -> None:
    study = Varied("width", "weight_decay")
    study.shrink = None  # type: ignore[assignment]
    assert build_member(study, 0, {"width": 32, "weight_decay": 0.1}).roles is None
