"""Which role each parameter has, and what has none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trials import ShrinkError, roles


def kinds(make: Callable[[int], nn.Module], **more: Any) -> dict[str, str]:
    return {name: role.kind for name, role in roles(make(4), make(1), **more).items()}


def of(make: Callable[[int], nn.Module]) -> dict[str, str]:
    return kinds(lambda n: nn.Sequential(make(n)))


@pytest.mark.parametrize(
    ("make", "weight", "bias"),
    [
        (lambda n: nn.Linear(8 * n, 8 * n), "hidden", "vector"),
        (lambda n: nn.Linear(8, 8 * n), "input", "vector"),
        (lambda n: nn.Linear(8 * n, 8), "output", "scalar"),
        (lambda n: nn.Linear(8, 8), "scalar", "scalar"),
        (lambda n: nn.Conv2d(8 * n, 4 * n, 3), "hidden", "vector"),
        (lambda n: nn.Conv2d(8 * n, 8 * n, 3, groups=8 * n), "input", "vector"),
        (lambda n: nn.Conv2d(8 * n, 8 * n, 3, groups=4), "hidden", "vector"),
        (lambda n: nn.ConvTranspose1d(8, 8 * n, 3), "input", "vector"),
        (lambda n: nn.ConvTranspose1d(8 * n, 8, 3), "output", "scalar"),
        (lambda n: nn.ConvTranspose2d(8 * n, 8 * n, 3, groups=8 * n), "input", "vector"),
        (lambda n: nn.Embedding(20, 8 * n), "input", None),
        (lambda n: nn.EmbeddingBag(20, 8 * n), "input", None),
        (lambda n: nn.LayerNorm(8 * n), "vector", "vector"),
        (lambda n: nn.LayerNorm([8 * n, 5]), "input", "input"),
        (lambda n: nn.LayerNorm(8), "scalar", "scalar"),
        (lambda n: nn.PReLU(8 * n), "vector", None),
        (lambda n: nn.Bilinear(8 * n, 5, 8 * n), "hidden", "vector"),
    ],
)
def test_layers(make: Callable[[int], nn.Module], weight: str, bias: str | None) -> None:
    found = of(make)
    assert found["0.weight"] == weight
    assert found.get("0.bias") == bias


def test_attention_and_recurrent_layers() -> None:
    attention = of(lambda n: nn.MultiheadAttention(16 * n, 2 * n, kdim=7, add_bias_kv=True))
    assert attention == {
        "0.q_proj_weight": "hidden",
        "0.k_proj_weight": "input",
        "0.v_proj_weight": "hidden",
        "0.in_proj_bias": "vector",
        "0.bias_k": "input",
        "0.bias_v": "input",
        "0.out_proj.weight": "hidden",
        "0.out_proj.bias": "vector",
    }
    lstm = of(lambda n: nn.LSTM(5, 8 * n, proj_size=3))
    assert lstm == {
        "0.weight_ih_l0": "input",
        "0.weight_hh_l0": "input",
        "0.bias_ih_l0": "vector",
        "0.bias_hh_l0": "vector",
        "0.weight_hr_l0": "output",
    }
    assert of(lambda n: nn.GRUCell(5, 8 * n))["0.weight_hh"] == "hidden"


def test_ratios_are_the_surrogates_size_by_the_targets() -> None:
    role = roles(nn.Linear(32, 64), nn.Linear(16, 8))["weight"]
    assert (role.r_in, role.r_out) == (0.5, 0.125)
    assert (role.shape, role.target_shape) == ((8, 16), (64, 32))


class Tied(nn.Module):
    def __init__(self, n: int, other: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8 * n), nn.Linear(8 * n, 20, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_embedding_is_an_input() -> None:
    role = roles(Tied(4), Tied(1))["embed.weight"]
    assert (role.kind, role.tied) == ("input", True)


class Bare(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.zeros(1, 6, 8 * n))
        self.gain = nn.Parameter(torch.zeros(8 * n))


def test_bare_parameters_need_fans() -> None:
    with pytest.raises(ShrinkError, match=r"'mixing' of Bare has shape \[1, 6, 8\].*fans=\{'mixing': \(0, 1\)\}"):
        kinds(Bare)
    assert kinds(Bare, fans={"mix*": (2, None)}) == {"mixing": "input", "gain": "vector"}
    assert kinds(Bare, fans={"mixing": (None, 2)})["mixing"] == "output"
    assert kinds(lambda n: Bare(1)) == {"mixing": "scalar", "gain": "scalar"}
    for wrong in ((0, 7), 1, (True, "x")):
        with pytest.raises(ShrinkError, match="allowed: the axis of its outputs"):
            kinds(Bare, fans={"mixing": wrong})


def swapped(n: int) -> nn.Module:
    model = nn.ModuleList([nn.Linear(8 * n, 8), nn.Linear(8, 8 * n)])
    model[1].weight = nn.Parameter(torch.zeros(8, 8 * n))
    model[0].weight = model[1].weight
    return nn.ModuleList([model, Other(model[0].weight)])


class Other(nn.ConvTranspose1d):
    """Uses a weight the other way round."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(1, 1, 1)
        assert isinstance(weight, nn.Parameter)
        self.weight = weight


@pytest.mark.parametrize(
    ("target", "surrogate", "said"),
    [
        (nn.Linear(8, 8), nn.Linear(8, 16), "'weight' is wider in the surrogate: axis 0 is 16, the target's 8"),
        (nn.Linear(8, 8), nn.Linear(8, 4, bias=False), "'bias' of the target is absent in the surrogate"),
        (nn.Linear(8, 8, bias=False), nn.Linear(8, 4), "'bias' of the surrogate is absent in the target"),
        (nn.Conv1d(8, 8, 3), nn.Linear(8, 4), "'weight' has 2 axes in the surrogate and 3 in the target"),
        (nn.Bilinear(8, 8, 8), nn.Bilinear(4, 4, 4), "both inputs of a Bilinear shrink"),
        (nn.Embedding(9, 8, max_norm=1.0), nn.Embedding(9, 4, max_norm=1.0), "max_norm=1.0"),
        (swapped(4), swapped(1), "is shared by Linear and Other|is shared by Other and Linear"),
    ],
)
def test_refusals_name_the_cause(target: nn.Module, surrogate: nn.Module, said: str) -> None:
    with pytest.raises(ShrinkError, match=said):
        roles(target, surrogate)
