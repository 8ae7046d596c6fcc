"""Shallower surrogates: which parameters are in which place of a branch, and the rules of their rates."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.duplicated import trained
from tests.support.shrinkable import GPT, HuggingFaceGPT2
from trials import ShrinkError, ShrinkWarning, scaled_groups, shrink
from trials.shrinking.roles import Roles, roles
from trials.shrinking.rules import multipliers
from trials.shrinking.scaled_optimizer import clip_gradients

DEEP, SHALLOW = 6, 2


@pytest.fixture(autouse=True)
def _narrow() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkWarning)
        yield


class Parallel(nn.Module):
    """Branches that all read the input, so that copies of them stay equal."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([block(x) for block in self.blocks]).sum(0)


def is_last(name: str) -> bool:
    return name.split(".")[2] == "3"


def placed(target: nn.Module, surrogate: nn.Module) -> Roles:
    found = roles(surrogate, surrogate)
    ratio = SHALLOW / DEEP
    for name, role in found.items():
        found[name] = replace(role, branch="last" if is_last(name) else "inner", r_depth=ratio)
    return found


MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, eps=1e-3),
    "adam, l2": lambda ps: torch.optim.Adam(ps, lr=0.01, eps=1e-3, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-3, weight_decay=0.5),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.05, eps=1e-3),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.02, eps=1e-3),
}


@pytest.mark.parametrize("clip", [{}, {"norm": 0.05}, {"value": 0.002}])
@pytest.mark.parametrize("which", ["all", "inner", "last"])
@pytest.mark.parametrize("name", MAKES)
def test_branches_equal_copies_of_them(name: str, which: str, clip: dict[str, float]) -> None:
    torch.manual_seed(0)
    target, surrogate, plain = Parallel(DEEP).double(), Parallel(SHALLOW).double(), Parallel(SHALLOW).double()
    with torch.no_grad():
        ours = dict(surrogate.named_parameters())
        for parameter, p in target.named_parameters():
            _, number, rest = parameter.split(".", 2)
            p.copy_(ours[f"blocks.{int(number) * SHALLOW // DEEP}.{rest}"])
        for parameter, p in surrogate.named_parameters():
            p.mul_(DEEP / SHALLOW if is_last(parameter) else 1)
    plain.load_state_dict(surrogate.state_dict())
    for model in (target, surrogate, plain):
        for parameter, p in model.named_parameters():
            p.requires_grad_(which == "all" or is_last(parameter) == (which == "last"))
    found = placed(target, surrogate)
    optimizer = MAKES[name]([p for p in surrogate.parameters() if p.requires_grad])
    scales = multipliers(found, optimizer)
    own = [(p, scales[n]) for n, p in surrogate.named_parameters() if p.requires_grad]
    scaled_groups(optimizer, found)
    stream = torch.Generator().manual_seed(1)
    batches = [torch.randn(6, 4, generator=stream, dtype=torch.float64) for _ in range(10)]

    def plainly(model: nn.Module) -> Tensor:
        trainable = [p for p in model.parameters() if p.requires_grad]

        def clip_own() -> None:
            if "value" in clip:
                nn.utils.clip_grad_value_(trainable, clip["value"])
            if "norm" in clip:
                nn.utils.clip_grad_norm_(trainable, clip["norm"])

        return trained(model, MAKES[name](trainable), batches, clip_own)

    deep = plainly(target)
    shallow = trained(surrogate, optimizer, batches, lambda: clip_gradients(own, **clip))
    assert (deep - shallow).abs().max() < 1e-10
    assert (deep - plainly(plain)).abs().max() > 1e-4


def tokens() -> Tensor:
    return torch.randint(11, (2, 6))


def test_a_stack_becomes_shallower() -> None:
    model = GPT(32, 8, depth=8)
    found = shrink(model, 4, tokens(), depth=4, divide=("n_head",), readout="keep")
    assert len(list(found.model.get_submodule("h").children())) == 2
    places = {name: role.branch for name, role in found.roles.items()}
    last = {name for name, place in places.items() if place == "last"}
    ends = ("attn.c_proj.weight", "attn.c_proj.bias", "mlp.2.weight", "mlp.2.bias")
    assert last == {f"h.{block}.{end}" for block in range(2) for end in ends}
    assert {name for name, place in places.items() if place == "none"} == {
        *("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias", "head.weight")
    }
    assert all(role.r_depth == 0.25 for name, role in found.roles.items() if name.startswith("h."))
    ours, theirs = found.model.get_parameter("h.1.mlp.2.bias"), model.get_parameter("h.1.mlp.2.bias")
    assert torch.equal(ours, 4 * theirs[:8])
    ours, theirs = found.model.get_parameter("h.1.mlp.0.weight"), model.get_parameter("h.1.mlp.0.weight")
    assert torch.equal(ours, 2 * theirs[:32, :8])
    assert found.work[1] * 16 < found.work[0]


def test_gpt_2_of_hugging_face_becomes_shallower() -> None:
    pytest.importorskip("transformers")
    found = shrink(HuggingFaceGPT2(depth=4), 4, tokens(), depth=2)
    ends = ("attn.c_proj", "mlp.c_proj")
    last = {name for name, role in found.roles.items() if role.branch == "last"}
    assert last == {
        f"gpt.transformer.h.{b}.{end}.{own}" for b in range(2) for end in ends for own in ("weight", "bias")
    }
    assert found.model.get_submodule("gpt.transformer.h.0.attn").num_heads == 2


def encoder(norm_first: bool, layers: int = 4) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=norm_first)
    stack = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(3, 32), stack, nn.Linear(32, 2))


def test_pytorchs_own_transformer() -> None:
    found = shrink(encoder(norm_first=True), 4, torch.randn(2, 5, 3), depth=2)
    assert found.model.get_submodule("1").num_layers == 2
    last = {name for name, role in found.roles.items() if role.branch == "last"}
    ends = ("self_attn.out_proj.weight", "self_attn.out_proj.bias", "linear2.weight", "linear2.bias")
    assert last == {f"1.layers.{block}.{end}" for block in range(2) for end in ends}


class Normed(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), last)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def stack(last: Callable[[], nn.Module], depth: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 32), *(Normed(last()) for _ in range(depth)), nn.Linear(32, 2))


@pytest.mark.parametrize(
    ("model", "depth", "said"),
    [
        (
            encoder(norm_first=False),
            2,
            "'1.layers.0.norm1.weight' is in no residual branch of its block, as in post-norm",
        ),
        (stack(lambda: nn.LayerNorm(32)), 2, "ends in LayerNorm"),
        (stack(nn.ReLU), 2, r"node 'add' \(test_depth.py:\d+\): a branch of '1' does not end in a Linear"),
        (stack(nn.Identity), 3, "depth=3: no stack of alike blocks can be divided by 3 with two left; found: 4 in"),
        (stack(nn.Identity, 3), 3, "with two left"),
        (stack(nn.Identity, 16), 8, "depth=8; allowed: a whole number from 1 to 4"),
        (nn.Sequential(nn.Linear(3, 32), nn.Linear(32, 2)), 2, "found: none"),
    ],
)
def test_refusals(model: nn.Module, depth: int, said: str) -> None:
    batch = torch.randn(2, 5, 3)
    with pytest.raises(ShrinkError, match=said):
        shrink(model, 4, batch, depth=depth)


def test_blocks_inside_a_sequential_keep_their_names() -> None:
    found = shrink(stack(nn.Identity), 4, torch.randn(2, 3), depth=2)
    assert [name for name, _ in found.model.named_children()] == ["0", "1", "2", "5"]
    assert found.roles["2.inner.2.weight"].branch == "last"
