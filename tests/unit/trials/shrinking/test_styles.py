"""Models in styles of their own, each of which shrinks with the right roles, or is refused in words."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trials import ShrinkWarning, Shrunk
from trials import shrink as shrink_and_warn


def shrink(model: nn.Module, batch: Any, **more: Any) -> Shrunk:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkWarning)
        return shrink_and_warn(model, 4, batch, **more)


def roles(found: Shrunk) -> dict[str, tuple[float, float]]:
    return {name: (role.r_out, role.r_in) for name, role in found.roles.items()}


class ClassToken(nn.Module):
    """A token of its own in front of patches, as in ViT."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.patch, self.how = nn.Conv2d(3, 64, 4, 4), how
        self.token, self.position = nn.Parameter(torch.zeros(1, 1, 64)), nn.Parameter(torch.randn(1, 5, 64))
        self.mix, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        token = {
            "expand": lambda: self.token.expand(x.shape[0], -1, -1),
            "repeat": lambda: self.token.repeat(x.shape[0], 1, 1),
        }[self.how]()
        x = torch.cat([token, x], dim=1) + self.position
        return self.head((x + torch.relu(self.mix(x)))[:, 0])


@pytest.mark.parametrize("how", ["expand", "repeat"])
def test_a_class_token_is_a_vector(how: str) -> None:
    found = shrink(ClassToken(how), torch.randn(2, 3, 8, 8))
    assert roles(found)["token"] == (0.25, 1.0) and roles(found)["position"] == (0.25, 1.0)
    assert roles(found)["mix.weight"] == (0.25, 0.25)


class Standardized(nn.Conv2d):
    """A convolution whose filters have mean 0 and deviation 1."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return self._conv_forward(x, w / (w.std(dim=(1, 2, 3), keepdim=True) + 1e-5), self.bias)


class Masked(nn.Linear):
    """A Linear of a user's class."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight, self.bias)


def test_layers_that_inherit_from_pytorchs_have_their_roles() -> None:
    norms = (nn.GroupNorm(8, 64) for _ in range(2))
    images = nn.Sequential(
        *(nn.Conv2d(3, 64, 3), next(norms), nn.ReLU(), Standardized(64, 64, 3), next(norms), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    found = roles(shrink(images, torch.randn(2, 3, 8, 8)))
    assert found["3.weight"] == (0.25, 0.25) and found["3.bias"] == (0.25, 1.0)
    vectors = nn.Sequential(Masked(5, 64), nn.ReLU(), Masked(64, 64), nn.ReLU(), Masked(64, 3))
    found = roles(shrink(vectors, torch.randn(2, 5)))
    assert found["2.weight"] == (0.25, 0.25) and found["2.bias"] == (0.25, 1.0) and found["4.bias"] == (1.0, 1.0)


class Experts(nn.Module):
    """A mixture of experts, each of which gets the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.head = nn.Embedding(11, 64), nn.Linear(64, 4, bias=False), nn.Linear(64, 11)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64)) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).flatten(0, 1)
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            made.index_add_(0, row, expert(x[row]) * weights[row, place].unsqueeze(-1))
        return self.head(x + made)


def test_experts_that_get_the_tokens_that_chose_them_shrink() -> None:
    found = roles(shrink(Experts(), torch.randint(11, (4, 8))))
    assert found["experts.0.0.weight"] == (0.25, 0.25) and found["experts.3.2.weight"] == (0.25, 0.25)
    assert found["gate.weight"] == (1.0, 0.25) and found["embed.weight"] == (0.25, 1.0)


class Equalized(nn.Module):
    """A Linear that scales its weight by its fan-in whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * self.weight.shape[1] ** -0.5)


def test_a_number_that_is_computed_from_a_width_is_named_with_its_line() -> None:
    found = shrink(nn.Sequential(nn.Linear(5, 64), Equalized(), nn.ReLU(), nn.Linear(64, 3)), torch.randn(2, 5))
    left = "\n".join(map(str, found.left))
    assert re.search(r"'1.weight' axis 1 stays 64: the code computes a number from it \(test_styles.py:\d+\)", left)


class Joined(nn.Module):
    """Joins what has been computed with the input, as U-Nets join skips."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, 128), nn.Linear(128 + inputs, 128)
        self.skipped, self.last = nn.Linear(256, 128), nn.Linear(128, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        z = torch.relu(self.second(torch.cat([y, x], dim=1)))
        return self.last(torch.relu(self.skipped(torch.cat([y, z], dim=1))))


def test_inputs_that_stay_beside_others_that_shrink_are_named() -> None:
    with pytest.warns(
        ShrinkWarning, match=r"of the inputs of 'second.weight' in the surrogate, 38% .*allowed: a layer"
    ):
        found = shrink_and_warn(Joined(20), 4, torch.randn(2, 20))
    assert roles(found)["skipped.weight"] == (0.25, 0.25), "both halves shrink"
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShrinkWarning)
        shrink_and_warn(Joined(2), 4, torch.randn(2, 2))


class KeepsItsWeightsInAList(nn.Module):
    """Reads parameters by a list beside the modules that hold them, as for a decay or an average of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 64), nn.Linear(64, 64), nn.Linear(64, 3)
        self.read = [self.first.weight, self.second.weight]

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.read
        made: Tensor = self.head(torch.relu(torch.relu(x @ first.T) @ second.T))
        return made


def test_parameters_that_a_model_keeps_twice_are_the_same_in_its_surrogate() -> None:
    found = shrink(KeepsItsWeightsInAList(), torch.randn(2, 5), keep=("first.bias", "second.bias")).model
    assert isinstance(found, KeepsItsWeightsInAList)
    assert found.read[1] is found.second.weight and found.read[1].shape == (16, 16)
    found(torch.randn(2, 5)).sum().backward()
    assert found.second.weight.grad is not None
