"""Every rule on frozen weights that all trials have in common gives what each trial alone gives."""

from itertools import product

import pytest
import torch
from torch import nn

from tests.support.common_bits import frozen, held, trained
from tests.support.fused_and_solo import OPTIMIZERS, ToyStudy, assert_fused_is_solo, members
from tests.support.layer_cases import (
    IMAGES,
    KINDS,
    LAYERS,
    SIGNALS,
    USUAL,
    VECTORS,
    WITH_WEIGHTS,
    batches,
    before,
    fresh,
)
from tests.support.slow_cases import others_slow
from trials import TrialGroup
from trials.fusion.layers import linear
from trials.gate.base import OpenGate

pytestmark = [
    pytest.mark.usefixtures("only_rules"),
    pytest.mark.filterwarnings("ignore:Implicit dimension choice", "ignore:dropout2d. Received a 3D input"),
]

PRODUCTS_AND_NORMS = [name for name in WITH_WEIGHTS if "{}" in name or "norm" in name or "linear" in name]
PARTS = {"all": lambda name: True, "weights": lambda name: "weight" in name, "biases": lambda name: "bias" in name}


def adamw(n: int, ps: object) -> torch.optim.Optimizer:
    return OPTIMIZERS["adamw"](n, trained(ps))  # type: ignore[arg-type]


def layer(name: str, n: int, part: str) -> nn.Module:
    """The layer of case `name`, with the settings of trial n."""
    return frozen(lambda: fresh(LAYERS[name][1](n)), PARTS[part])


@pytest.mark.parametrize(
    ("name", "part"),
    others_slow(
        [case for case in product(WITH_WEIGHTS, PARTS) if case[1] == "all" or "{}" in case[0]],
        [(name, "all") for name in USUAL if name in WITH_WEIGHTS]
        + [(name, part) for name in KINDS.values() if "{}" in name for part in PARTS],
    ),
)
def test_behind_a_layer_that_differs(name: str, part: str) -> None:
    group = assert_fused_is_solo(
        lambda n: nn.Sequential(before(name), layer(name, n, part)), batches(*LAYERS[name][0]), adamw, steps=2
    )
    assert held(group) == {f"1.{own}" for own, _ in layer(name, 0, part).named_parameters() if PARTS[part](own)}


@pytest.mark.parametrize("name", others_slow(WITH_WEIGHTS, [n for n in WITH_WEIGHTS if n in KINDS.values()]))
def test_on_the_shared_input(name: str, part: str = "all") -> None:
    shape, make = LAYERS[name]
    with torch.no_grad():
        width = make(0).eval()(batches(*shape)[0]).shape[-1]
    assert_fused_is_solo(lambda n: nn.Sequential(layer(name, n, part), nn.Linear(width, 3)), batches(*shape), adamw)


@pytest.mark.parametrize("bias", ["none", "common", "own"])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("shape", [VECTORS, SIGNALS])
def test_long_products_ask_between_their_parts(
    shape: tuple[int, ...], own: bool, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_PART_OF_ONE", 40)
    monkeypatch.setattr(linear, "_FEW_ROWS", 2)
    width = shape[-1]

    def make(n: int) -> nn.Module:
        base = frozen(lambda: nn.Linear(width, 5, bias=bias != "none"), lambda name: name == "weight" or bias != "own")
        return nn.Sequential(nn.Linear(width, width) if own else nn.Identity(), base, nn.Linear(5, 2))

    assert_fused_is_solo(make, batches(*shape), adamw)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("padding", [None, 0])
def test_embedding(padding: int | None, own: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.last = nn.Linear(6, 9), nn.Linear(3, 2)
            self.table = frozen(lambda: nn.Embedding(9, 3, padding_idx=padding))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            index = self.score(x).argmax(-1) if own else (x > 0).long().sum(-1)
            y: torch.Tensor = self.last(self.table(index))
            return y

    group = assert_fused_is_solo(lambda n: Model(), batches(*VECTORS), adamw)
    assert held(group) == {"table.weight"}


def test_embedding_that_shortens_its_rows_is_not_held_once() -> None:
    tokens = [torch.tensor([[0, 1, 2, 8], [3, 8, 0, 4]])]

    def make(n: int) -> nn.Module:
        return nn.Sequential(frozen(lambda: nn.Embedding(9, 3, max_norm=0.5)), nn.Linear(3, 2))

    assert not held(assert_fused_is_solo(make, tokens, adamw))


@pytest.mark.parametrize("options", [{}, {"kdim": 3, "vdim": 5}, {"add_bias_kv": True}, {"bias": False}])
def test_attention(options: dict[str, int]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
            self.layer = frozen(lambda: nn.MultiheadAttention(8, 2, batch_first=True, **options))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            key = x[..., : options.get("kdim", 8)]
            value = self.a(x)[..., : options.get("vdim", 8)]
            y: torch.Tensor = self.last(self.layer(self.a(x), key, value)[0])
            return y

    assert held(assert_fused_is_solo(lambda n: Model(), batches(*SIGNALS), adamw))


@pytest.mark.parametrize(
    ("kind", "part"),
    others_slow(
        product((nn.RNN, nn.LSTM, nn.GRU), PARTS),
        [(nn.RNN, "all"), (nn.LSTM, "all"), (nn.LSTM, "weights"), (nn.GRU, "biases")],
    ),
)
def test_recurrent(kind: type[nn.Module], part: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.last = nn.Linear(8, 8), nn.Linear(10, 2)
            self.layer = frozen(lambda: kind(8, 5, num_layers=2, bidirectional=True, batch_first=True), PARTS[part])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.last(self.layer(self.a(x))[0])
            return y

    assert held(assert_fused_is_solo(lambda n: Model(), batches(*SIGNALS), adamw))


def test_bilinear() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.last = nn.Linear(8, 8), nn.Linear(3, 2)
            self.layer = frozen(lambda: nn.Bilinear(8, 8, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.last(self.layer(self.a(x), x))
            return y

    assert held(assert_fused_is_solo(lambda n: Model(), batches(*SIGNALS), adamw))


def test_statistics_of_a_frozen_batch_norm_stay_each_trials_own() -> None:
    def make(n: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 1), frozen(lambda: nn.BatchNorm2d(4)), nn.Conv2d(4, 2, 1))

    group = assert_fused_is_solo(make, batches(*IMAGES), adamw)
    assert held(group) == {"1.weight", "1.bias"}
    mean_KC = group._fused.rows.buffers["1.running_mean"]
    assert not torch.equal(mean_KC[0], mean_KC[1])


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "name",
    others_slow(PRODUCTS_AND_NORMS, [name for name in PRODUCTS_AND_NORMS if name in KINDS.values()]),
)
def test_types_under_autocast(name: str, part: str) -> None:
    shape = LAYERS[name][0]
    x = batches(*shape)[0]
    models = [nn.Sequential(before(name), layer(name, n, part)) for n in range(2)]
    study = ToyStudy(lambda n: models[n], adamw)
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        fused_K = group._fused.train.run(x, torch.device("cpu"))
        for fused, model in zip(fused_K, models, strict=True):
            alone = model.train()(x)
            assert fused.dtype == alone.dtype
            torch.testing.assert_close(fused, alone, rtol=0.1, atol=0.1)
