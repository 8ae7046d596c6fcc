"""Layers that draw random numbers: each trial from its own stream, with its own rates, whatever its neighbours do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.fused_and_solo import ToyStudy, assert_fused_is_solo, members
from tests.support.layer_cases import IMAGES, VECTORS, VOLUMES, batches
from tests.support.slow_cases import crossed
from trials import TrialGroup
from trials.fusion.layers import dropout
from trials.fusion.layers.dropout import Masks
from trials.gate.base import OpenGate

pytestmark = pytest.mark.usefixtures("only_rules")


class Ones(nn.Module):
    """Random layers on ones, so that the weights after a step of SGD show the masks."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.weight * x)


def plain_sgd(n: int, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


LARGE: dict[type[nn.Module], tuple[int, ...]] = {
    nn.Dropout: (20_000,),
    nn.AlphaDropout: (20_000,),
    nn.Dropout1d: (200, 100, 2),
    nn.Dropout2d: (200, 100, 2, 1),
    nn.Dropout3d: (200, 100, 1, 2, 1),
    nn.FeatureAlphaDropout: (200, 100, 2),
}


@pytest.mark.parametrize("kind", LARGE, ids=lambda kind: kind.__name__)
def test_rates_are_each_trials_own_and_masks_independent(kind: type[nn.Module]) -> None:
    shape = LARGE[kind]
    ones = torch.ones(1, *[1] * (len(shape) - 1))
    group = assert_fused_is_solo(lambda n: Ones(kind(0.3 * n), shape), [ones], plain_sgd, steps=1)
    changed = torch.stack([group.extract(row)[0]["weight"] != 1 for row in range(3)]).flatten(1)
    rates = changed.double().mean(1)
    assert rates[0] == 1
    assert (rates - torch.tensor([1.0, 0.7, 0.4])).abs().max() < 0.02
    assert (changed[1] & changed[2]).double().mean().sub(0.28).abs() < 0.02  # independent masks: 0.7 · 0.4
    if kind not in (nn.Dropout, nn.AlphaDropout):
        by_channel = changed.view(3, 20_000, 2)
        assert torch.equal(by_channel[..., 0], by_channel[..., 1])
        assert not torch.equal(changed[1, :200], changed[1, 200:400])


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    streams = [torch.Generator().manual_seed(n) for n in range(3)]
    x_K = torch.randn(3, 100_000, generator=torch.Generator().manual_seed(9))
    y_K = Masks([0.1, 0.5, 0.9], streams).alpha_drop(x_K)
    assert y_K.mean(1).abs().max() < 0.02
    assert (y_K.var(1) - 1).abs().max() < 0.03


@pytest.mark.parametrize("compares", [True, False])
def test_masks_are_those_of_a_solo_run(compares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where PyTorch draws in another way than by comparing uniform numbers."""
    if compares and not dropout._bernoulli_compares("cpu"):
        pytest.skip("PyTorch draws with Intel's library here")
    monkeypatch.setattr(dropout, "_bernoulli_compares", lambda device: compares)
    rates = [0.0, 0.3, 1.0, 0.8]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x_K = torch.randn(4, 9, 5).to(dtype)
        streams = [torch.Generator().manual_seed(n) for n in range(4)]
        y_K = Masks(rates, streams).drop(x_K)
        for n, rate in enumerate(rates):
            with torch.random.fork_rng():
                torch.manual_seed(n)
                assert torch.equal(y_K[n], functional.dropout(x_K[n], rate))
                assert torch.equal(streams[n].get_state(), torch.get_rng_state())


def test_masks_do_not_depend_on_neighbours() -> None:
    study = ToyStudy(lambda n: Ones(nn.Dropout(0.1 * (n + 1)), (50,)), plain_sgd)
    step = torch.ones(1, 1), torch.zeros(1)
    alone = TrialGroup(study, members(study, [2]), OpenGate())
    group = TrialGroup(study, members(study, range(4)), OpenGate())
    group.train_step(*step)
    group.keep([3, 2])
    group.train_step(*step)
    group.add(members(study, [0]))
    group.train_step(*step)
    for _ in range(3):
        alone.train_step(*step)
    assert torch.equal(group.extract(1)[0]["weight"], alone.extract(0)[0]["weight"])


def test_a_rate_that_is_no_probability() -> None:
    with pytest.raises(ValueError, match=r"dropout rates \[1.5\]; allowed: from 0 to 1"):
        Masks([1.5], [torch.Generator()])


def pooled(axes: int, **options: Any) -> Callable[[int], nn.Module]:
    kind = getattr(nn, f"FractionalMaxPool{axes}d")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.first, self.pool = nn.Linear(6, 6), kind(2, output_size=4), kind(2, **options)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) if self.training else x[..., :4]
            y = functional.pad(x, (0, 2))
            y = self.a(y)
            if not self.training:  # it draws then too, which a solo run does from another stream
                return y
            y = self.pool(y)
            return y[0] + y[1] if self.pool.return_indices else y

    return lambda n: Model()


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("indices", [True, False])
def test_fractional_pooling(axes: int, batched: bool, indices: bool) -> None:
    shape = (3, 2, *[6] * axes)[not batched :]
    options: dict[str, Any] = {"output_ratio": 0.5} if indices else {"output_size": (2,) * axes}
    assert_fused_is_solo(pooled(axes, return_indices=indices, **options), batches(*shape), steps=5)


def test_fractional_pooling_at_given_places() -> None:
    def make(n: int) -> nn.Module:
        samples = torch.rand(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        return nn.Sequential(nn.Conv2d(4, 4, 1), nn.FractionalMaxPool2d(2, output_size=3, _random_samples=samples))

    assert_fused_is_solo(make, batches(*IMAGES), steps=5)


FUNCTIONS: dict[str, tuple[tuple[int, ...], Callable[[Tensor, bool], Tensor]]] = {
    "dropout": (VECTORS, lambda x, training: functional.dropout(x, 0.3, training)),
    "dropout by default": (VECTORS, lambda x, training: functional.dropout(x) if training else x),
    "dropout by name": (VECTORS, lambda x, training: functional.dropout(input=x, training=training, p=0.6)),
    "dropout of other axes": (IMAGES, lambda x, training: functional.dropout(x.permute(2, 0, 1, 3), 0.5, training)),
    "alpha dropout of other axes": (
        (5, 4, 6),
        lambda x, training: functional.alpha_dropout(x.transpose(0, 1)[1:], 0.3, training),
    ),
    "dropout 1d": ((5, 4, 6), lambda x, training: functional.dropout1d(x, 0.3, training)),
    "dropout 2d": (IMAGES, lambda x, training: functional.dropout2d(x, 0.3, training)),
    "dropout 3d": ((2, 3, 2, 2, 6), lambda x, training: functional.dropout3d(x, 0.3, training)),
    "alpha dropout": (VECTORS, lambda x, training: functional.alpha_dropout(x, 0.3, training)),
    "alpha dropout of channels": (IMAGES, lambda x, training: functional.feature_alpha_dropout(x, 0.3, training)),
}


@pytest.mark.parametrize(("name", "shared"), crossed(FUNCTIONS, [True, False], False))
def test_random_functions(name: str, shared: bool) -> None:
    shape, call = FUNCTIONS[name]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(call(x, self.training)) if shared else call(self.a(x), self.training)

    assert_fused_is_solo(lambda n: Model(), batches(*shape), steps=5)


def test_random_layers_between_each_other_keep_the_order_of_a_solo_run() -> None:
    def make(n: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv3d(4, 4, 1), nn.RReLU(), nn.Dropout3d(0.2 + 0.1 * n), nn.AlphaDropout(0.3), nn.Flatten()),
            *(nn.Linear(256, 3), nn.RReLU(0.1 * n, 0.5), nn.Dropout(0.2 * n)),
        )

    assert_fused_is_solo(make, batches(*VOLUMES), steps=5)
