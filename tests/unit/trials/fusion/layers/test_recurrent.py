"""RNN, LSTM and GRU of K trials give what they give alone: every option, both ways, and packed sequences."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.support.fused_and_solo import OPTIMIZERS, RecordingGate, Solo, ToyStudy, assert_fused_is_solo, members
from tests.support.layer_cases import batches
from tests.support.slow_cases import others_slow
from trials import TrialGroup
from trials.fusion.autotune import pinned
from trials.gate.base import OpenGate

STEPS = 3
WAYS = ("at once", "looped")
KINDS: dict[str, Callable[..., nn.Module]] = {
    "RNN": nn.RNN,
    "RNN, ReLU": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
    "two layers": {"num_layers": 2, "batch_first": True},
    "three layers, dropout": {"num_layers": 3, "dropout": 0.3},
    "both directions": {"bidirectional": True},
    "all": {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False, "dropout": 0.4},
}
CASES = [(kind, name, True) for kind in KINDS for name in OPTIONS] + [(kind, "all", False) for kind in KINDS]


class Uses(nn.Module):
    """All that a recurrent layer gives, weighted by what it is."""

    def __init__(self, layer: Any, before: bool, states: str = "", own_states: bool = False) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4) if before else nn.Identity()
        self.layer, self.states, self.own_states = layer, states, own_states
        count = layer.num_layers * (1 + layer.bidirectional)
        widths = (layer.proj_size or layer.hidden_size, layer.hidden_size)
        self.first = nn.ParameterList(nn.Parameter(torch.randn(count, 1, width)) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if not self.states:
            y, last = self.layer(x)
        else:
            batch = x.shape[0 if self.layer.batch_first else 1]
            first = [
                s.expand(-1, batch, -1) if self.states == "own" else s.detach().expand(-1, batch, -1) * 0 + 0.3
                for s in self.first
            ]
            if self.states == "mixed":
                first[1] = torch.full((first[1].shape[0], batch, first[1].shape[2]), 0.2, dtype=x.dtype)
            y, last = self.layer(x, tuple(first) if isinstance(self.layer, nn.LSTM) else first[0])
        ends = (last[0], last[1]) if isinstance(self.layer, nn.LSTM) else (last,)
        return (
            y.flatten(1).tanh() if self.own_states else y.flatten(1).sin().mean(1) + sum(e.sin().mean() for e in ends)
        )


@pytest.mark.usefixtures("only_rules")
@pytest.mark.parametrize(
    ("kind", "name", "before", "way"),
    others_slow(
        [(*case, way) for case in CASES for way in WAYS],
        [([*KINDS][i % 4], name, True, WAYS[i // 2 % 2]) for i, name in enumerate(OPTIONS)]
        + [([*KINDS][1], "all", False, WAYS[0])],
    ),
)
def test_recurrent_layer(kind: str, name: str, before: bool, way: str) -> None:
    with pinned(way):
        assert_fused_is_solo(lambda n: Uses(KINDS[kind](4, 3, **OPTIONS[name]), before), batches(5, 6, 4), steps=STEPS)


@pytest.mark.usefixtures("only_rules")
@pytest.mark.parametrize("way", others_slow(WAYS, ["at once"]))
@pytest.mark.parametrize("name", ["", "no bias", "three layers, dropout", "both directions", "all"])
def test_projection(name: str, way: str) -> None:
    with pinned(way):
        assert_fused_is_solo(
            lambda n: Uses(nn.LSTM(4, 5, proj_size=2, **OPTIONS[name]), True), batches(5, 6, 4), steps=STEPS
        )


@pytest.mark.usefixtures("only_rules")
@pytest.mark.parametrize(
    ("kind", "states", "way"),
    others_slow(
        product(KINDS, ["own", "mixed"], WAYS),
        [(kind, ["own", "mixed"][i % 2], WAYS[i // 2]) for i, kind in enumerate(KINDS)],
    ),
)
def test_first_states(kind: str, states: str, way: str) -> None:
    options = {"num_layers": 2, "bidirectional": True, "batch_first": True}
    with pinned(way):
        assert_fused_is_solo(
            lambda n: Uses(KINDS[kind](4, 3, **options), True, states), batches(5, 6, 4), "sgd", steps=STEPS
        )


class OneSequence(nn.Module):
    """Without a batch."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.first = layer, nn.Parameter(torch.randn(2, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.layer(x)
        state = self.first[:, 0].tanh()
        z, _ = self.layer(y[:, :4].sin(), (state, state) if isinstance(self.layer, nn.LSTM) else state)
        return y.sin() + z.sin() + (last[0] if isinstance(self.layer, nn.LSTM) else last).mean()


@pytest.mark.usefixtures("only_rules")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence(kind: str, way: str) -> None:
    with pinned(way):
        assert_fused_is_solo(
            lambda n: OneSequence(KINDS[kind](4, 3, bidirectional=True)), batches(6, 4), "sgd", steps=STEPS
        )


@pytest.mark.usefixtures("only_rules")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_own_rates_of_dropout_and_each_optimizer(optimizer: str, way: str) -> None:
    def make(n: int) -> nn.Module:
        return nn.Sequential(Uses(nn.LSTM(4, 3, 2, dropout=0.3 * n), True, "own", True), nn.Dropout(0.2))

    with pinned(way):
        assert_fused_is_solo(make, batches(5, 6, 4), optimizer, STEPS)


@pytest.mark.parametrize("way", others_slow(WAYS, ["looped"]))
@pytest.mark.parametrize("kind", KINDS)
def test_single_precision(kind: str, way: str) -> None:
    data = [(x, torch.zeros(5)) for x in batches(5, 6, 4)]
    study = ToyStudy(lambda n: Uses(KINDS[kind](4, 3, 2, batch_first=True), True), "adamw", data)
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solos = [Solo(study, number) for number in range(3)]
    with pinned(way):
        for step in range(STEPS):
            group.train_step(*data[step % 2])
            for solo in solos:
                solo.step(*data[step % 2])
    for row, solo in enumerate(solos):
        fused = group.extract(row)[0]
        for key, value in solo.model.state_dict().items():
            error = (fused[key] - value).abs().max()
            assert error <= 1e-4 * value.abs().max(), f"trial {row}: {key} is off by {error:.1e}"


class Packed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([3, 6, 2, 5, 1])
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = self.layer(packed)
        return pad_packed_sequence(y, batch_first=True)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_left_to_the_loop(kind: str) -> None:
    group = assert_fused_is_solo(lambda n: Packed(KINDS[kind](4, 3)), batches(5, 6, 4), steps=STEPS)
    assert all(how.startswith("loop over trials") for _, how in group.ways())


def test_in_a_forward_that_cannot_be_traced() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 3, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x if len(x) > 1 else -x)[1][0]

    group = assert_fused_is_solo(lambda n: Branching(), batches(5, 6, 4), steps=STEPS)
    assert dict(group.ways())["layer.LSTM"] == "rule FusedRecurrent"


def test_gate_is_asked_before_the_backward_whichever_output_is_used() -> None:
    class Last(nn.Module):
        def __init__(self, part: int) -> None:
            super().__init__()
            self.layer, self.out, self.part = nn.LSTM(4, 3), nn.Linear(3, 2), part

        def forward(self, x: Tensor) -> Tensor:
            y, states = self.layer(x)
            return self.out((y, states[0], states[1])[self.part].sin())

    for part in range(3):
        gate = RecordingGate()
        study = ToyStudy(lambda n, part=part: Last(part))
        group = TrialGroup(study, members(study, range(2)), gate)
        group.train_step(torch.randn(6, 5, 4), torch.zeros(6))
        units = [name for name in gate.entered if "backward" in name]
        assert list(dict.fromkeys(units)) == ["loss backward", "out.Linear backward", "layer.LSTM backward"]


@pytest.mark.parametrize("shape", [(4,), (1, 2, 3, 4)])
def test_input_of_other_axes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="Expected input to be 2D or 3D"):
        assert_fused_is_solo(lambda n: Uses(nn.GRU(4, 3), False), batches(*shape))
