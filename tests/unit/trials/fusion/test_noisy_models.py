"""Models whose forward draws random numbers, fused and alone: their streams go with the trials."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional

from tests.support.fused_and_solo import Solo, ToyStudy, assert_fused_is_solo, assert_same_trial, close, members
from tests.support.slow_cases import crossed
from tests.support.states import reloaded
from trials import TrialGroup
from trials.gate.base import OpenGate

torch.set_num_threads(1)

STEPS = 12
"""Of a diffusion."""


class Denoiser(nn.Module):
    """A U-Net that learns the noise of a diffusion at a random step (Ho et al. 2020)."""

    kept: Tensor

    def __init__(self, like: bool = True) -> None:
        super().__init__()
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(0.01, 0.2, STEPS), 0))
        self.like, self.step = like, nn.Embedding(STEPS, 6)
        self.down, self.low = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.norm, self.drop = nn.GroupNorm(2, 6), nn.Dropout2d(0.2)
        self.up, self.last = nn.ConvTranspose2d(6, 4, 2, 2), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        step = torch.randint(0, STEPS, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x) if self.like else torch.randn(x.shape, dtype=x.dtype, device=x.device)
        kept = self.kept[step].view(-1, 1, 1, 1)
        high = functional.silu(self.down(kept.sqrt() * x + (1 - kept).sqrt() * noise))
        low = functional.silu(self.norm(self.low(high)) + self.step(step)[:, :, None, None])
        y: Tensor = self.last(torch.cat([high, self.up(self.drop(low))], 1))
        return y - noise


class Coder(nn.Module):
    """A variational autoencoder, by `torch.distributions`."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.drop, self.decode = nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = self.encode(self.drop(x)).chunk(2, -1)
        code = distributions.Normal(mean, functional.softplus(deviation))
        lost = distributions.kl_divergence(code, distributions.Normal(0.0, 1.0)).sum(-1, keepdim=True)
        y: Tensor = self.decode(self.drop(code.rsample())) + lost
        return y


class Mixed(nn.Module):
    """Mixes each example with another one, in the first hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 5), nn.Dropout(0.2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            share = torch.rand(x.size(0), 1)
            h = share * h + (1 - share) * h[torch.randperm(x.size(0))]
        y: Tensor = self.last(self.drop(h.relu()))
        return y


class Quantized(nn.Module):
    """Chooses from a table by a Gumbel softmax, and sometimes nothing, as classifier-free guidance does."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.table, self.last = nn.Linear(6, 7), nn.Linear(7, 5, bias=False), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.table(functional.gumbel_softmax(self.score(x), tau=0.7, hard=True))
        left_out = torch.rand(len(x) if x.ndim < 2 else x.shape[0], device=x.device) < 0.3
        y: Tensor = self.last(torch.where(left_out[:, None], torch.zeros_like(chosen), chosen))
        return y


class Noise(nn.Module):
    """A layer without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.randn(x.size()) if self.training else x


def drop_path(x: Tensor, rate: float, training: bool) -> Tensor:
    if rate == 0.0 or not training:
        return x
    drawn = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - rate)
    drawn.div_(1 - rate)
    return x * drawn


class Residual(nn.Module):
    """Stochastic depth, as models copy it from one another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y: Tensor = self.last(h + drop_path(self.branch(h).relu(), 0.4, self.training))
        return y


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "diffusion": (Denoiser, (3, 1, 4, 4)),
    "diffusion, noise by shape": (lambda: Denoiser(like=False), (3, 1, 4, 4)),
    "autoencoder": (Coder, (5, 6)),
    "mixup": (Mixed, (5, 6)),
    "gumbel softmax": (Quantized, (5, 6)),
    "layers of noise": (
        lambda: nn.Sequential(Noise(), nn.Linear(6, 5), nn.Dropout(0.2), Noise(), nn.Linear(5, 2)),
        (5, 6),
    ),
    "stochastic depth": (Residual, (5, 6)),
}


def _data(*shape: int) -> list[Tensor]:
    stream = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=stream) for _ in range(2)]


@pytest.mark.parametrize(("name", "size"), crossed(MODELS, [1, 4], 4))
def test_each_trial_is_what_it_is_alone(name: str, size: int) -> None:
    make, shape = MODELS[name]
    group = assert_fused_is_solo(lambda n: make(), _data(*shape), steps=4, size=size)
    assert not any(how.startswith("loop") for _, how in group.ways())


@pytest.mark.parametrize("last", [False, True])
def test_images_in_any_order_of_memory(last: bool) -> None:
    order = torch.channels_last if last else torch.contiguous_format

    def make(n: int) -> nn.Module:
        return Denoiser().to(memory_format=order)  # type: ignore[call-overload]  # not in its types

    assert_fused_is_solo(make, [x.to(memory_format=order) for x in _data(3, 1, 4, 4)])


class Trials:
    """Trials of a model in a group, and each alone."""

    def __init__(self, name: str) -> None:
        make, shape = MODELS[name]
        data = [(x.double(), torch.zeros(len(x))) for x in _data(*shape)]
        self.study = ToyStudy(lambda n: make().double(), "adamw", data)
        self.solos: dict[int, Solo] = {}

    def made(self, *numbers: int) -> Any:
        self.solos.update({number: Solo(self.study, number) for number in numbers})
        return members(self.study, numbers)

    def step(self, *groups: TrialGroup) -> None:
        for batch in self.study.data:
            for group in groups:
                group.train_step(*batch)
                for number in group.numbers:
                    self.solos[number].step(*batch)

    def check(self, group: TrialGroup) -> None:
        solos = [self.solos[number] for number in group.numbers]
        close(group.evaluate(), [solo.score() for solo in solos], "score")
        for row, solo in enumerate(solos):
            assert_same_trial(group, row, solo)
            assert torch.equal(group.progress(row)["rng_state"], solo.rng_state)


@pytest.mark.parametrize("name", ["diffusion", "autoencoder", "mixup", "stochastic depth"])
def test_streams_go_with_their_trials(name: str) -> None:
    run = Trials(name)
    group = TrialGroup(run.study, run.made(0), OpenGate())
    run.step(group)
    group.add(run.made(1, 2, 3))
    run.step(group)
    other = group.split([2, 0])
    other.use_units()
    run.step(other)
    run.check(other)
    group = reloaded(group)
    run.step(group)
    group.merge(reloaded(other))
    group.add(run.made(4))
    run.step(group)
    run.check(group)
    group.keep([3, 1])
    run.step(group)
    run.check(group)
