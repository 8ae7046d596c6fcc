"""Random numbers that a forward draws by functions with a rule: those of the trial alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional

from tests.support.fused_and_solo import assert_fused_is_solo
from tests.support.slow_cases import crossed
from trials import TrialGroup

Draw = Callable[[Tensor], Tensor]


class Coder(nn.Module):
    """A variational autoencoder's way: noise on what the encoder gives, and dropout on both sides of it."""

    def __init__(self, draw: Draw, traced: bool, images: bool = False) -> None:
        super().__init__()
        self.draw, self.traced, self.drop = draw, traced, nn.Dropout(0.3)
        layer: Any = (lambda n, m: nn.Conv2d(n, m, 1)) if images else nn.Linear
        self.mean, self.log_deviation, self.decode = layer(6, 4), layer(6, 4), layer(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not self.traced and len(x) < 1:
            return x
        mean, deviation = self.mean(self.drop(x)), torch.exp(0.5 * self.log_deviation(x))
        noise = self.draw(deviation) if self.training else torch.zeros_like(deviation)
        y: Tensor = self.decode(self.drop(mean + noise * deviation))
        return y


class Drawing(nn.Module):
    """Draws in both modes, between dropouts of the same stream."""

    def __init__(self, draw: Draw, traced: bool) -> None:
        super().__init__()
        self.draw, self.traced, self.drop = draw, traced, nn.Dropout(0.3)
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.traced and len(x) < 1:
            return x
        h = self.drop(self.first(self.drop(x)))
        y: Tensor = self.last(self.drop(self.draw(h)))
        return y


LIKE: dict[str, Draw] = {
    "normal": torch.randn_like,
    "uniform": torch.rand_like,
    "in another type": lambda x: torch.randn_like(x, dtype=torch.float32),
    "of a part": lambda x: torch.randn_like(x[..., :1]),
    "of what lies otherwise": lambda x: torch.randn_like(x.transpose(0, -1)).transpose(0, -1),
    "many": lambda x: torch.rand_like(x.unsqueeze(-1).expand(*x.shape, 5)).mean(-1),
}


def unused(h: Tensor) -> Tensor:
    torch.rand(3)
    return h


def augmented(h: Tensor) -> Tensor:
    noise = torch.randn(h.shape, dtype=h.dtype)
    noise += h
    return noise


DRAWS: dict[str, Draw] = {
    "normal, of a shape": lambda h: h + torch.randn(h.shape, dtype=h.dtype, device=h.device),
    "normal, of sizes": lambda h: h + torch.randn(h.size(0), 5),
    "normal, of numbers": lambda h: h + torch.randn(size=(5,)),
    "uniform": lambda h: h * torch.rand((h.shape[0], 1), dtype=torch.float64),
    "a number": lambda h: h * torch.rand(()),
    "a number of a finer type": lambda h: (h.float() * torch.rand((), dtype=torch.float64)).to(h.dtype),
    "integers": lambda h: h * torch.randint(7, (h.shape[0], 1)),
    "integers from a bound": lambda h: h * torch.randint(2, 9, (5,)),
    "integers by names": lambda h: h * torch.randint(high=4, size=(5,), dtype=torch.int32),
    "integers like a tensor": lambda h: h * torch.randint_like(h, 2, 9),
    "an order": lambda h: 0.5 * h[torch.randperm(h.size(0))] + h,
    "truths": lambda h: h * torch.bernoulli(h.sigmoid()),
    "truths, by a method": lambda h: h * h.sigmoid().bernoulli(),
    "truths of one rate": lambda h: h * torch.bernoulli(torch.full((5,), 0.3)),
    "truths of a number": lambda h: h * torch.bernoulli(h.detach(), 0.4),
    "normal around a tensor": lambda h: torch.normal(h, 0.1) + h,
    "normal of deviations": lambda h: torch.normal(0.0, h.detach().exp()) + h,
    "normal of both": lambda h: torch.normal(std=h.detach().exp(), mean=h) + h,
    "normal of neither": lambda h: torch.normal(1.0, 2.0, (5,)) * h,
    "some of many": lambda h: h.gather(1, torch.multinomial(h.detach().softmax(-1), 5)),
    "some of many, by a method": lambda h: h.gather(1, h.detach().softmax(-1).multinomial(5, replacement=True)),
    "counts": lambda h: h * torch.poisson(h.detach().exp()),
    "successes": lambda h: h * torch.binomial(torch.full_like(h, 5), h.detach().sigmoid()),
    "gamma": lambda h: torch._standard_gamma(h.exp()),
    "gumbel softmax": lambda h: functional.gumbel_softmax(h),
    "gumbel softmax, hard": lambda h: functional.gumbel_softmax(h, 0.5, hard=True),
    "not used": unused,
    "one after another": lambda h: h * torch.rand(5) + torch.randn(7, 1) * torch.randint(3, (5,)),
    "with an augmented assignment": augmented,
}


def kept(h: Tensor) -> Tensor:
    noise = torch.empty(h.shape, dtype=h.dtype)
    noise.uniform_(-1, 1)
    return h + noise


FILLED: dict[str, Draw] = {
    "normal": lambda h: h + torch.empty(5).normal_(),
    "uniform": kept,
    "truths": lambda h: h * h.new_empty((h.shape[0], 1)).bernoulli_(0.5).div_(0.5),
    "truths of rates": lambda h: h * torch.empty_like(h).bernoulli_(torch.full((5,), 0.3)),
    "exponential": lambda h: h * torch.zeros_like(h).exponential_(2.0),
    "cauchy": lambda h: h + torch.empty_like(h).cauchy_().tanh(),
    "geometric": lambda h: h * h.new_zeros(5).geometric_(0.4),
    "log normal": lambda h: h * h.new(5).log_normal_(0.0, 0.3),
    "of a shape, the old way": lambda h: h * h.new(h.shape).uniform_(),
    "of numbers that are given": lambda h: h + h.new((2.0, 3.0, 4.0, 5.0, 6.0)) * torch.rand(5),
    "integers": lambda h: h * torch.empty(h.shape, dtype=torch.int64).random_(0, 4),
    "activations": lambda h: h + (2 * h).normal_(),
}

DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda h: distributions.Normal(h, h.exp()).rsample(),
    "normal, without gradients": lambda h: distributions.Normal(h, h.exp()).sample() + h,
    "independent": lambda h: distributions.Independent(distributions.Normal(h, 1.0), 1).rsample(),
    "uniform": lambda h: distributions.Uniform(h, h + 1).rsample(),
    "laplace": lambda h: distributions.Laplace(h, h.exp()).rsample(),
    "exponential": lambda h: distributions.Exponential(h.exp()).rsample(),
    "log normal": lambda h: distributions.LogNormal(h, 0.2).rsample(),
    "gumbel": lambda h: distributions.Gumbel(h, h.exp()).rsample(),
    "gamma": lambda h: distributions.Gamma(h.exp(), 1.0).rsample(),
    "truths": lambda h: distributions.Bernoulli(logits=h).sample() * h,
    "relaxed truths": lambda h: distributions.RelaxedBernoulli(torch.tensor(0.5), logits=h).rsample(),
    "one of many": lambda h: h * distributions.Categorical(logits=h).sample().unsqueeze(-1),
    "scored": lambda h: h * distributions.Normal(h, 1.0).log_prob(distributions.Normal(h, 1.0).sample()),
}


def _data(*shape: int) -> list[Tensor]:
    stream = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=stream) for _ in range(2)]


def _loops(group: TrialGroup) -> list[str]:
    return [how for _, how in group.ways() if how.startswith("loop")]


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("name", LIKE)
def test_each_trial_draws_what_it_draws_alone(name: str, traced: bool) -> None:
    assert not _loops(assert_fused_is_solo(lambda n: Coder(LIKE[name], traced), _data(5, 6)))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("name", "traced"), crossed(DRAWS, [True, False], True))
def test_so_it_does_without_a_tensor_to_be_like(name: str, traced: bool, size: int) -> None:
    group = assert_fused_is_solo(lambda n: Drawing(DRAWS[name], traced), _data(7, 6), size=size)
    assert not _loops(group)
    assert any(how.startswith("vmap: model") for _, how in group.ways()) != traced


@pytest.mark.parametrize(("name", "size"), crossed(FILLED, [1, 3], 3))
def test_so_it_does_into_memory_of_its_own(name: str, size: int) -> None:
    assert not _loops(assert_fused_is_solo(lambda n: Drawing(FILLED[name], True), _data(7, 6), size=size))


@pytest.mark.parametrize(("name", "size"), crossed(DISTRIBUTIONS, [1, 3], 3))
def test_so_does_a_distribution(name: str, size: int) -> None:
    assert not _loops(assert_fused_is_solo(lambda n: Drawing(DISTRIBUTIONS[name], True), _data(7, 6), size=size))


@pytest.mark.parametrize("traced", [True, False])
def test_numbers_for_the_input_that_trials_share(traced: bool) -> None:
    class Noisy(Coder):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.1 * torch.randn_like(x) if self.training else x)

    assert_fused_is_solo(lambda n: Noisy(torch.randn_like, traced), _data(5, 6))


@pytest.mark.parametrize("drawn", [torch.preserve_format, torch.contiguous_format, torch.channels_last])
def test_the_order_in_memory_is_that_of_the_trial_alone(drawn: torch.memory_format) -> None:
    def make(n: int) -> nn.Module:
        model = Coder(lambda x: torch.randn_like(x, memory_format=drawn), True, images=True)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its types

    assert_fused_is_solo(make, _data(3, 6, 4, 4))


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize(
    "draw", [torch.randn_like, lambda x: torch.bernoulli(x.sigmoid()), lambda x: x.clone().normal_()]
)
def test_so_it_is_where_activations_lie_as_channels_last(draw: Draw, traced: bool) -> None:
    def make(n: int) -> nn.Module:
        model = Coder(draw, traced, images=True)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its types

    assert_fused_is_solo(make, [x.to(memory_format=torch.channels_last) for x in _data(3, 6, 4, 4)])


def in_gaps(h: Tensor) -> Tensor:
    return h + torch.empty(h.shape[0], 10, dtype=h.dtype)[:, ::2].normal_()


def seeded(h: Tensor) -> Tensor:
    torch.manual_seed(3)
    return h + torch.randn(5)


def seeded_at_its_source(h: Tensor) -> Tensor:
    torch.default_generator.manual_seed(3)
    return h + torch.randn(5)


def repeated(h: Tensor) -> Tensor:
    before = torch.default_generator.get_state()
    noise = torch.randn(5)
    torch.default_generator.set_state(before)
    return h + noise * torch.randn(5)


NOT_TAKEN: dict[str, tuple[Draw, str]] = {
    "a gradient of its own": (lambda h: h + torch.randn(5, requires_grad=True), "requires_grad"),
    "memory that is given": (lambda h: h + torch.rand(5, out=torch.empty(5)), ""),
    "memory that trials share": (lambda h: h + torch.zeros(5).uniform_(), "uniform_ fills a tensor that all trials"),
    "memory with gaps": (in_gaps, "normal_ fills a tensor with gaps"),
    "as many as data say": (lambda h: h + torch.randn(int((h > 0).sum()), 5).mean(0), "asks for values"),
    "a branch": (lambda h: h if torch.rand(()) < 0.5 else -h, "asks for values"),
    "a number of Python's": (lambda h: h * torch.rand(1).item(), "asks for values"),
    "a stream that is seeded": (lambda h: h + torch.randn(5, generator=torch.manual_seed(3)), ""),
    "a seed": (seeded, "each trial has its own"),
    "a seed of the stream itself": (seeded_at_its_source, "each trial has its own"),
    "numbers that come again": (repeated, "each trial has its own"),
    "a function without a rule": (lambda h: functional.rrelu(h, training=True), "rrelu"),
    "a distribution without one": (lambda h: h * distributions.Beta(2.0, 3.0).sample(), "autograd.Function"),
}


def test_a_stream_that_each_call_makes_anew_gives_all_trials_the_same_numbers() -> None:
    """As a fixed mask may be made of."""

    def given(h: Tensor) -> Tensor:
        return h + torch.randn(5, generator=torch.Generator().manual_seed(3))

    assert not _loops(assert_fused_is_solo(lambda n: Drawing(given, True), _data(7, 6)))
    untraced = _loops(assert_fused_is_solo(lambda n: Drawing(given, False), _data(7, 6)))
    assert any("generator" in how for how in untraced), untraced


@pytest.mark.parametrize(("name", "traced"), crossed(NOT_TAKEN, [True, False], True))
def test_what_no_rule_takes_runs_in_a_loop(name: str, traced: bool) -> None:
    draw, why = NOT_TAKEN[name]
    group = assert_fused_is_solo(lambda n: Drawing(draw, traced), _data(7, 6))
    assert any(why in how for how in _loops(group)), list(group.ways())
