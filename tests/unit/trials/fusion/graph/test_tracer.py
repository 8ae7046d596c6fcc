"""What is replaced for the time of a trace."""

import threading
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _device

from trials.fusion.graph.trace import trace
from trials.fusion.graph.tracer import Tracer, recording


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Any) -> Any:
        return self.layer(x) + torch.randn(4)


def test_what_a_forward_draws_becomes_a_node_and_is_not_drawn() -> None:
    model, before = Noisy(), torch.get_rng_state()
    graph = trace(model, training=True).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"].count(torch.randn) == 1
    assert torch.equal(before, torch.get_rng_state())


def test_another_thread_draws_meanwhile() -> None:
    """Such as one that reads batches."""
    drawn: list[Any] = []
    stream = torch.Generator()

    def read() -> None:
        drawn.append(torch.randn(3, generator=stream))

    tracer = Tracer()
    tracer.graph = fx.Graph(tracer_cls=Tracer)
    with recording(tracer):
        reading = threading.Thread(target=read)
        reading.start()
        reading.join()
        assert isinstance(torch.randn(3), fx.Proxy)
    assert drawn[0].shape == (3,)
    assert torch.randn(3, generator=stream).shape == (3,)


def test_pytorch_still_knows_which_functions_make_tensors_on_a_default_device() -> None:
    """It lists them once, when it is first asked, perhaps within a trace."""
    _device._device_constructors.cache_clear()
    tracer = Tracer()
    with recording(tracer), torch.device("meta"):
        torch.tensor(1.0)
    with torch.device("meta"):
        assert torch.zeros(2).device.type == torch.randn(2).device.type == "meta"
