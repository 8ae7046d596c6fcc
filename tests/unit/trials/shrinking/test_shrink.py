"""What shrinks, by how much, and what is said of what does not."""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.shrinkable import GPT, Bare, Cells, Encoder, FixedView, Gated, Recurrent, cnn
from trials import ShrinkError, ShrinkWarning, Shrunk
from trials import shrink as shrink_and_warn


def shrink(model: nn.Module, by: int, batch: Any, **more: Any) -> Shrunk:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkWarning)
        return shrink_and_warn(model, by, batch, **more)


def tokens() -> Tensor:
    return torch.randint(11, (2, 6))


def shapes(found: Shrunk) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in found.model.named_parameters()}


def test_widths_shrink_and_inputs_and_outputs_stay() -> None:
    model = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 3))
    found = shrink(model, 4, torch.randn(2, 5))
    assert shapes(found)["0.weight"] == (16, 5)
    assert shapes(found)["2.weight"] == (24, 16)
    assert shapes(found)["3.weight"] == (24,)
    assert shapes(found)["4.weight"] == (3, 24)
    assert part(found.model, "0").extra_repr() == "in_features=5, out_features=16, bias=True"
    assert part(model, "0").weight.shape == (64, 5)
    assert found.work == (2 * (5 * 64 + 64 * 96 + 96 * 3), 2 * (5 * 16 + 16 * 24 + 24 * 3))


def test_slices_have_the_size_of_the_surrogates_initial_values() -> None:
    model = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    found = shrink(model, 4, torch.randn(2, 5), readout="keep").model
    assert torch.equal(part(found, "0").weight, part(model, "0").weight[:16])
    assert torch.equal(part(found, "2").weight, 2 * part(model, "2").weight[:16, :16])
    assert torch.equal(part(found, "4").weight, 2 * part(model, "4").weight[:, :16])
    zeroed = shrink(model, 4, torch.randn(2, 5))
    assert zeroed.zeroed == ("4.weight",)
    assert not part(zeroed.model, "4").weight.any()


@pytest.mark.parametrize(
    ("make", "batch", "more", "name", "shape"),
    [
        (cnn, torch.randn(2, 2, 6, 6), {}, "12.weight", (3, 72)),
        (cnn, torch.randn(2, 2, 6, 6), {}, "3.weight", (8, 1, 3, 3)),
        (lambda: GPT(32, 8), tokens(), {"divide": ("n_head",)}, "h.0.attn.c_attn.weight", (24, 8)),
        (Encoder, tokens(), {}, "layers.layers.0.self_attn.in_proj_weight", (24, 8)),
        (Encoder, tokens(), {}, "position", (1, 16, 8)),
        (Bare, torch.randn(2, 5), {}, "third", (8, 3, 2)),
        (Gated, torch.randn(2, 5), {}, "second.weight", (8, 12)),
        (lambda: Recurrent(nn.LSTM), torch.randn(2, 3, 5), {}, "rnn.weight_hh_l1", (32, 8)),
        (lambda: Recurrent(nn.LSTM, proj_size=16), torch.randn(2, 3, 5), {}, "rnn.weight_hr_l0", (4, 8)),
        (lambda: Recurrent(nn.GRU, bidirectional=True), torch.randn(2, 3, 5), {}, "rnn.weight_ih_l1", (24, 16)),
        (lambda: Recurrent(nn.RNN), torch.randn(2, 3, 5), {}, "rnn.weight_ih_l0", (8, 5)),
        (Cells, torch.randn(2, 3, 5), {}, "cell.weight_hh", (32, 8)),
    ],
)
def test_models(
    make: Callable[[], nn.Module], batch: Tensor, more: dict[str, Any], name: str, shape: tuple[int, ...]
) -> None:
    assert shapes(shrink(make(), 4, batch, **more))[name] == shape


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("inside", [False, True])
def test_what_a_recurrent_layer_reads_shrinks_only_behind_another_layer(kind: Any, inside: bool) -> None:
    """Though the data's width could be divided, too."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 32) if inside else nn.Identity()
            self.layer, self.last = kind(32 if inside else 8, 32), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            made = self.layer(self.first(x))
            return self.last(made[0] if isinstance(made, tuple) else made)

    found = shrink(Model(), 4, torch.randn(5, 8)).model
    assert found(torch.randn(5, 8)).shape == (5, 3)
    assert part(found, "layer").input_size == 8 and part(found, "layer").hidden_size == 8


def test_bare_parameters_get_their_role_from_their_use() -> None:
    found = shrink(Bare(), 4, torch.randn(2, 5)).roles
    kinds = {name: role.kind for name, role in found.items()}
    expected = {"first": "input", "offset": "vector", "second": "hidden", "third": "hidden", "last": "output"}
    assert kinds == expected
    assert (found["third"].r_in, found["third"].r_out) == (0.25, 0.25)


def grouped(groups: int) -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 32, 1), nn.Conv1d(32, 64, 3, groups=groups), nn.Conv1d(64, 2, 1))


def test_groups_of_convolutions() -> None:
    assert shapes(shrink(grouped(4), 4, torch.randn(2, 3, 8)))["1.weight"] == (16, 2, 3)  # narrower groups
    assert shapes(shrink(grouped(16), 4, torch.randn(2, 3, 8)))["1.weight"] == (16, 2, 3)  # fewer groups
    deep = shrink(grouped(32), 4, torch.randn(2, 3, 8))
    assert shapes(deep)["1.weight"] == (16, 1, 3)
    assert part(deep.model, "1").groups == 8


@pytest.mark.parametrize(("groups", "channels", "made"), [(4, 32, 1), (16, 32, 4), (1, 32, 1), (3, 24, 1), (6, 24, 2)])
def test_the_channels_of_a_normalized_group_stay_or_nearly(groups: int, channels: int, made: int) -> None:
    model = nn.Sequential(nn.Conv1d(3, channels, 1), nn.GroupNorm(groups, channels), nn.Conv1d(channels, 2, 1))
    found = part(shrink(model, 4, torch.randn(2, 3, 8)).model, "1")
    assert (found.num_groups, found.num_channels) == (made, channels // 4)


def test_a_surrogate_trains_and_saves_as_its_target_does() -> None:
    found = shrink(GPT(32, 8), 4, tokens(), divide=("n_head",)).model
    assert list(found.state_dict()) == list(GPT().state_dict())
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1)
    found(tokens()).sum().backward()
    optimizer.step()


def test_a_tied_head_multiplies_its_logits() -> None:
    found = shrink(GPT(32, 8, tie="module"), 4, tokens(), divide=("n_head",))
    assert part(found.model, "head").weight is part(found.model, "wte").weight
    assert part(found.model, "head").multiplier == 4
    assert found.roles["wte.weight"].tied
    assert found.zeroed == ()


def test_only_layers_that_can_begin_at_zero_are_zeroed() -> None:
    ends = {
        "relu": nn.Sequential(nn.Linear(5, 32), nn.Linear(32, 3), nn.ReLU()),
        "norm": nn.Sequential(nn.Linear(5, 32), nn.Linear(32, 3), nn.LayerNorm(3, elementwise_affine=False)),
        "softmax": nn.Sequential(nn.Linear(5, 32), nn.Linear(32, 3), nn.Softmax(-1)),
    }
    zeroed = {name: shrink(model, 4, torch.randn(2, 5)).zeroed for name, model in ends.items()}
    assert zeroed == {"relu": (), "norm": (), "softmax": ("1.weight",)}


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(5, 32), nn.Linear(32, 3), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.a(y) * self.b(y)


def test_factors_of_a_product_are_not_both_zeroed() -> None:
    assert shrink(Product(), 4, torch.randn(2, 5)).zeroed == ()


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).sum(-1)


def part(model: nn.Module, path: str) -> Any:
    return model.get_submodule(path)


def left(found: Shrunk) -> str:
    return "\n".join(map(str, found.left))


def test_what_stays_is_listed_with_its_line() -> None:
    found = shrink(FixedView(), 4, torch.randn(2, 1, 8, 8))
    assert shapes(found)["conv1.weight"] == (2, 1, 3, 3)
    assert re.search(
        r"'conv2.weight' axis 0 stays 32: node 'view' \(shrinkable.py:\d+\) takes 512, a plain number", left(found)
    )
    assert "node 'sum' (test_shrink.py:" in left(shrink(Summed(), 4, torch.randn(2, 5)))


def test_layers_with_a_parametrization_that_has_no_rule_stay() -> None:
    turned = nn.utils.parametrizations.orthogonal(nn.Linear(32, 32))
    model = nn.Sequential(
        nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), turned, nn.ReLU(), nn.Linear(32, 2)
    )
    found = shrink(model, 4, torch.randn(2, 5))
    assert shapes(found)["2.weight"] == (32, 16)
    assert re.search(r"original' axis 0 stays 32: node '.*' \(in _Orthogonal\).*there is no rule for", left(found))


class Rescaled(nn.Module):
    """Multiplies by a number that it computes from a width."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 64), nn.Linear(64, 32), nn.Linear(32, 2)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        width = y.shape[-1]
        factor = {"root": lambda: math.sqrt(width), "power": lambda: width**0.5, "share": lambda: 1 / width}[self.how]()
        return self.third(torch.tanh(self.second(torch.tanh(y * factor))))


@pytest.mark.parametrize("how", ["root", "power", "share"])
def test_a_width_from_which_a_number_is_computed_stays(how: str) -> None:
    found = shrink(Rescaled(how), 4, torch.randn(2, 5))
    assert shapes(found)["second.weight"] == (8, 64)
    assert "the code computes a number from it" in left(found)


def test_kept_modules_stay() -> None:
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 3))
    found = shrink(model, 4, torch.randn(2, 5), keep=("0",))
    assert shapes(found)["2.weight"] == (16, 32)
    assert "keep='0'" in left(found)


def test_six_heads_stay_and_the_number_is_named() -> None:
    found = shrink(GPT(48, 6), 8, tokens(), divide=("n_head",))
    assert shapes(found)["h.0.attn.c_attn.weight"] == (144, 48)
    assert shapes(found)["h.0.mlp.0.weight"] == (24, 48)
    assert "6 ('h.0.attn.n_head') is not divisible by 8, but by 2, 3" in left(found)


REFUSED: list[tuple[Callable[[], nn.Module], Tensor, dict[str, Any], str]] = [
    (
        lambda: nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 2)),
        torch.randn(2, 3),
        {},
        "stays 7: 7 is not divisible by 4",
    ),
    (
        lambda: GPT(32, 8),
        tokens(),
        {},
        r"node 'matmul' \(shrinkable.py:\d+\).*along an axis of 4.*divide=\('n_head',\)",
    ),
    (lambda: GPT(32, 8, tie="function"), tokens(), {"divide": ("n_head",)}, "'wte.weight' is an embedding and also"),
    (lambda: GPT(), tokens(), {"divide": ("heads",)}, "divide='heads': no module has such a whole number"),
    (lambda: nn.Linear(3, 32), torch.randn(2, 3), {}, "Linear does not shrink by 4"),
    (lambda: nn.Linear(3, 32), torch.randn(2, 3), {"keep": ("x",)}, "keep='x': no parameter or module has such a name"),
    (lambda: nn.Linear(3, 32), torch.randn(2, 3), {"readout": "one"}, "readout='one'; allowed: 'zero' or 'keep'"),
    (lambda: nn.Linear(3, 32), torch.randn(2, 4), {}, "the forward fails on the batch: RuntimeError"),
]


@pytest.mark.parametrize(("make", "batch", "more", "said"), REFUSED)
def test_refusals(make: Callable[[], nn.Module], batch: Tensor, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ShrinkError, match=said):
        shrink(make(), 4, batch, **more)


@pytest.mark.parametrize("by", [1, 0, 2.0, "2", True])
def test_the_factor_is_a_whole_number(by: Any) -> None:
    with pytest.raises(ShrinkError, match="allowed: a whole number, 2 or more"):
        shrink(nn.Linear(3, 32), by, torch.randn(2, 3))


class Asserts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = 32
        self.first, self.second = nn.Linear(3, 32), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.shape[-1] != self.width:
            raise ValueError(f"{y.shape[-1]} units")
        return self.second(y)


def test_what_the_surrogates_own_code_refuses_is_refused_with_its_line() -> None:
    with pytest.raises(ShrinkError, match=r"surrogate's forward fails.*8 units \(test_shrink.py:\d+\); allowed: name"):
        shrink(Asserts(), 4, torch.randn(2, 3))
    assert shapes(shrink(Asserts(), 4, torch.randn(2, 3), divide=("width",)))["first.weight"] == (8, 3)


def test_narrow_and_mostly_unshrunk_surrogates_give_a_warning() -> None:
    with pytest.warns(ShrinkWarning, match="only 8 units in the surrogate; below 32"):
        shrink_and_warn(nn.Sequential(nn.Linear(3, 32), nn.Linear(32, 2)), 4, torch.randn(2, 3))
    wide = nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 7), nn.ReLU(), nn.Linear(7, 999))
    with pytest.warns(ShrinkWarning, match=r"multiplies \d+% as often as its target"):
        shrink_and_warn(wide, 4, torch.randn(2, 3))


def test_neither_the_model_nor_random_numbers_nor_the_batch_change() -> None:
    model, batch = cnn(), torch.randn(2, 2, 6, 6)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    kept, state = batch.clone(), torch.get_rng_state()
    shrink(model, 4, batch)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert torch.equal(batch, kept)
    assert torch.equal(torch.get_rng_state(), state)


class Picks(nn.Module):
    """Picks from the axis of 6 places, however the call names it, between two layers that shrink."""

    def __init__(self, pick: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.pick = nn.Linear(5, 32), nn.Linear(32, 3), pick

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pick(self.first(x)))


class Tells(nn.Module):
    """Reads the width from its layers: to view by it, or to compute a number from it."""

    def __init__(self, scales: bool) -> None:
        super().__init__()
        self.embed, self.last, self.scales = nn.Embedding(11, 32), nn.Linear(32, 3), scales

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.scales:
            x = x * math.sqrt(self.embed.embedding_dim)
        return self.last(x.view(-1, self.last.in_features))


def test_widths_that_layers_tell_are_known() -> None:
    found = shrink(Tells(scales=False), 4, tokens())
    assert shapes(found)["last.weight"] == (3, 8)
    with pytest.raises(
        ShrinkError, match=r"the code computes a number from it \(test_shrink.py:\d+\), which would be another in the"
    ):
        shrink(Tells(scales=True), 4, tokens())


PLACES = torch.tensor([2, 0])


@pytest.mark.parametrize(
    ("pick", "stays"),
    [
        (lambda x: torch.gather(x, dim=1, index=torch.zeros(2, 1, x.shape[2], dtype=torch.long)), False),
        (lambda x: torch.index_select(x, dim=1, index=PLACES), False),
        (lambda x: torch.index_select(x, 1, PLACES), False),
        (lambda x: torch.select(x, dim=-2, index=1), False),
        (lambda x: torch.narrow(x, dim=1, start=1, length=2), False),
        (lambda x: torch.flip(x, dims=(1,)), False),
        (lambda x: x.flip(0, 1), False),
        (lambda x: x.flip(-1), True),
        (lambda x: torch.roll(x, shifts=2, dims=1), False),
        (lambda x: x.roll(2, 1), False),
        (lambda x: x.roll((1, 2), (0, 1)), False),
        (lambda x: x.roll(2), True),
        (lambda x: x.roll(1, -1), True),
    ],
)
def test_only_the_axis_that_is_picked_from_stays(pick: Callable[[Tensor], Tensor], stays: bool) -> None:
    model, batch = Picks(pick), torch.randn(2, 6, 5)
    if stays:
        with pytest.raises(ShrinkError, match=r"does not shrink by 4.*test_shrink\.py:"):
            shrink(model, 4, batch)
    else:
        found = shrink(model, 4, batch)
        assert found.model.first.weight.shape == (8, 5)  # type: ignore[union-attr]
        assert found.model(batch).shape == model(batch).shape


def test_a_call_that_is_not_understood_is_not_taken_for_a_fault_of_the_model() -> None:
    weight = nn.Parameter(torch.randn(32, 32))
    model = Picks(lambda x: torch.matmul(input=x, other=weight))
    with pytest.raises(ShrinkError, match=r"cannot be followed: IndexError.*\(test_shrink\.py:\d+\); allowed: its arg"):
        shrink(model, 4, torch.randn(2, 6, 5))
    with pytest.raises(ShrinkError, match="the forward fails on the batch"):
        shrink(model, 4, torch.randn(2, 6, 4))
