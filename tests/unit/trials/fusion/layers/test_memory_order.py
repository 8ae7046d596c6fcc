"""Dropout draws in the order of memory, so fused layers keep the order that a trial alone has, as channels_last."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.support.fused_and_solo import Solo, ToyStudy, assert_fused_is_solo, assert_same_trial, members
from trials import TrialGroup
from trials.fusion import FuseError
from trials.fusion.autotune import pinned
from trials.gate.base import OpenGate


def _last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


def _weights_last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its types


class Net(nn.Module):
    """A layer between convolutions, with dropout behind each."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle = nn.Conv2d(3, 6, 3, padding=1), middle
        self.drop, self.last = nn.Dropout(0.4), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.drop(self.middle(self.drop(self.first(x)))))
        return y


class Joined(Net):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(torch.cat([self.drop(self.first(x)), self.middle(x)], 1))
        return y


class Moved(Net):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(_last(x))
        return y


class Looped(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1.0 + x.sum().item()))


def _data(last: bool = False) -> list[Tensor]:
    stream = torch.Generator().manual_seed(1)
    made = [torch.randn(4, 3, 6, 6, generator=stream) for _ in range(2)]
    return [_last(x) for x in made] if last else made


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(6, 6, 3, padding=1),
    "transposed": lambda: nn.ConvTranspose2d(6, 6, 3),
    "of one pixel": lambda: nn.Conv2d(6, 6, 1),
    "of channels": lambda: nn.Conv2d(6, 6, 3, groups=6),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)),
    "pool": lambda: nn.MaxPool2d(2),
    "random slopes": lambda: nn.RReLU(),
}


@pytest.fixture(params=["grouped", "looped"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    with pinned(request.param, "wide"):
        yield


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("middle", MIDDLES.values(), ids=MIDDLES)
@pytest.mark.parametrize("size", [1, 3])
def test_weights_in_channels_last_draw_the_masks_of_the_trial_alone(middle: Callable[[], nn.Module], size: int) -> None:
    assert_fused_is_solo(lambda n: _weights_last(Net(middle())), _data(), size=size)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("middle", MIDDLES.values(), ids=MIDDLES)
def test_batches_in_channels_last_draw_the_masks_of_the_trial_alone(middle: Callable[[], nn.Module]) -> None:
    assert_fused_is_solo(lambda n: Net(middle()), _data(last=True))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("last", [False, True])
def test_what_is_joined_keeps_the_order(last: bool, size: int) -> None:
    assert_fused_is_solo(lambda n: _weights_last(Joined(nn.Conv2d(3, 6, 1))), _data(last), size=size)


def test_a_forward_may_change_the_order() -> None:
    assert_fused_is_solo(lambda n: Moved(nn.Identity()), _data())


@pytest.mark.parametrize("size", [1, 3])
def test_weights_keep_the_order_where_the_forward_is_not_traced(size: int) -> None:
    assert_fused_is_solo(lambda n: _weights_last(Looped(nn.BatchNorm2d(6))), _data(), size=size)


def test_trials_in_different_orders_are_not_fused() -> None:
    study = ToyStudy(lambda n: _weights_last(Net(nn.Identity())) if n else Net(nn.Identity()))
    with pytest.raises(FuseError, match="order in memory"):
        TrialGroup(study, members(study, range(2)), OpenGate())


def test_own_code_on_weights_in_channels_last_is_refused_where_the_order_matters() -> None:
    class Own(nn.Conv2d):
        """Not PyTorch's."""

    study = ToyStudy(lambda n: _weights_last(nn.Sequential(Own(3, 2, 3), nn.Dropout(0.5))))
    with pytest.raises(FuseError, match="channels_last order"):
        members(study, range(1))
    assert_fused_is_solo(lambda n: _weights_last(nn.Sequential(Own(3, 2, 3), nn.Dropout2d(0.5))), _data())


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": lambda y: torch.cat([y, y.relu()], 1),
    "stack": lambda y: torch.stack([y, y.relu()], 1).flatten(1, 2),
    "pad": lambda y: functional.pad(y, (1, 1, 1, 1)),
    "roll": lambda y: y.roll(1, 2),
    "batch norm": lambda y: functional.batch_norm(y, None, None, training=True),
    "convolution": lambda y: functional.conv2d(y, y.new_full((2, 6, 3, 3), 0.1)),
    "a part": lambda y: torch.cat([y, y[:, :1]], 1),
    "tokens": lambda y: functional.pad(y, (1, 1, 1, 1)).flatten(2).transpose(1, 2),
}
CALLS["pairs"] = lambda y: (y.topk(1, 1)[0].expand_as(y) + y).unfold(-1, 2, 1).flatten(-2)
LOSE = set(CALLS) - {"pairs"}
"""Those that lose the order of channels_last under vmap."""
LOOPED = "loop over trials: FuseError: it draws random numbers in the order of memory"


class Noise(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return y + torch.randn_like(y) if self.training else y


class Own(nn.Module):
    """A function as a layer."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, y: Tensor) -> Tensor:
        return self.call(y) if self.training else y


class Called(nn.Module):
    """A function between a convolution and dropout."""

    def __init__(self, call: Callable[[Tensor], Tensor], drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.call, self.drop = nn.Conv2d(3, 6, 3, padding=1), call, drop

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.call(self.first(x)))


class Untraced(Called):
    def forward(self, x: Tensor) -> Tensor:
        list(x.shape)
        return super().forward(x)


@pytest.mark.parametrize("drop", [nn.Dropout(0.4), Noise()], ids=["layer", "function"])
@pytest.mark.parametrize("kind", [Called, Untraced])
@pytest.mark.parametrize("name", CALLS)
def test_calls_keep_the_order(name: str, kind: type[Called], drop: Callable[[Tensor], Tensor]) -> None:
    group = assert_fused_is_solo(lambda n: kind(CALLS[name], drop), _data(last=True), optimizer="sgd")
    if kind is Untraced:
        assert (LOOPED in group.ways()[0][1]) == (name in LOSE)
    else:
        assert not any(how.startswith("loop") for _, how in group.ways())


OFF: dict[str, Callable[[Tensor], Tensor]] = {
    "a rate of 0": nn.Dropout(0.0),
    "a rate of 0 in a function": lambda y: functional.dropout(y, 0.0),
    "no training": lambda y: functional.dropout(y, 0.5, training=False),
    "whole channels": nn.Dropout2d(0.4),
    "whole channels in a function": lambda y: functional.dropout2d(y, 0.4),
    "attention": lambda y: functional.scaled_dot_product_attention(y, y, y, dropout_p=0.4),
}


@pytest.mark.parametrize("name", OFF)
def test_what_does_not_draw_in_the_order_of_memory_costs_no_loop(name: str) -> None:
    group = assert_fused_is_solo(lambda n: Untraced(CALLS["pad"], Own(OFF[name])), _data(last=True), "sgd")
    assert not any(how.startswith("loop") for _, how in group.ways())


def test_rates_that_are_zero_in_the_first_trial_alone() -> None:
    def make(n: int) -> nn.Module:
        return Untraced(CALLS["roll"], nn.Dropout(0.2 * n))

    assert_fused_is_solo(make, _data(last=True), "sgd")


class LastAtTheEnd(Untraced):
    """Its own last activations do not matter to its next call."""

    def forward(self, x: Tensor) -> Tensor:
        list(x.shape)
        return self.first(_seen_last(self.drop(x)))


def _seen_last(y: Tensor) -> Tensor:
    return y.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def test_an_order_does_not_last_to_the_next_call() -> None:
    group = assert_fused_is_solo(lambda n: LastAtTheEnd(CALLS["pad"], nn.Dropout(0.4)), _data(), "sgd")
    assert not any(how.startswith("loop") for _, how in group.ways())


def test_a_new_form_of_inputs_is_compared_anew() -> None:
    data = [_data()[0], _data(last=True)[1]]
    group = assert_fused_is_solo(lambda n: Untraced(CALLS["pad"], nn.Dropout(0.4)), data, "sgd")
    assert LOOPED in group.ways()[0][1]


class Plain(Called):
    """Draws nothing itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.first(x))


class PlainUntraced(Plain):
    def forward(self, x: Tensor) -> Tensor:
        list(x.shape)
        return super().forward(x)


class Drops(ToyStudy):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.dropout(outputs, 0.4).square().mean()


@pytest.mark.parametrize("kind", [Plain, PlainUntraced])
@pytest.mark.parametrize("name", ["pad", "roll", "tokens", "pairs"])
def test_outputs_for_which_a_loss_draws_keep_the_order(name: str, kind: type[Plain]) -> None:
    data = [(x.double(), torch.zeros(len(x))) for x in _data(last=True)]
    study = Drops(lambda n: kind(CALLS[name], nn.Identity()).double(), "sgd", data)
    group, solos = TrialGroup(study, members(study, range(3)), OpenGate()), [Solo(study, n) for n in range(3)]
    for batch in data:
        group.train_step(*batch)
        for solo in solos:
            solo.step(*batch)
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)


def test_a_rate_that_joins_is_compared() -> None:
    """What draws nothing yet is not known to draw in the right order."""
    data = [(x.double(), torch.zeros(len(x))) for x in _data(last=True)]
    study = ToyStudy(lambda n: Untraced(CALLS["pad"], nn.Dropout(0.2 * (n == 2))).double(), "sgd", data)
    group, solos = TrialGroup(study, members(study, range(2)), OpenGate()), [Solo(study, n) for n in range(3)]
    for joining in ([], [2]):
        group.add(members(study, joining))
        for batch in data:
            group.train_step(*batch)
            for solo in solos[: group.size]:
                solo.step(*batch)
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)


class Branches(Untraced):
    """Gives the order of channels_last for some inputs alone."""

    def __init__(self, asked: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(CALLS["pad"], nn.Dropout(0.4))
        self.asked = asked

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        is_last = self.asked(x, y) > 0
        axes, back = ((0, 2, 3, 1), (0, 3, 1, 2)) if is_last else ((0, 1, 2, 3), (0, 1, 2, 3))
        return self.drop(self.call(y.permute(axes).contiguous().permute(back)))


ASKED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all share": lambda x, y: x[0, 0, 0, 0],
    "each has": lambda x, y: (y * 0).mean() + x[0, 0, 0, 0],
    "as a number": lambda x, y: x[0, 0, 0, 0].item(),
}


@pytest.mark.parametrize("name", ASKED)
def test_another_way_through_the_code_is_compared_anew(name: str) -> None:
    data = _data()
    for x, value in zip(data, (-1.0, 1.0), strict=True):
        x[0, 0, 0, 0] = value
    group = assert_fused_is_solo(lambda n: Branches(ASKED[name]), data, "sgd")
    assert LOOPED in group.ways()[0][1]


class AsksForItself(nn.Module):
    """Trials have other answers, so it runs in a loop, and then drops."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, y: Tensor) -> Tensor:
        factor = (y * self.scale).sum().item()
        return functional.dropout(y * (1.0 + 1e-3 * factor), 0.4, self.training)


@pytest.mark.parametrize("name", ["pad", "pairs"])
def test_what_a_looped_layer_draws_for_is_compared(name: str) -> None:
    group = assert_fused_is_solo(lambda n: Untraced(CALLS[name], AsksForItself()), _data(last=True), "sgd")
    assert (LOOPED in group.ways()[0][1]) == (name in LOSE)


def test_layers_without_a_rule_keep_the_order() -> None:
    def make(n: int) -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 6, 3)), nn.Dropout(0.4), nn.Conv2d(6, 2, 1))

    group = assert_fused_is_solo(make, _data(last=True), "sgd")
    assert dict(group.ways())["0.ParametrizedConv2d"].startswith("loop over trials: under vmap activations lose")


def _output_weight(attention: nn.MultiheadAttention) -> None:
    parametrizations.weight_norm(attention.out_proj)


def _input_weight(attention: nn.MultiheadAttention) -> None:
    parametrizations.weight_norm(attention, "in_proj_weight")


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("change", [_input_weight, _output_weight])
def test_layers_that_run_in_a_loop_keep_any_order(change: Callable[[nn.MultiheadAttention], None], size: int) -> None:
    """The output of attention lies in the order of positions, examples, numbers."""

    def make(n: int) -> nn.Module:
        layer = nn.TransformerEncoderLayer(6, 2, 5, dropout=0.4, batch_first=True)
        change(layer.self_attn)
        return layer

    group = assert_fused_is_solo(make, [x.flatten(1, 2) for x in _data()], "sgd", size=size)
    assert dict(group.ways())["self_attn." + type(make(0).self_attn).__name__].startswith(
        "loop" if size > 1 else "vmap"
    )


DRAWING: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda y: functional.dropout(y, 0.4),
    "randn_like": lambda y: y + torch.randn_like(y),
    "normal": lambda y: y + torch.normal(y.detach(), 0.5),
    "poisson": lambda y: y + torch.poisson(y.detach().abs()),
    "exponential_": lambda y: y + torch.empty_like(y).exponential_(),
    "a distribution": lambda y: y * torch.distributions.Bernoulli(y.detach().sigmoid()).sample(),
}


@pytest.mark.parametrize("draw", DRAWING.values(), ids=DRAWING)
def test_functions_that_draw_count_as_dropout(draw: Callable[[Tensor], Tensor]) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(_last(torch.randn(4, 3, 3, 3)))
            self.draw = draw

        def forward(self, x: Tensor) -> Tensor:
            return self.draw(functional.conv2d(x, self.weight))

    with pytest.raises(FuseError, match="parameter 'weight' of module 'Own' is in channels_last order"):
        assert_fused_is_solo(lambda n: Own(), _data())
