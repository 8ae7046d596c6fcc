"""A surrogate's tied head fuses by a rule of its own."""

import warnings

import torch
from torch import nn

from tests.support.fused_and_solo import assert_fused_is_solo
from tests.support.shrinkable import GPT
from trials import ShrinkWarning, fuse, shrink


def surrogate(number: int) -> nn.Module:
    torch.manual_seed(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkWarning)
        return shrink(GPT(32, 8, tie="module").double(), 4, tokens(), divide=("n_head",)).model


def tokens() -> torch.Tensor:
    return torch.randint(11, (4, 6))


def test_it_has_a_rule() -> None:
    fused = fuse([surrogate(number) for number in range(3)])
    fused(tokens())
    ways = dict(fused.ways())
    assert {name: how for name, how in ways.items() if "head" in name and "rule" not in how} == {}


def test_fused_equals_alone() -> None:
    assert_fused_is_solo(surrogate, [tokens()], lambda n, ps: torch.optim.SGD(ps, lr=0.01 * (n + 1)))
