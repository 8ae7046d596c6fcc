"""A model that is `nn.Sequential` all through is not traced, and has the graph that tracing would give."""

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import trials.fusion.graph.trace as tracing
from trials.fusion import FuseError
from trials.fusion.graph.trace import describe, trace


def nested(rng: random.Random, depth: int, shared: list[nn.Module]) -> nn.Sequential:
    """Layers and further chains, of which some occur twice."""
    made: list[nn.Module] = []
    for _ in range(rng.randrange(5)):
        kinds: list[Callable[[], nn.Module]] = [
            *(lambda: nn.Linear(4, 4), lambda: nn.ReLU(inplace=rng.random() < 0.5), lambda: nn.Dropout(rng.random())),
            *(lambda: nn.LayerNorm(4), nn.Identity, lambda: nn.BatchNorm1d(4), nn.GELU, lambda: nn.Flatten(1)),
        ]
        if depth:
            kinds += [partial(nested, rng, depth - 1, shared)] * 2
        if shared:
            kinds += [partial(rng.choice, shared)]
        made.append(rng.choice(kinds)())
        shared += [made[-1]] if rng.random() < 0.2 else []
    return nn.Sequential(*made)


def outcome(model: nn.Module, training: bool) -> object:
    """The graph, or the error."""
    try:
        return describe(trace(model, training).graph)
    except FuseError as error:
        return str(error).rpartition("cannot be traced: ")[2]


@pytest.mark.parametrize("seed", range(60))
def test_a_chain_has_the_graph_that_tracing_gives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    model = nested(rng, 3, [])
    chains = [outcome(model, training) for training in (True, False)]
    monkeypatch.setattr(tracing, "_chain", lambda model: None)
    assert chains == [outcome(model, training) for training in (True, False)]


class Doubled(nn.Sequential):
    """A chain with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Twice what the chain gives."""
        return 2 * super().forward(x)


def test_code_of_the_users_is_always_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = nn.Sequential(nn.Linear(4, 4))
    patched.forward = lambda input: patched[0](input) + 1  # type: ignore[method-assign]
    inside = nn.Sequential(patched)
    for model in (nn.Sequential(Doubled(nn.Linear(4, 4))), Doubled(nn.Linear(4, 4)), inside):
        assert any("add" in text or "mul" in text for _, text in describe(trace(model, True).graph))
    monkeypatch.setattr(nn.Sequential, "forward", lambda self, input: torch.relu(self[0](input)))
    assert any("relu" in text for _, text in describe(trace(nn.Sequential(nn.Linear(4, 4)), True).graph))
