"""Compares steps by our kernel, in Triton's interpreter, with `torch.optim`, and with the rules in every bit.

Shapes, hyperparameters, missing gradients and lost trials are drawn at random. Run with TRITON_INTERPRET=1.
"""

import copy
import random
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.interpreted import interpret, launches
from trials.fusion.compared.structure import canonical_names, stack, structure
from trials.fusion.rows import Rows
from trials.optim import FusedOptimizer, fuse_optimizers, multi_tensor
from trials.optim.gradients import Gradients

STEPS = 5
Draw = random.Random


def adam(kind: type[torch.optim.Optimizer], draw: Draw) -> Callable[[], dict[str, Any]]:
    switches = {"amsgrad": draw.random() < 0.4, "maximize": draw.random() < 0.3}
    decays = draw.random() < 0.6
    return lambda: {
        "lr": draw.choice([0.0, 1e-3, 0.05]),
        "betas": (draw.choice([0.0, 0.3, 0.9]), draw.choice([0.2, 0.5, 0.999])),
        "eps": draw.choice([1e-8, 1e-3]),
        "weight_decay": draw.choice([0.0, 0.1]) if decays else 0.0,
        **switches,
    }


def sgd(kind: type[torch.optim.Optimizer], draw: Draw) -> Callable[[], dict[str, Any]]:
    nesterov, maximize, decays = draw.random() < 0.4, draw.random() < 0.3, draw.random() < 0.6
    momenta = [0.3, 0.9] if nesterov else draw.choice([[0.0], [0.0, 0.5, 0.9]])
    return lambda: {
        "lr": draw.choice([0.0, 1e-2, 0.3]),
        "momentum": draw.choice(momenta),
        "dampening": 0.0 if nesterov else draw.choice([0.0, 0.3]),
        "weight_decay": draw.choice([0.0, 0.1]) if decays else 0.0,
        "nesterov": nesterov,
        "maximize": maximize,
    }


KINDS = [(torch.optim.Adam, adam), (torch.optim.AdamW, adam), (torch.optim.SGD, sgd)]


def fused(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> tuple[Rows, FusedOptimizer]:
    rows = stack(models, [structure(m) for m in models], [torch.Generator() for _ in models])
    return rows, fuse_optimizers(optimizers, rows, [canonical_names(m) for m in models])


def drawn_change(draw: Draw, count: int, stream: torch.Generator) -> Gradients:
    factor_K, limit_K = (
        torch.rand(count, dtype=torch.float64, generator=stream) if draw.random() < 0.5 else None for _ in range(2)
    )
    alive_K = torch.rand(count, generator=stream) < 0.7 if draw.random() < 0.5 else None
    return Gradients(factor_K, limit_K, alive_K)


def compare(seed: int, interpreted: Callable[[bool], None]) -> None:
    """One group of trials: by our kernel, by PyTorch's, and each trial alone."""
    draw, stream = random.Random(seed), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    kind, settings = draw.choice(KINDS)
    count, dtype = draw.randint(1, 5), draw.choice([torch.float32, torch.float64])
    sizes = [draw.randint(1, 12) for _ in range(draw.randint(2, 4))]
    layers = [nn.Linear(a, b, bias=draw.random() < 0.7) for a, b in pairwise(sizes)]
    models: list[nn.Module] = [copy.deepcopy(nn.Sequential(*layers)).to(dtype) for _ in range(count)]
    make = settings(kind, draw)
    given = [make() for _ in models]
    sides = []
    for by_kernel in (True, False):
        interpreted(by_kernel)
        sides.append(fused(models, [kind(m.parameters(), **own) for m, own in zip(models, given, strict=True)]))
    solos = [kind(m.parameters(), **own) for m, own in zip(models, given, strict=True)]
    change = drawn_change(draw, count, stream)
    lost = [row for row in range(count) if change.alive_K is not None and not change.alive_K[row]]
    for _ in range(STEPS):
        gradients = {
            name: torch.randn(p.shape, dtype=dtype, generator=stream) if draw.random() < 0.8 else None
            for name, p in sides[0][0].parameters.items()
        }
        skip = [row for row in range(count) if draw.random() < 0.05]
        for by_kernel, (rows, optimizer) in zip((True, False), sides, strict=True):
            interpreted(by_kernel)
            for name, p in rows.parameters.items():
                p.grad = gradients[name]
            optimizer.step(gradients=change, skip=skip)
        for row, (model, solo) in enumerate(zip(models, solos, strict=True)):
            for name, p in model.named_parameters():
                whole = gradients[name]
                p.grad = None if whole is None else change.apply(whole)[row].clone()
            if row not in (*lost, *skip):
                solo.step()
    ours, theirs = sides
    assert_same(ours, theirs, models, solos, [row for row in range(count) if row not in lost], seed)


def assert_same(
    ours: tuple[Rows, FusedOptimizer],
    theirs: tuple[Rows, FusedOptimizer],
    models: list[nn.Module],
    solos: list[torch.optim.Optimizer],
    living: list[int],
    seed: int,
) -> None:
    bound = {torch.float32: 1e-5, torch.float64: 1e-12}
    for name, p in ours[0].parameters.items():
        assert torch.equal(p, theirs[0].parameters[name]), f"other bits than the rule: seed {seed}, {name}"
        for row, model in enumerate(models):
            own = model.get_parameter(name)
            torch.testing.assert_close(p[row], own, rtol=bound[p.dtype], atol=bound[p.dtype], msg=f"seed {seed}")
    for row, solo in enumerate(solos):
        one, other = (side[1].extract(row)["state"] for side in (ours, theirs))
        for index, state in one.items():
            for what, value in state.items():
                assert not isinstance(value, Tensor) or torch.equal(value, other[index][what]), (seed, row, what)
                if row in living and isinstance(value, Tensor):
                    alone = torch.as_tensor(solo.state_dict()["state"][index][what]).to(value)
                    torch.testing.assert_close(value, alone, rtol=1e-5, atol=1e-5, msg=f"seed {seed} {what}")


def main(first: int, last: int) -> None:
    """Compare the groups of these seeds."""
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)

        def interpreted(ours: bool) -> None:
            patch.setattr(multi_tensor, "runs_on", lambda device: ours)

        for seed in range(first, last):
            compare(seed, interpreted)
    assert launches.keys() == {"adam", "sgd"} and all(multi_tensor._believed.values()), multi_tensor._believed


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
