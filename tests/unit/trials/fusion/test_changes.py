"""Forwards that change their parameters and buffers, in place or with new data: each trial its own."""

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import ToyStudy
from tests.support.two_layers import Forward, TwoLayers, assert_fused_is_alone, batches, plain
from trials import FuseError
from trials.fusion.errors import RefusedError
from trials.fusion.own_code.one_by_one import refused_change

LOOP, VMAP = "loop over trials", "vmap"


def with_counter(m: TwoLayers) -> None:
    m.register_buffer("count", torch.ones(4))
    m.held = {}


def looking(forward: Forward) -> Forward:
    """The same in a loop over the trials, since it looks at its data, which differ between trials."""
    return lambda m, x: forward(m, x) if m.a(x).sum().item() < 1e9 else x


def shrunk(m: TwoLayers, x: Tensor) -> Tensor:
    if m.training:
        with torch.no_grad():
            m.a.weight.mul_(0.9)
    return plain(m, x)


def renormed(m: TwoLayers, x: Tensor) -> Tensor:
    if m.training:
        m.a.weight.data = torch.renorm(m.a.weight.data, 2, 0, 0.3)
    return plain(m, x)


def turned(m: TwoLayers, x: Tensor) -> Tensor:
    m.a.weight.data = m.a.weight.data.t()
    return plain(m, x)


def clamped(m: TwoLayers, x: Tensor) -> Tensor:
    m.a.weight.data.clamp_(-0.2, 0.2)
    return plain(m, x)


def counted(m: TwoLayers, x: Tensor) -> Tensor:
    count = m.get_buffer("count")
    count += 1
    return m.b(m.a(x).tanh() / count)


def with_other_memory(m: TwoLayers, x: Tensor) -> Tensor:
    count = m.get_buffer("count")
    count.set_(count * 0.9)  # type: ignore[call-overload]
    return m.b(m.a(x).tanh() * count)


def swapped(m: TwoLayers, x: Tensor) -> Tensor:
    torch.utils.swap_tensors(m.get_buffer("count"), m.get_buffer("count") * 0.9)
    return m.b(m.a(x).tanh() * m.get_buffer("count"))


def decayed(m: TwoLayers, x: Tensor) -> Tensor:
    count = m.get_buffer("count")
    count.data = count.data * 0.9
    return m.b(m.a(x).tanh() * count)


def replaced_and_kept(m: TwoLayers, x: Tensor) -> Tensor:
    """Besides, a table by length in an attribute, on which no result depends."""
    if len(x) not in m.held:
        m.held[len(x)] = torch.arange(1.0, len(x) + 1, dtype=x.dtype).cos().unsqueeze(1)
    m.count = m.get_buffer("count") * 0.9
    return m.b(m.a(x).tanh() * m.count + m.held[len(x)])


FORWARDS: dict[str, tuple[Forward, str]] = {
    "a parameter in place": (shrunk, VMAP),
    "a parameter in place, in a loop": (looking(shrunk), LOOP),
    "new data of a parameter": (renormed, LOOP),
    "a parameter turned": (turned, LOOP),
    "data of a parameter in place": (clamped, LOOP),
    "a buffer that the backward needs": (counted, VMAP),
    "a buffer that the backward needs, in a loop": (looking(counted), LOOP),
    "new data of a buffer": (decayed, LOOP),
    "other memory of a buffer": (with_other_memory, LOOP),
    "swapped buffer": (swapped, LOOP),
    "a new buffer, and a table": (replaced_and_kept, VMAP),
    "a new buffer, and a table, in a loop": (looking(replaced_and_kept), LOOP),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", FORWARDS)
def test_forward(name: str, size: int) -> None:
    forward, way = FORWARDS[name]
    found = assert_fused_is_alone(ToyStudy(lambda n: TwoLayers(forward, with_counter).double(), "sgd", batches()), size)
    assert size == 1 or found.startswith(way)


def test_parameter_that_some_trials_change() -> None:
    def forward(m: TwoLayers, x: Tensor) -> Tensor:
        return shrunk(m, x) if m.a.bias.sum() > 0 else m.b(x)

    assert_fused_is_alone(ToyStudy(lambda n: TwoLayers(forward).double(), "adamw", batches()), 4)


def test_change_that_begins_later_is_refused() -> None:
    data = [(x + shift, y) for (x, y), shift in zip(batches(2), (100.0, 0.0), strict=True)]

    def forward(m: TwoLayers, x: Tensor) -> Tensor:
        looked = m.a(x).sum().item()
        return plain(m, x) if 0 * looked + x.sum() > 1000 else shrunk(m, x)

    with pytest.raises(FuseError, match="though not for its first batch"):
        assert_fused_is_alone(ToyStudy(lambda n: TwoLayers(forward).double(), "sgd", data), 2)
    assert isinstance(refused_change("a"), RefusedError)


class Freezing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) if len(x) > 1 else x
        self.b.weight.requires_grad = False
        return self.b(y)


def test_freezing_in_code_that_is_not_traced_is_refused() -> None:
    with pytest.raises(FuseError, match=r"sets requires_grad in .*allowed: torch\.no_grad"):
        assert_fused_is_alone(ToyStudy(lambda n: Freezing().double(), "sgd", batches()), 2)


def cut(m: TwoLayers, x: Tensor) -> Tensor:
    m.a.weight.data = m.a.weight.data[:, :3]
    return m.b(m.a(x[:, :3]))


def grown(m: TwoLayers, x: Tensor) -> Tensor:
    """Alone, each call adds a number, which the result depends on."""
    count = m.get_buffer("count")
    count.data = torch.cat([count, count[:1]])
    return m.b(m.a(x)) * count.sum()


def counted_for_parameters(m: TwoLayers, x: Tensor) -> Tensor:
    if isinstance(m.a.weight, nn.Parameter):
        m.held["calls"] = m.held.get("calls", 0) + 1
    return m.b(m.a(x)) * (1 + m.held.get("calls", 0))


def one_with_another(m: TwoLayers, x: Tensor) -> Tensor:
    """Alone, an optimizer changes both at once from then on."""
    m.a.weight.data = m.b.weight.data
    return plain(m, x)


def kept_weight(m: TwoLayers, x: Tensor) -> Tensor:
    """Not what the bias was, but what it is by then."""
    y = m.b(m.a(x)) * m.get_buffer("count")
    m.count = m.a.bias.detach()
    return y


REFUSED: dict[str, tuple[Forward, str]] = {
    "a parameter's data for another": (one_with_another, r"gives 'a\.weight' the memory of 'b\.weight'"),
    "a parameter in a buffer": (kept_weight, r"gives 'count' the memory of 'a\.bias'"),
    "a parameter in a buffer, in a loop": (looking(kept_weight), r"gives 'count' the memory of 'a\.bias'"),
    "data of another shape": (cut, r"gives the parameter 'a\.weight' data of another shape"),
    "data of a buffer, of another shape": (grown, "its forward changes the attribute 'count'"),
    "something kept for parameters alone": (counted_for_parameters, "its forward changes the attribute 'held'"),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, size: int) -> None:
    forward, message = REFUSED[name]
    with pytest.raises(FuseError, match=message):
        assert_fused_is_alone(ToyStudy(lambda n: TwoLayers(forward, with_counter).double(), "sgd", batches()), size)
