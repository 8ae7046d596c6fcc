"""Trains trials of any study fused, and each alone by plain PyTorch, and says how far apart they are.

The bound is the model's own sensitivity: how far a trial alone moves when its input and its parameters change by one
rounding, in the coarsest type that it computes in.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.fused_and_solo import Batch, ToyStudy, members
from trials import TrialGroup
from trials.fusion.own_code.trees import apart
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit
from trials.training.audits.record import GRADIENT, LOSS, OUTPUT, SCORE, Record
from trials.training.member import build

MOVED = 64.0
"""A kernel rounds in each of its sums, where a nudge rounds its operands once."""
ROUNDED = 256.0
"""Roundings of sums of one sign, which nudges that cancel do not show."""
NUDGES = 1, 2, 3
"""The seeds of nudges, of which the first may be enough. A batch norm over a few values is chaotic, and how far one
nudge moves it is chance."""

Made = dict[str, Tensor]
"""All that a trial makes in its steps, by name."""


class Recording(Audit):
    """Audits nothing, but keeps what all trials of a group make in each step, with the axis K."""

    def __init__(self, study: ToyStudy) -> None:
        super().__init__(study)
        self.made: Made = {}
        self._steps = 0

    def is_due(self, group: Any, mode: Any, kind: Any) -> bool:
        return True

    def run(self, group: Any, mode: Any, kind: Any, step: Any, alone: Any) -> Any:
        record = Record(row=slice(None))  # type: ignore[arg-type]  # all rows
        result = step(record)
        self._steps += 1
        for key, value in record.values.items():
            if value is not None:
                self.made[f"step {self._steps}, {key}"] = value.detach().clone()
        return result


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far apart the trials are, fused and alone.

    Attributes:
        ways: each layer's name, and how it was computed.
        worst: the name of what is furthest apart, in shares of its bound.
        share: that share; above 1, they differ.
        blind: the largest bound of a loss, as a share of the loss. Where it is not small, the comparison says little.
        kind: the type whose rounding counts: the finest that explains all differences, of those it computes in.
    """

    ways: list[tuple[str, str]]
    worst: str
    share: float
    blind: float
    kind: torch.dtype


def fused_and_alone(study: ToyStudy, size: int = 3) -> Verdict:
    """Train `size` trials on the study's batches, evaluate them, and compare all that they make.

    Raises:
        FuseError: they cannot be fused.
    """
    kinds = _Kinds()
    alone = [made_alone(study, number, watch=kinds) for number in range(size)]
    recording = Recording(study)
    group = TrialGroup(study, members(study, range(size)), OpenGate(), recording)
    for batch in study.data:
        group.train_step(*batch)
    ways = group.ways()
    group.evaluate()
    fused = [{name: value[row] for name, value in recording.made.items()} for row in range(size)]
    for row, made in enumerate(fused):
        made.update({f"final {name}": value for name, value in group.extract(row)[0].items()})
    for kind in sorted(kinds.seen, key=lambda each: torch.finfo(each).eps):
        eps = torch.finfo(kind).eps
        nudged: list[list[Made]] = [[] for _ in range(size)]
        for seed in NUDGES:
            for number, own in enumerate(nudged):
                own.append(made_alone(study, number, eps, seed))
            found = [_compared(fused[n], alone[n], nudged[n], eps) for n in range(size)]
            shares = {f"trial {n}, {name}": share for n, (its, _) in enumerate(found) for name, share in its.items()}
            worst = max(shares, key=shares.__getitem__)
            verdict = Verdict(ways, worst, shares[worst], max(blind for _, blind in found), kind)
            if verdict.share <= 1:
                return verdict
    return verdict


def _compared(fused: Made, alone: Made, nudged: Sequence[Made], eps: float) -> tuple[dict[str, float], float]:
    """Return the shares of the bound, by name, and the largest bound of a loss as a share of it."""
    shares, blind = {}, 0.0
    assert fused.keys() >= alone.keys(), f"fused trials lack {sorted(alone.keys() - fused.keys())}"
    for name, value in alone.items():
        bound = MOVED * max(_apart(value, made[name]) for made in nudged) + ROUNDED * eps * _size(value)
        shares[name] = _share(fused[name], value, bound)
        if LOSS in name:
            blind = max(blind, bound / max(_size(value), 1e-3))
    return shares, blind


def made_alone(
    study: ToyStudy,
    number: int,
    eps: float = 0.0,
    seed: int = 0,
    watch: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it has no state
) -> Made:
    """Train one trial by ordinary PyTorch, in `watch`.

    With `eps`, inputs and first parameters change by that share of themselves, up or down.
    """
    model, optimizer, rng_state, *_ = build(study, number, {"n": number})
    assert isinstance(optimizer, torch.optim.Optimizer)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_nudged(parameter, eps, draws))
    made: Made = {}
    with torch.random.fork_rng(), watch:
        torch.set_rng_state(rng_state)
        for step, (x, y) in enumerate(study.data, 1):
            model.train()
            optimizer.zero_grad()
            outputs = model(_nudged(x, eps, draws))
            loss = study.loss(outputs, y)
            loss.backward()
            _keep_outputs(made, step, outputs)
            made[f"step {step}, {LOSS}"] = loss.detach().clone()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    made[f"step {step}, {GRADIENT} {name}"] = p.grad.clone()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for step, (x, y) in enumerate(study.validation(), len(study.data) + 1):
                outputs = model(_nudged(x, eps, draws))
                _keep_outputs(made, step, outputs)
                made[f"step {step}, {SCORE}"] = study.score(outputs, y)
                break  # a group's first batch is the one that it records
    made.update({f"final {name}": value.clone() for name, value in model.state_dict().items()})
    return made


def _keep_outputs(made: Made, step: int, outputs: Any) -> None:
    for index, tensor in enumerate(apart(outputs)[0]):
        made[f"step {step}, {OUTPUT}" + (f" [{index}]" if index else "")] = tensor.detach().clone()


def _nudged(tensor: Tensor, eps: float, draws: torch.Generator) -> Tensor:
    if not eps or not tensor.is_floating_point():
        return tensor
    signs = torch.randint(2, tensor.shape, generator=draws).to(tensor.dtype) * 2 - 1
    return tensor + tensor * (eps * signs)


def _apart(one: Tensor, other: Tensor) -> float:
    return _size(one.double() - other.double()) if one.shape == other.shape else float("inf")


def _size(value: Tensor) -> float:
    return float(value.detach().double().square().mean().sqrt()) if value.numel() else 0.0


def _share(fused: Tensor, alone: Tensor, bound: float) -> float:
    """The difference as a share of the bound."""
    if fused.shape != alone.shape or fused.dtype != alone.dtype:
        return float("inf")
    if torch.equal(fused, alone):
        return 0.0
    difference = _apart(fused, alone)
    return difference / bound if bound and difference == difference else float("inf")


class _Kinds(TorchDispatchMode):
    """Notes the floating-point types of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.seen |= {t.dtype for t in tree_leaves(found) if isinstance(t, Tensor) and t.is_floating_point()}
        return found


def study_of(make: Callable[[int], nn.Module], inputs: Sequence[Tensor]) -> ToyStudy:
    """Trials of a model in float64: each its own seed and learning rate."""
    data: list[Batch] = [(x.double() if x.is_floating_point() else x, torch.zeros(len(x))) for x in inputs]
    return ToyStudy(lambda n: drawn(make(n).double()), "adamw", data)


@torch.no_grad()
def drawn(model: nn.Module) -> nn.Module:
    """Draw what begins as a constant: among equal norms, or behind a layer of zeros, no difference would show."""
    for parameter in model.parameters():
        if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
            parameter += 0.1 * torch.randn_like(parameter)
    return model
