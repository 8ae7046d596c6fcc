"""What has no rule, or cannot be traced: `vmap`, a loop over trials, and the gate in both."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.fused_and_solo import (
    RecordingGate,
    Solo,
    ToyStudy,
    assert_fused_is_solo,
    assert_same_trial,
    members,
    same_bits,
)
from tests.support.states import reloaded, states
from tests.support.toy_models import Branching, DataDependent
from trials import TrialGroup
from trials.gate.base import OpenGate, StopRequested


class Scaled(nn.Module):
    """A user's own layer without children, and a plain tensor and a number in it."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.shift = torch.full((6,), 1.0 + n, dtype=torch.float64)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.number = 0.5

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return x @ self.weight * self.number + self.shift


class Untraceable(nn.Module):
    """Everything that has state, in a forward that looks at shapes and at data."""

    def __init__(self, n: int, to_number: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6, momentum=0.1 + 0.1 * n)
        self.drop = nn.Dropout(0.1 * n)
        self.relu = nn.ReLU(inplace=True)
        self.own = Scaled(n)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.shared = self.layers[0]
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(6))
        self.to_number = to_number

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            x = self.norm(self.a(x))
        y = self.relu(x)
        for layer in self.layers:
            y = self.drop(layer(y)) + x
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        if self.to_number and y.sum().item() > 0:
            y = y * 2
        return self.own(self.b(y) + self.shared(y)) + self.b.bias * self.mean


LAYERS: dict[str, tuple[Callable[[int], nn.Module], Sequence[int], str]] = {
    "looks at data": (lambda n: nn.Sequential(nn.Linear(6, 6), DataDependent()), (3, 6), "loop over trials: .*item"),
    "LSTM cell": (lambda n: Cell(), (3, 4), "vmap|loop"),
    "its own module": (lambda n: nn.Sequential(nn.Linear(6, 6), Scaled(n)), (3, 6), "rule FusedLinear"),
    "weight of a norm": (
        lambda n: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh()),
        (3, 4),
        "vmap: .*ParametrizedLinear",
    ),
    "critic of two inputs": (lambda n: Critic(), (3, 4), "loop over trials"),
}


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.cell(x)
        return self.cell(x, (h, c))[0]


class Critic(nn.Module):
    """As of a GAN. The power iteration of its only layer fails under `vmap`, and changes buffers in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) - self.layer(x.flip(0) * 2)
        return output


@pytest.mark.parametrize("name", LAYERS)
def test_layer_without_a_rule(name: str) -> None:
    make, shape, way = LAYERS[name]
    group = assert_fused_is_solo(make, [torch.randn(shape), torch.randn(shape)])
    assert any(re.search(way, how) for _, how in group.ways())


@pytest.mark.parametrize("to_number", [False, True])
def test_untraceable_forward(to_number: bool) -> None:
    inputs = [torch.randn(5, 6), torch.randn(7, 6)]
    group = assert_fused_is_solo(lambda n: Untraceable(n, to_number), inputs, steps=5)
    ways = dict(group.ways())
    if to_number:
        assert all("loop over trials: UnlikeError: the code asks for values ('item')" in how for how in ways.values())
    else:
        assert ways["Untraceable as a whole"].startswith("vmap: model Untraceable cannot be traced: TraceError")
        assert ways["a.Linear"] == "rule FusedLinear" and ways["norm.BatchNorm1d"] == "rule FusedBatchNorm"
        assert ways["own.Scaled"].startswith("vmap: module 'own'")


class Attending(nn.Module):
    """Layers that take several inputs, by position and by name, in a forward that looks at a shape."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.a, self.both = nn.Linear(6, 6), nn.Bilinear(6, 6, 6)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.1 * n, batch_first=True)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.1 * n, batch_first=True), 2)
        self.register_buffer("mask", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) if len(x) > 1 else x
        z, weights = self.attention(x, value=y, key=y, attn_mask=self.mask, need_weights=len(x) > 3)
        causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=x.dtype)
        y = self.encoder(self.both(z, y), mask=causal, is_causal=True)
        return y if weights is None else y + weights.sum()


@pytest.mark.parametrize("batch", [2, 5])
def test_layers_of_several_inputs_in_an_untraceable_forward(batch: int) -> None:
    group = assert_fused_is_solo(Attending, [torch.randn(batch, 4, 6)], "sgd", steps=5)
    whole, *layers = group.ways()
    assert whole[1].startswith("vmap: model Attending cannot be traced")
    assert {"attention.MultiheadAttention", "both.Bilinear"} < dict(layers).keys() and len(layers) == 19
    assert all(how.startswith("rule Fused") for _, how in layers)


def looking(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), DataDependent(), nn.Dropout(0.2 * n), nn.Linear(4, 2))


WAYS: dict[str, Callable[[int], nn.Module]] = {
    "vmap of a layer": lambda n: nn.Sequential(
        nn.Linear(6, 6),
        nn.Dropout(0.1 * n),
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)),
        nn.Unflatten(1, (2, 2)),
    ),
    "loop over a layer": looking,
    "vmap of the whole": lambda n: Untraceable(n, False),
    "loop over the whole": lambda n: Untraceable(n, True),
}


def study_of(name: str) -> ToyStudy:
    stream = torch.Generator().manual_seed(3)
    data = [(torch.randn(size, 6, dtype=torch.float64, generator=stream), torch.zeros(size)) for size in (5, 7, 4)]
    return ToyStudy(lambda n: WAYS[name](n).double(), "adamw", data)


def train(group: TrialGroup, study: ToyStudy, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        group.train_step(*study.data[step % len(study.data)])


@pytest.mark.parametrize("name", WAYS)
def test_trials_leave_join_and_come_back(name: str) -> None:
    study = study_of(name)
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    train(group, study, 2)
    group.keep([2, 0])
    group.add(members(study, [4]))
    train(group, study, 1)
    other = reloaded(group)
    for each in (group, other):
        train(each, study, 2, start=1)
    assert same_bits(states(other), states(group))
    for row, (number, early) in enumerate([(2, 2), (0, 2), (4, 0)]):
        solo = Solo(study, number)
        for step in (*range(early), 0, 1, 2):
            solo.step(*study.data[step])
        assert_same_trial(group, row, solo)


class Disturbing(RecordingGate):
    """Does in each pause what a process may do meanwhile."""

    def enter(self, unit: int) -> None:
        super().enter(unit)
        torch.rand(3)
        torch.empty(1000).fill_(float("nan"))


@pytest.mark.parametrize("name", WAYS)
def test_pauses_change_no_bit(name: str) -> None:
    study = study_of(name)
    plain = TrialGroup(study, members(study, range(3)), OpenGate())
    paused = TrialGroup(study, members(study, range(3)), Disturbing())
    for group in (plain, paused):
        train(group, study, 3)
    assert same_bits(states(plain), states(paused))
    assert same_bits(plain.evaluate(), paused.evaluate())


def entered(make: Callable[[int], nn.Module], x: Tensor, size: int = 2) -> list[str]:
    """What a second step asks for, without the optimizer's step and rest."""
    gate = RecordingGate()
    study = ToyStudy(make)
    group = TrialGroup(study, members(study, range(size)), gate)
    group.train_step(x, torch.zeros(len(x)))
    gate.entered.clear()
    group.train_step(x, torch.zeros(len(x)))
    return [name for name in gate.entered if name.endswith(("ward", "loss"))]


def test_gate_is_asked_layer_by_layer() -> None:
    layers = ["a.Linear", "c.Tanh", "b.Linear"]
    forward = ["Branching forward", *[f"{name} forward" for name in layers]]
    backward = ["Branching backward", *[f"{name} backward" for name in reversed(layers)]]
    x = torch.randn(4, 3)
    assert entered(lambda n: Branching(False), x) == [*forward, "loss", "loss backward", *backward]
    assert entered(lambda n: Branching(True), x) == [*forward * 2, "loss", "loss backward", *backward * 2]
    looked = [
        "0.DataDependent forward",
        "0.DataDependent forward",
        "1.Linear forward",
        "loss",
        "loss backward",
        "1.Linear backward",
    ]
    units = entered(lambda n: nn.Sequential(DataDependent(), nn.Linear(4, 2)), torch.randn(3, 6))
    assert units == [*looked, "0.DataDependent backward", "0.DataDependent backward"]


@pytest.mark.parametrize("to_number", [False, True])
@pytest.mark.parametrize("unit", ["a.Linear forward", "b.Linear backward"])
def test_stop_goes_through(unit: str, to_number: bool) -> None:
    class Stopping(RecordingGate):
        def enter(self, number: int) -> None:
            super().enter(number)
            if self.entered[-1] == unit:
                raise StopRequested

    study = ToyStudy(lambda n: Branching(to_number))
    before = torch.get_rng_state()
    group = TrialGroup(study, members(study, range(2)), Stopping())
    with pytest.raises(StopRequested):
        group.train_step(torch.randn(4, 3, generator=torch.Generator()), torch.zeros(4))
    assert torch.equal(before, torch.get_rng_state())


def test_neighbours_with_other_rates_in_code_that_reads_them() -> None:
    class Reads(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.a, self.drop = nn.Linear(6, 6), nn.Dropout(0.1 * n)

        def forward(self, x: Tensor) -> Tensor:
            y = self.drop(self.a(x)) if len(x) else x
            return y * (1 + self.drop.p)

    group = assert_fused_is_solo(lambda n: Reads(n), [torch.randn(4, 6)])
    assert all("no attribute 'p'" in how for _, how in group.ways())


def test_outputs_that_are_no_tensors() -> None:
    class Several(ToyStudy):
        def loss(self, outputs: Any, targets: Tensor) -> Tensor:
            assert outputs["name"] == "x" and outputs["none"] is None
            return outputs["y"][0].square().mean() + outputs["y"][1].sum()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.a(x)
            return {"y": (y, y.sum(1)), "name": "x", "none": None, "cache": object()}

    study = Several(lambda n: Model())
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    solo = Solo(study, 1)
    x, y = torch.randn(4, 3), torch.zeros(4)
    group.train_step(x, y)
    solo.step(x, y)
    torch.testing.assert_close(group.losses_K()[1].item(), solo.loss)


@pytest.mark.parametrize("inplace", [False, True])
def test_functions_with_a_rule_in_an_untraceable_forward(inplace: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x if len(x) > 1 else -x).chunk(3, -1)
            rate = 0.2 if self.training else 0.0
            y = functional.scaled_dot_product_attention(q, k, v, dropout_p=rate)
            y = y + functional.scaled_dot_product_attention(q, x, x, is_causal=True)
            return self.out(functional.dropout(y, 0.3, self.training, inplace)) + y

    group = assert_fused_is_solo(lambda n: Model(), [torch.randn(3, 5, 4)], "sgd", steps=5)
    assert dict(group.ways())["Model as a whole"].startswith("loop over trials" if inplace else "vmap: model Model")
