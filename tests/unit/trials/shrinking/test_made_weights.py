"""Weights that the forward makes of several parameters: their length and direction, gains, means."""

import warnings
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import weight_norm

from trials import ShrinkError, ShrinkWarning, Shrunk
from trials import shrink as shrink_and_warn


def shrink(model: nn.Module, batch: Any, **more: Any) -> Shrunk:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkWarning)
        return shrink_and_warn(model, 4, batch, **more)


def kinds(found: Shrunk) -> dict[str, tuple[str, float, float]]:
    return {name: (role.kind, role.r_out, role.r_in) for name, role in found.roles.items()}


def layers(middle: nn.Module, last: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 64), nn.ReLU(), middle, nn.ReLU(), last or nn.Linear(64, 3))


class Own(nn.Module):
    """A Linear of 64 units whose weight is made in code of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.v = nn.Parameter(torch.randn(64, 64) / 8)
        self.g = nn.Parameter(torch.ones(1, 64) if how == "inputs" else torch.ones(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        weight = {
            "norm": lambda: self.g * self.v / self.v.norm(dim=1, keepdim=True),
            "normalize": lambda: self.g * functional.normalize(self.v, dim=1),
            "gain": lambda: self.v * self.g,
            "inputs": lambda: self.v * self.g,
            "centred": lambda: self.g * (self.v - self.v.mean(dim=1, keepdim=True)),
        }[self.how]()
        return functional.linear(x, weight)


@pytest.mark.parametrize("how", ["norm", "normalize", "gain", "inputs", "centred"])
def test_a_weight_made_in_own_code_has_a_gain_and_a_matrix(how: str) -> None:
    found = kinds(shrink(layers(Own(how)), torch.randn(2, 5)))
    assert found["2.v"] == ("hidden", 0.25, 0.25)
    assert found["2.g"] in [("input", 0.25, 1.0), ("vector", 0.25, 1.0)]


def test_weight_norm_shrinks_and_the_weight_has_the_surrogates_size() -> None:
    model = layers(weight_norm(nn.Linear(64, 64)))
    found = shrink(model, torch.randn(2, 5))
    own = kinds(found)
    assert own["2.parametrizations.weight.original1"] == ("hidden", 0.25, 0.25)
    assert own["2.parametrizations.weight.original0"] == ("input", 0.25, 1.0)
    narrow, wide = (cast("nn.Linear", m.get_submodule("2")) for m in (found.model, model))
    assert narrow.weight.shape == (16, 16) and narrow.in_features == narrow.out_features == 16
    ratio = narrow.weight.square().mean().sqrt() / wide.weight.square().mean().sqrt()
    assert float(ratio.detach()) == pytest.approx(2, rel=0.1)


def test_convolutions_with_weight_norm_shrink() -> None:
    model = nn.Sequential(nn.Conv1d(3, 32, 3), nn.ReLU(), weight_norm(nn.Conv1d(32, 64, 3)), nn.Conv1d(64, 2, 1))
    assert kinds(shrink(model, torch.randn(2, 3, 9)))["2.parametrizations.weight.original1"] == ("hidden", 0.25, 0.25)


def test_a_readout_with_weight_norm_does_not_begin_at_zero() -> None:
    """Zeros have no direction."""
    model = layers(nn.Linear(64, 64), weight_norm(nn.Linear(64, 3)))
    found = shrink(model, torch.randn(2, 5))
    assert found.zeroed == ()
    assert found.model(torch.randn(2, 5)).isfinite().all()
    assert kinds(found)["4.parametrizations.weight.original1"] == ("output", 1.0, 0.25)
    assert kinds(found)["4.parametrizations.weight.original0"][0] == "scalar"


def test_the_norm_of_a_whole_weight_keeps_it() -> None:
    ends = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 3))
    found = shrink(layers(weight_norm(nn.Linear(64, 64), dim=-1), ends), torch.randn(2, 5))
    assert "norm of a whole weight" in "\n".join(map(str, found.left))


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = layers(old_weight_norm(nn.Linear(64, 64)))
    with pytest.raises(ShrinkError, match=r"cannot be copied: RuntimeError: Only Tensors.*allowed: .*parametrizations"):
        shrink(model, torch.randn(2, 5))
