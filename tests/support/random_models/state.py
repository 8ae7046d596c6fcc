"""Blocks with what is known only when they run: random numbers, values of data, Python's state; and shared memory."""

import functools
import itertools
import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from tests.support.random_models.blocks import block


@block("noise")
def noisy(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) + 0.1 * torch.randn_like(x) if self.training else self.inner(x)


@block("a number drawn")
def drawn(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * (1 + torch.rand(()).item())


@block("stochastic depth")
def dropped(self: Any, x: Tensor) -> Tensor:
    if not self.training:
        return x + self.inner(x)
    mask = x.new_empty((len(x),) + (1,) * (x.ndim - 1)).bernoulli_(0.7)
    return x + self.inner(x) * mask / 0.7


@block("dropout by function")
def dropout(self: Any, x: Tensor) -> Tensor:
    return functional.dropout(self.inner(x), 0.3, self.training)


@block("isinstance")
def asked(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) if isinstance(x, Tensor) and torch.is_tensor(self.a(x)) else x


@block("type")
def typed(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return self.inner(y) if type(y) is Tensor else y


@block("type of a result")
def typed_at_once(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) if type(self.a(x)) is Tensor else x * 3


@block("requires_grad")
def required(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return self.inner(y) * (2.0 if y.requires_grad else 1.0)


@block("a mode for a while", lambda m, n: setattr(m, "drop", nn.Dropout(0.3)))
def for_a_while(self: Any, x: Tensor) -> Tensor:
    self.drop.eval()
    y = self.drop(self.a(x))
    self.drop.train(self.training)
    return self.drop(self.inner(y))


@block("a mode that stays")
def stays(self: Any, x: Tensor) -> Tensor:
    self.inner.eval()
    return self.inner(self.a(x))


@block("a table", lambda m, n: setattr(m, "held", {"scale": 0.5, "signs": [1, -1]}))
def table(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * self.held["scale"] + self.a(x) * self.held["signs"][1]


@block("a list of its own", lambda m, n: setattr(m, "held", [0.5, 2.0] if n % 2 else [2.0, 0.5]))
def listed(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * self.held[0] + self.a(x) * self.held[1]


@block("a number of its own", lambda m, n: setattr(m, "held", 0.5 + 0.25 * n))
def numbered(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * self.held


@block("a switch of its own", lambda m, n: setattr(m, "held", n % 2 == 0))
def flagged(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) if self.held else self.a(x).tanh()


@block("a tensor in an attribute", lambda m, n: setattr(m, "held", torch.linspace(0.5, 1.0 + n, len(m.scale))))
def plain(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * self.held.to(x.dtype)


@block("a buffer that counts")
def counting(self: Any, x: Tensor) -> Tensor:
    self.seen += 1
    return self.inner(x) + self.a(x) / self.seen


@block("a buffer that is replaced")
def averaging(self: Any, x: Tensor) -> Tensor:
    y = self.inner(x)
    if self.training:
        self.seen = 0.9 * self.seen + 0.1 * y.detach().flatten(0, -2).mean(0).to(self.seen.dtype)
    return y * self.seen


@functools.lru_cache
def positions(width: int) -> Tensor:
    return torch.arange(width) / width


@block("a cache")
def cached(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) + positions(x.shape[-1]).clone().to(x.dtype)


@block("a spare layer", lambda m, n: setattr(m, "spare", nn.Linear(2, 2)))
def spared(self: Any, x: Tensor) -> Tensor:
    return self.inner(x)


@block("a layer that some trials use")
def by_parameters(self: Any, x: Tensor) -> Tensor:
    return self.inner(self.a(x)) if self.a.bias.sum() > 0 else self.inner(self.b(x))


@block("a branch on data")
def by_data(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return self.inner(y) if y.mean() > 0 else self.b(y)


@block("a number of the data")
def to_number(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * (1 + x.abs().mean().clamp(0, 1).item())


@block("a weight changed in place")
def shrinking(self: Any, x: Tensor) -> Tensor:
    if self.training:
        with torch.no_grad():
            self.a.weight.mul_(0.99)
    return self.inner(self.a(x))


@block("new data of a weight")
def renormed(self: Any, x: Tensor) -> Tensor:
    if self.training:
        self.a.weight.data = torch.renorm(self.a.weight.data, 2, 0, 0.5)
    return self.inner(self.a(x))


@block("new data of a buffer")
def decaying(self: Any, x: Tensor) -> Tensor:
    self.seen.data = self.seen.data * 0.9
    return self.inner(x) + self.seen


@block("data in place")
def of_data(self: Any, x: Tensor) -> Tensor:
    self.a.weight.data.clamp_(-0.3, 0.3)
    self.seen.data.mul_(0.9)
    return self.a(self.inner(x)) + self.seen


@block("a mean of parameters")
def following(self: Any, x: Tensor) -> Tensor:
    for mean, parameter in zip(self.b.parameters(), self.a.parameters(), strict=True):
        mean.data = 0.9 * mean.data + 0.1 * parameter.data
    return self.inner(self.a(x)) + self.b(x)


@block("the size of all parameters")
def sized(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * torch.stack([own.square().mean() for own in self.parameters()]).mean().tanh()


@block("weights that are given")
def given(self: Any, x: Tensor) -> Tensor:
    weight = self.a.weight * self.b.weight.sigmoid()
    return self.inner(functional_call(self.a, {"weight": weight, "bias": self.b.bias}, (x,)))


@block("a mask")
def masked(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return torch.where(y > self.b(x), self.inner(x).to(y.dtype), y)


def tie(m: Any, n: int) -> None:
    m.b.weight = m.a.weight


@block("a tied weight", tie)
def tied(self: Any, x: Tensor) -> Tensor:
    return self.b(self.inner(self.a(x)).tanh())


@block("a buffer under two names", tie=lambda m: m.register_buffer("other", m.seen))
def twice_named(self: Any, x: Tensor) -> Tensor:
    self.other.mul_(0.9)
    return self.inner(x) * self.seen


def transpose(m: Any) -> None:
    m.b.weight = nn.Parameter(m.a.weight.detach().t())


@block("a transposed weight", tie=transpose, refused=True)
def transposed(self: Any, x: Tensor) -> Tensor:
    return self.b(self.inner(self.a(x)).tanh())


@block("a view of a weight", tie=lambda m: m.register_buffer("view", m.scale.data), refused=True)
def viewed(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * self.scale + self.view


@block("a parameter in a buffer", refused=True)
def sharing(self: Any, x: Tensor) -> Tensor:
    y = self.inner(x) * self.seen
    self.seen = self.scale.detach()
    return y


@block("Python's random numbers", refused=True)
def by_random(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * (0.5 + random.random())


@block("numpy's random numbers", refused=True)
def by_numpy(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * (0.5 + float(numpy.random.rand()))


@block("a frozen layer", refused=True)
def freezing(self: Any, x: Tensor) -> Tensor:
    self.a.requires_grad_(False)
    return self.inner(self.a(x)) + self.b(x)


@block("a counter", lambda m, n: setattr(m, "held", 0), refused=True)
def counter(self: Any, x: Tensor) -> Tensor:
    self.held += 1
    return self.inner(x) / self.held


@block("an iterator", lambda m, n: setattr(m, "held", itertools.count(1)), refused=True)
def iterated(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) / next(self.held)


@block("a list that grows", lambda m, n: setattr(m, "held", []), refused=True)
def growing(self: Any, x: Tensor) -> Tensor:
    self.held.append(x.shape[0])
    return self.inner(x) * (1 + 1 / len(self.held))
