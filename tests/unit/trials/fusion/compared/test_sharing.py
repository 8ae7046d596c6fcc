"""Memory that tensors share: kept where it is one tensor under several names, refused where it is not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trials
from tests.support.fused_and_solo import ToyStudy, assert_fused_is_solo, members
from trials import FuseError, TrialGroup, build_member
from trials.fusion.errors import RefusedError
from trials.gate.base import OpenGate


class Model(nn.Module):
    """Two layers, whatever else `change` gives it, and a forward that can be traced or not."""

    def __init__(self, change: Callable[[Any], None], forward: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()
        change(self)
        self.run = (forward,)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.tanh(self.a(x)))
        return y if self.run[0] is None else self.run[0](self, y)


def transposed(m: Any) -> None:
    m.b.weight = nn.Parameter(m.a.weight.detach().t())


def same_memory(m: Any) -> None:
    m.b.weight = nn.Parameter(m.a.weight)


def view_of_a_weight(m: Any) -> None:
    m.register_buffer("seen", m.a.weight.detach())


def with_gradient(m: Any) -> None:
    m.register_buffer("seen", m.a.weight.t())


def plain_with_gradient(m: Any) -> None:
    m.seen = m.a.weight.norm()


def plain_view(m: Any) -> None:
    m.seen = m.a.weight.data[0]


def view_in_a_list(m: Any) -> None:
    m.seen = [{"w": m.a.weight.data}]


def flat(m: Any) -> None:
    m.register_buffer("flat", torch.zeros(40, dtype=torch.float64))
    m.a.weight = nn.Parameter(m.flat[:16].view(4, 4))


def expanded(m: Any) -> None:
    m.a.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64).expand(4))


def shifted(m: Any) -> None:
    base = torch.zeros(8, dtype=torch.float64)
    m.register_buffer("one", base[:5])
    m.register_buffer("two", base[4:])


def sparse(m: Any) -> None:
    m.register_buffer("edges", torch.eye(4, dtype=torch.float64).to_sparse())


def plain_sparse(m: Any) -> None:
    m.edges = [torch.eye(4, dtype=torch.float64).to_sparse()]


def bits(m: Any) -> None:
    m.register_buffer("one", torch.zeros(4))
    m.register_buffer("two", m.one.view(torch.int32))


def array_beneath(m: Any) -> None:
    m.drawn = np.random.default_rng(0).standard_normal((4, 4))
    m.a.weight = nn.Parameter(torch.from_numpy(m.drawn))


def array_of_a_buffer(m: Any) -> None:
    m.register_buffer("seen", torch.zeros(4))
    m.look = partial(np.sum, m.seen.numpy()[1:])


def bytes_beneath(m: Any) -> None:
    m.raw = [bytearray(32)]
    m.a.bias = nn.Parameter(torch.frombuffer(m.raw[0], dtype=torch.float64))


class Special(nn.Parameter):
    pass


def special(m: Any) -> None:
    m.a.weight = Special(m.a.weight.detach())


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "a transposed weight": (transposed, "'b.weight' shares memory with 'a.weight', but is another view of it"),
    "two parameters": (same_memory, "'b.weight' shares memory with 'a.weight'"),
    "a buffer": (
        view_of_a_weight,
        "'seen' shares memory with 'a.weight', but is another view of it; allowed: the same",
    ),
    "a buffer with gradient": (with_gradient, "tensor 'seen' was computed from others, and its gradient leads to them"),
    "an attribute with gradient": (plain_with_gradient, "tensor 'seen' was computed from others"),
    "an attribute": (plain_view, "'seen' shares memory with 'a.weight'"),
    "deep in an attribute": (view_in_a_list, r"'seen\[0\]\['w'\]' shares memory with 'a\.weight'"),
    "a flat buffer": (flat, "'flat' shares memory with 'a.weight'"),
    "an expanded parameter": (expanded, r"parameter 'a\.bias' has several elements in one place; allowed: a clone"),
    "buffers that overlap": (shifted, "'two' shares memory with 'one'"),
    "the same bits": (bits, "'two' shares memory with 'one'"),
    "an array of numpy": (
        array_beneath,
        "the ndarray 'drawn' shares memory with 'a.weight', whose .*; allowed: a copy",
    ),
    "an array of a buffer": (array_of_a_buffer, r"the ndarray 'look.args\[0\]' shares memory with 'seen'"),
    "bytes": (bytes_beneath, r"the bytearray 'raw\[0\]' shares memory with 'a.bias'"),
    "a type of its own": (special, "parameter 'a.weight' is of type Special; allowed: Tensor, nn.Parameter"),
    "sparse": (sparse, r"tensor 'edges' has the layout torch.sparse_coo, which .*; allowed: a dense tensor"),
    "sparse, in a list": (plain_sparse, r"tensor 'edges\[0\]' has the layout torch.sparse_coo"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    change, message = REFUSED[name]
    study = ToyStudy(lambda n: Model(change))
    with pytest.raises(FuseError, match=message):
        build_member(study, 0, {"n": 0})


def slices(m: Any) -> None:
    """Memory beside each other, as cuDNN keeps a recurrent layer's weights, and interleaved."""
    base = torch.randn(4, 8, dtype=torch.float64)
    m.a.weight, m.b.weight = nn.Parameter(base[:, :4]), nn.Parameter(base[:, 4:])
    flat = torch.randn(8, dtype=torch.float64)
    m.a.bias, m.b.bias = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])


def one_buffer(m: Any) -> None:
    """A buffer of two modules: as one object, as two, and as an attribute."""
    m.a.register_buffer("seen", torch.zeros(4, dtype=torch.float64))
    m.b.register_buffer("seen", m.a.seen)
    m.register_buffer("seen", m.a.seen.detach())
    vars(m)["plain"] = m.a.seen


def counting(m: Any, y: Tensor) -> Tensor:
    if m.training:
        m.a.seen.add_(y.detach().mean(0))
        m.seen.mul_(0.9)
    return y + m.b.seen * m.plain


def read_only(m: Any) -> None:
    m.register_buffer("mask", torch.tensor([1.0, 2.0]).double().expand(4, 2)[:, :1].expand(4, 4))
    m.register_buffer("none", None)
    m.none_at_all = None
    m.register_parameter("empty", None)
    m.nothing = nn.Parameter(torch.zeros(0, 3))
    m.register_buffer("seen", torch.arange(4), persistent=False)
    m.again = m.a


def reading(m: Any, y: Tensor) -> Tensor:
    return m.again(y) @ m.mask + m.seen + m.nothing.sum()


def arrays(m: Any) -> None:
    """Of no tensor, beside one, and of a frozen one."""
    m.table = np.arange(8.0)
    m.register_buffer("part", torch.from_numpy(m.table)[4:].clone())
    whole = np.ones(8)
    m.other, m.a.bias = whole[:4], nn.Parameter(torch.from_numpy(whole[4:]))
    m.b.bias = nn.Parameter(torch.from_numpy(np.ones(4)), requires_grad=False)
    m.fixed = m.b.bias.numpy()


def reading_arrays(m: Any, y: Tensor) -> Tensor:
    return y * m.part + float(m.table.sum() + m.other.sum() + m.fixed.sum())


def plain(m: Any) -> None:
    m.seen = torch.zeros(4, dtype=torch.float64)


def counting_plain(m: Any, y: Tensor) -> Tensor:
    if m.training:
        m.seen.add_(1)
    return y * 2 + m.seen


def looked_at(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """The same for a loop over trials."""
    return lambda m, y: forward(m, y) if y.sum().item() < 1e9 else y


KEPT: dict[str, tuple[Callable[[Any], None], Callable[[Any, Tensor], Tensor]]] = {
    "beside each other": (slices, lambda m, y: y * 2),
    "one buffer": (one_buffer, counting),
    "a plain tensor that is written": (plain, counting_plain),
    "what is only read": (read_only, reading),
    "arrays": (arrays, reading_arrays),
}


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str, size: int, looped: bool) -> None:
    change, forward = KEPT[name]
    made = looked_at(forward) if looped else forward
    assert_fused_is_solo(lambda n: Model(change, made), [torch.randn(5, 4)], steps=3, size=size)


def test_buffers_stay_one_when_a_trial_is_extracted() -> None:
    fused = trials.fuse([Model(one_buffer, counting) for _ in range(2)])
    fused(torch.randn(5, 4, dtype=torch.float64))
    model: Any = fused.extract(1)
    model.a.seen.fill_(7.0)
    assert model.b.seen[0] == model.seen[0] == model.plain[0] == 7.0


def replacing(m: Any, y: Tensor) -> Tensor:
    m.seen = m.seen + 1
    return y + m.a.seen


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_one_of_two_names_is_replaced(size: int, looped: bool) -> None:
    study = ToyStudy(lambda n: Model(one_buffer, looked_at(replacing) if looped else replacing))
    group = TrialGroup(study, members(study, range(size)), OpenGate())
    with pytest.raises(
        RefusedError, match=r"replaces '(a\.)?seen', which is one tensor under several names; allowed: to"
    ):
        group.train_step(torch.randn(5, 4, dtype=torch.float64), torch.zeros(5))


class Helper:
    """Holds a module's tensors, but is none."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


OUTSIDE: dict[str, tuple[Callable[[Any], None], Callable[[Any, Tensor], Tensor], str]] = {
    "in a list": (lambda m: setattr(m, "held", [m.a.weight]), lambda m, y: y @ m.held[0], r"Parameter by 'held\[0\]'"),
    "in an object": (
        lambda m: setattr(m, "held", Helper(w=m.a.weight)),
        lambda m, y: y @ m.held.w,
        r"Parameter by 'held\.w'",
    ),
    "a module": (
        lambda m: setattr(m, "held", [nn.Linear(4, 4).double()]),
        lambda m, y: m.held[0](y),
        r"Parameter by 'held\[0\]\._parameters\['weight'\]'",
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_tensors_that_code_finds_elsewhere(name: str) -> None:
    change, forward, message = OUTSIDE[name]
    torch.manual_seed(0)
    study = ToyStudy(lambda n: Model(change, looked_at(forward)))
    with pytest.raises(RefusedError, match=f"Model' reaches a {message}, which stays that of one trial; allowed"):
        TrialGroup(study, members(study, range(1)), OpenGate())
