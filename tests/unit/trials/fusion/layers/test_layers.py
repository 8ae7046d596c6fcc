"""Every fusion rule gives what the layer gives alone: as the first layer, on a shared input, and behind another."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.fused_and_solo import OPTIMIZERS, Solo, ToyStudy, assert_fused_is_solo, members
from tests.support.layer_cases import (
    IMAGES,
    KINDS,
    LAYERS,
    OF_EACH_KIND,
    SIGNALS,
    USUAL,
    VECTORS,
    WITH_WEIGHTS,
    batches,
    before,
    fresh,
)
from tests.support.slow_cases import crossed, others_slow
from trials import TrialGroup
from trials.fusion.graph.steps import CallStep
from trials.fusion.layers import linear
from trials.fusion.registry import FORWARDS, RULES
from trials.gate.base import OpenGate

pytestmark = [
    pytest.mark.usefixtures("only_rules"),
    pytest.mark.filterwarnings("ignore:Implicit dimension choice", "ignore:dropout2d. Received a 3D input"),
]

STEPS = 2
SAMPLE = (
    *("linear", "linear on signals", "prelu per channel", "layer norm", "rms norm", "group norm", "dropout 2d"),
    *("Conv1d {}", "Conv2d {}", "Conv3d {}", "ConvTranspose2d {}", "BatchNorm 2d norm, ", "alpha dropout"),
    "InstanceNorm 2d norm, affine, statistics",
)


@pytest.mark.parametrize("name", others_slow(LAYERS, USUAL))
def test_layer_behind_another(name: str) -> None:
    shape, make = LAYERS[name]
    assert_fused_is_solo(lambda n: nn.Sequential(before(name), fresh(make(n))), batches(*shape), steps=STEPS)


# every kind with weights, and every second of the many without, whose rules are alike
SHARED = [name for at, name in enumerate(KINDS.values()) if name in WITH_WEIGHTS or at % 2]


@pytest.mark.parametrize("name", others_slow(LAYERS, SHARED))
def test_layer_on_the_shared_input(name: str) -> None:
    shape, make = LAYERS[name]
    with torch.no_grad():
        width = make(0).eval()(batches(*shape)[0]).shape[-1]
    assert_fused_is_solo(lambda n: nn.Sequential(fresh(make(n)), nn.Linear(width, 3)), batches(*shape), steps=STEPS)


LINEAR = [name for name in LAYERS if name.startswith("linear")]


@pytest.mark.parametrize("frozen", ["", "weight", "bias"])
@pytest.mark.parametrize("name", LINEAR)
def test_product_with_a_derivative_of_our_own(name: str, frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, make = LAYERS[name]

    def layer(n: int) -> nn.Module:
        made = make(n)
        for own, parameter in made.named_parameters():
            parameter.requires_grad_(own != frozen)
        return made

    monkeypatch.setattr(linear, "_FEW_WEIGHTS", 0)
    assert_fused_is_solo(lambda n: nn.Sequential(before(name), layer(n)), batches(*shape), steps=STEPS)


@pytest.mark.parametrize(("name", "optimizer"), crossed(SAMPLE, OPTIMIZERS, "adam"))
def test_layer_with_each_optimizer(name: str, optimizer: str) -> None:
    shape, make = LAYERS[name]
    assert_fused_is_solo(lambda n: nn.Sequential(before(name), fresh(make(n))), batches(*shape), optimizer)


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_single_precision(name: str) -> None:
    shape, make = LAYERS[name]
    data = [(x, torch.zeros(len(x))) for x in batches(*shape)]
    # behind a norm some gradients cancel: AdamW would make steps of what rounding leaves of them
    optimizer = "sgd" if "norm" in name else "adamw"
    study = ToyStudy(lambda n: nn.Sequential(before(name), fresh(make(n))), optimizer, data)
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    solos = [Solo(study, number) for number in range(2)]
    for step in range(STEPS):
        group.train_step(*data[step % 2])
        for solo in solos:
            solo.step(*data[step % 2])
    for row, solo in enumerate(solos):
        fused = group.extract(row)[0]
        for key, value in solo.model.state_dict().items():
            error = (fused[key] - value).abs().max()
            assert error <= 1e-4 * value.abs().max(), f"trial {row}: {key} is off by {error:.1e}"


LEFT = {
    "made of others, or empty, and traced through": "Container Module ModuleDict ModuleList ParameterDict "
    "ParameterList Sequential",
    "one step in time, of which users write loops: `vmap` does": "GRUCell LSTMCell RNNBase RNNCell RNNCellBase",
    "become another layer at their first input, before which they have no tensors": "LazyBatchNorm1d LazyBatchNorm2d "
    "LazyBatchNorm3d LazyConv1d LazyConv2d LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d "
    "LazyInstanceNorm1d LazyInstanceNorm2d LazyInstanceNorm3d LazyLinear",
    "talk to other processes or devices": "DataParallel SyncBatchNorm",
    "losses, which a study computes per trial outside the model": "AdaptiveLogSoftmaxWithLoss BCELoss "
    "BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss CrossEntropyLoss GaussianNLLLoss HingeEmbeddingLoss HuberLoss "
    "KLDivLoss L1Loss LinearCrossEntropyLoss MSELoss MarginRankingLoss MultiLabelMarginLoss MultiLabelSoftMarginLoss "
    "MultiMarginLoss NLLLoss NLLLoss2d PoissonNLLLoss SmoothL1Loss SoftMarginLoss TripletMarginLoss "
    "TripletMarginWithDistanceLoss",
    "rare: `LocalResponseNorm` replaced it": "CrossMapLRN2d",
    "rare: bags of different sizes": "EmbeddingBag",
}
"""Layers of `torch.nn` without a rule, by the reason."""


def test_every_layer_of_torch_has_a_rule_or_a_reason() -> None:
    left = {name for names in LEFT.values() for name in names.split()}
    public = {name: kind for name, kind in vars(nn).items() if isinstance(kind, type) and issubclass(kind, nn.Module)}
    ruled = {name for name, kind in public.items() if kind in RULES or kind in FORWARDS}
    assert not ruled & left
    assert set(public) - ruled <= left


def test_every_rule_is_tested() -> None:
    elsewhere = {
        *(nn.Embedding, nn.Bilinear, nn.CosineSimilarity, nn.PairwiseDistance, nn.MultiheadAttention),
        *(nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d),
        *(nn.RNN, nn.LSTM, nn.GRU),
    }
    ours = {kind for kind in RULES if kind.__module__.startswith("torch.")}
    assert ours == {type(make(0)) for _, make in LAYERS.values()} | elsewhere


@pytest.mark.parametrize("name", SAMPLE)
def test_one_trial(name: str) -> None:
    shape, make = LAYERS[name]
    assert_fused_is_solo(
        lambda n: nn.Sequential(before(name), fresh(make(n + 1))), batches(*shape), steps=STEPS, size=1
    )


@pytest.mark.parametrize("size", [1, 5])
def test_model_that_is_one_layer(size: int) -> None:
    assert_fused_is_solo(lambda n: nn.Linear(6, 5), batches(*VECTORS), size=size)


class Pair(nn.Module):
    """Calls a layer with two inputs, each of which may be shared by the trials or a trial's own."""

    def __init__(self, layer: nn.Module, own: tuple[bool, bool], width: int) -> None:
        super().__init__()
        self.a, self.b, self.layer = nn.Linear(width, width), nn.Linear(width, width), layer
        self.own, self.last = own, nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        left = self.a(x) if self.own[0] else x
        right = self.b(x) if self.own[1] else x + 0.5
        return self.last(self.layer(left, right).unsqueeze(-1))


PAIRS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "bilinear": (VECTORS, lambda: nn.Bilinear(6, 6, 4)),
    "bilinear without bias": (SIGNALS, lambda: nn.Bilinear(8, 8, 3, bias=False)),
    "cosine": (VECTORS, lambda: nn.CosineSimilarity()),
    "cosine along the last axis": (SIGNALS, lambda: nn.CosineSimilarity(dim=-1, eps=0.1)),
    "distance": (VECTORS, lambda: nn.PairwiseDistance()),
    "distance with its axis": (SIGNALS, lambda: nn.PairwiseDistance(3.0, keepdim=True)),
}


@pytest.mark.parametrize(
    "own",
    [pytest.param(each, marks=() if each[1] else pytest.mark.slow) for each in product([True, False], repeat=2)],
)
@pytest.mark.parametrize("name", PAIRS)
def test_layer_of_two_inputs(name: str, own: tuple[bool, bool]) -> None:
    shape, make = PAIRS[name]
    assert_fused_is_solo(lambda n: Pair(make(), own, shape[-1]), batches(*shape), "adamw", STEPS)


@pytest.mark.parametrize("wide", [False, True])
def test_two_inputs_that_broadcast(wide: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.near = nn.Linear(8, 8), nn.CosineSimilarity(dim=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.near(self.a(x), x[:, :1]) if wide else self.near(x, self.a(x)[:1])

    assert_fused_is_solo(lambda n: Model(), batches(*SIGNALS), "adamw", STEPS)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_pooling_with_indices_and_back(axes: int, batched: bool, first: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.pool = getattr(nn, f"MaxPool{axes}d")(2, return_indices=True)
            self.back = getattr(nn, f"MaxUnpool{axes}d")(2)

        def forward(self, x: Tensor) -> Tensor:
            x = x if first else self.a(x)
            y, indices = self.pool(x)
            return self.b(self.back(y, indices) + self.back(y.tanh(), indices, output_size=x.shape[-axes:]))

    shape = (3, 4, *[6] * axes)
    assert_fused_is_solo(lambda n: Model(), batches(*shape[not batched :]), "adamw", STEPS)


FUNCTIONS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "max pool": (IMAGES, lambda x: functional.max_pool2d(x, 2)),
    "max pool by name": (SIGNALS, lambda x: functional.max_pool1d(input=x, kernel_size=3, stride=1, padding=1)),
    "max pool with indices": (IMAGES, lambda x: functional.max_pool2d(x, 2, return_indices=True)[0]),
    "max pool of one example": (IMAGES[1:], lambda x: functional.max_pool2d(x, kernel_size=2)),
    "mean pool": (IMAGES, lambda x: functional.avg_pool2d(x, 2, stride=1)),
    "power pool": (SIGNALS, lambda x: functional.lp_pool1d(x, 2, 2)),
    "adaptive mean pool": (IMAGES, lambda x: functional.adaptive_avg_pool2d(x, (3, 1))),
    "adaptive max pool": (SIGNALS, lambda x: functional.adaptive_max_pool1d(x, 3)),
    "interpolation": (IMAGES, lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear")),
}  # fmt: skip


@pytest.mark.parametrize(("name", "shared"), crossed(FUNCTIONS, [True, False], False))
def test_functions_on_examples_need_no_vmap(name: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, call = FUNCTIONS[name]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.scale = nn.Linear(shape[-1], shape[-1]), nn.Linear(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale(call(x if shared else self.a(x)).unsqueeze(-1))

    monkeypatch.delattr(CallStep, "_vmapped")
    monkeypatch.setattr(ToyStudy, "loss", lambda self, y, targets: y.square().mean())
    assert_fused_is_solo(lambda n: Model(), batches(*shape), steps=STEPS)


def embed(
    padding: int | None = None, tokens: list[Tensor] | None = None, optimizer: str = "sgd", **options: object
) -> None:
    def make(n: int) -> nn.Module:
        table = nn.Embedding(9, 3, padding_idx=padding, **options)  # type: ignore[arg-type]
        return nn.Sequential(table, nn.Linear(3, 2))

    tokens = tokens or [torch.tensor([[0, 1, 2, 8], [3, 8, 0, 4]]), torch.tensor([[5, 5, 5, 0], [1, 1, 8, 8]])]
    assert_fused_is_solo(make, tokens, optimizer, STEPS)


@pytest.mark.parametrize("padding", [None, 0, -1])
@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_embedding(padding: int | None, by_frequency: bool, max_norm: float | None) -> None:
    embed(padding, scale_grad_by_freq=by_frequency, max_norm=max_norm, norm_type=1.5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_embedding_with_each_optimizer(optimizer: str) -> None:
    embed(2, None, optimizer)


def test_embedding_of_indices_that_differ_between_trials() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(6, 9)
            self.table = nn.Embedding(9, 3, padding_idx=2, max_norm=1.2)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(self.score(x).argmax(-1))

    assert_fused_is_solo(lambda n: Model(), batches(*VECTORS), steps=STEPS)


@pytest.mark.parametrize("wrong", [-1, 9])
def test_embedding_does_not_read_a_neighbours_rows(wrong: int) -> None:
    with pytest.raises(IndexError):
        assert_fused_is_solo(lambda n: nn.Embedding(9, 3), [torch.tensor([[0, wrong]])])


def test_images_of_a_size_without_channels() -> None:
    with pytest.raises(Exception, match="allowed: 2 axes and channels"):
        assert_fused_is_solo(lambda n: nn.Sequential(nn.Linear(6, 6), nn.InstanceNorm2d(4)), batches(*IMAGES[2:]))
