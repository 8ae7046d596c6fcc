"""Forwards that reach their tensors by other ways than as attributes, or give a layer other tensors than its own."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.support.fused_and_solo import ToyStudy, members
from tests.support.two_layers import Forward, TwoLayers, assert_fused_is_alone, batches, plain
from trials import TrialGroup
from trials.fusion.graph.trace import trace
from trials.gate.base import OpenGate


def with_more(m: TwoLayers) -> None:
    m.register_buffer("count", torch.ones(4))
    m.held = nn.Linear(4, 4).requires_grad_(False)


def penalized(m: TwoLayers, x: Tensor) -> Tensor:
    return plain(m, x) * torch.stack([parameter.square().sum() for parameter in m.parameters()]).sum()


def named(m: Any, x: Tensor) -> Tensor:
    return m.b(x @ m.get_parameter("a.weight").softmax(0)) * m.a._parameters["bias"].tanh()


def counted(m: TwoLayers, x: Tensor) -> Tensor:
    for name, buffer in m.named_buffers():
        if name == "count":
            buffer.mul_(0.9)
    return plain(m, x) * m.get_buffer("count")


def followed(m: Any, x: Tensor) -> Tensor:
    """A teacher that is the mean of a student over time."""
    for mean, parameter in zip(m.held.parameters(), m.a.parameters(), strict=True):
        mean.data = 0.9 * mean.data + 0.1 * parameter.data
    return m.b(m.a(x) - m.held(x))


def loaded(m: Any, x: Tensor) -> Tensor:
    mean = {name: 0.9 * value + 0.1 * m.a.state_dict()[name] for name, value in m.held.state_dict().items()}
    m.held.load_state_dict(mean)
    return m.b(m.a(x) - m.held(x))


def given_others(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(functional_call(m.a, {"weight": m.b.weight, "bias": m.a.bias}, (x,)))


def given_scaled(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(functional_call(m.a, {"weight": m.a.weight * m.b.bias, "bias": m.a.bias}, (x,)))


def set_in_a_table(m: Any, x: Tensor) -> Tensor:
    weight = m.a.weight
    m.a._parameters["weight"] = weight.tanh()  # as some libraries do
    y = m.a(x)
    m.a._parameters["weight"] = weight
    return m.b(y)


def statistics_before(m: Any, x: Tensor) -> Tensor:
    m.norm.running_mean = 0.5 * m.norm.running_mean
    return m.b(m.norm(m.a(x)))


def statistics_after(m: Any, x: Tensor) -> Tensor:
    y = m.norm(m.a(x))
    m.norm.running_mean = 0.5 * m.norm.running_mean
    return m.b(y)


FORWARDS: dict[str, Forward] = {
    "all parameters": penalized,
    "parameters by name": named,
    "buffers by name": counted,
    "new data of all parameters": followed,
    "a state that is loaded": loaded,
    "another layer's weights": given_others,
    "computed weights": given_scaled,
    "weights set in a table": set_in_a_table,
    "statistics replaced before they are used": statistics_before,
    "statistics replaced after they are used": statistics_after,
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", FORWARDS)
def test_forward(name: str, size: int) -> None:
    make = FORWARDS[name]
    assert_fused_is_alone(ToyStudy(lambda n: TwoLayers(make, with_more).double(), "sgd", batches()), size)


@pytest.mark.parametrize("name", ["all parameters", "new data of all parameters", "a state that is loaded"])
def test_tracing_changes_no_tensor(name: str) -> None:
    model = TwoLayers(FORWARDS[name], with_more)
    before = {key: (value.data_ptr(), value.clone()) for key, value in model.state_dict().items()}
    with pytest.raises(Exception, match="itself, which a graph does not keep"):
        trace(model, training=True)
    after = {key: (value.data_ptr(), value) for key, value in model.state_dict().items()}
    assert all(place == before[key][0] and torch.equal(value, before[key][1]) for key, (place, value) in after.items())


def batched() -> int:
    """How many tensors of a run under `vmap` there are."""
    gc.collect()
    found = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
    return sum(torch._C._functorch.is_batchedtensor(each) for each in found)


def test_a_run_under_vmap_leaves_no_tensors_of_its_own() -> None:
    study = ToyStudy(lambda n: TwoLayers(given_scaled, with_more).double(), "sgd", batches())
    group, before = TrialGroup(study, members(study, range(3)), OpenGate()), batched()
    group.train_step(*study.data[0])
    assert batched() == before
