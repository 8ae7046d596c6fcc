"""Trains the trials of a random model fused, and each alone by plain PyTorch, and compares all that both make."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import nothing
from tests.support.random_models.models import RandomStudy, Spec, tensors_of
from trials import FuseError, Member, TrialGroup, build_member
from trials.fusion.forward import Forward
from trials.gate.base import OpenGate
from trials.training.member import group_key

STEPS = 3
NUDGED_RUNS = 2
ULPS = {torch.float64: 2.0**20, torch.float32: 2.0**14, torch.bfloat16: 4.0}
"""How many roundings of its type a number may differ, in units of the tensor's largest: kernels sum in other orders.
What is computed in a type of 16 bits is summed in another, so that little more than the last rounding differs."""
SENSITIVITY = 64.0
"""How much more it may differ than the trial alone does, where input and weights change by one rounding."""

Record = dict[str, Any]


@dataclass
class Outcome:
    """What became of a random model.

    Attributes:
        way: the plainest by which a part was computed: "rule", "vmap", "loop"; or "refused".
        reason: why it was refused.
    """

    way: str
    reason: str = ""


@dataclass
class Alone:
    """One trial in an ordinary loop.

    Attributes:
        nudge: by how much each number of its weights and inputs changes at random, relative to itself.
    """

    study: RandomStudy
    number: int
    nudge: float = 0.0
    seed: int = 0
    record: Record = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.signs = torch.Generator().manual_seed(self.seed)
        with torch.random.fork_rng():
            torch.manual_seed(self.number)
            self.model = self.study.model({"n": self.number})
            self.optimizer = self.study.optimizer({"n": self.number}, self.model)
            self.stream = torch.get_rng_state()
        self.others: tuple[Any, Any] = (
            random.Random(self.number).getstate(),
            numpy.random.RandomState(self.number).get_state(),
        )
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(self.nudged(parameter))

    def nudged(self, tensor: Tensor) -> Tensor:
        """A copy of it, of which each number is changed up or down."""
        if not self.nudge:
            return tensor.clone()
        signs = torch.randint(2, tensor.shape, generator=self.signs).to(tensor.dtype) * 2 - 1
        return tensor * (1 + self.nudge * signs)

    def train(self, step: str, inputs: Tensor, targets: Tensor) -> None:
        with self.streams():
            self.model.train()
            getattr(self.optimizer, "train", nothing)()
            self.optimizer.zero_grad()
            with self.precision():
                outputs = self.model(self.nudged(inputs))
                loss = self.study.loss(outputs, targets)
            loss.backward()
            note_outputs(self.record, step, outputs, loss)
            for name, parameter in self.model.named_parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self.record[f"{step}: gradient of {name}"] = gradient.clone()
            self.optimizer.step()
        note_state(self.record, step, self.model.state_dict(), self.optimizer.state_dict())
        self.record[f"{step}: random stream"] = self.stream

    @torch.no_grad()
    def evaluate(self, step: str) -> None:
        total, count = 0.0, 0
        with self.streams():
            self.model.eval()
            getattr(self.optimizer, "eval", nothing)()
            for index, (inputs, targets) in enumerate(self.study.validation()):
                with self.precision():
                    outputs = self.model(self.nudged(inputs))
                    score = self.study.score(outputs, targets)
                note_outputs(self.record, f"{step}, batch {index}", outputs)
                total, count = total + score.item() * len(inputs), count + len(inputs)
        self.record[f"{step}: score"] = torch.tensor(total / count).to(self.study.kind)
        note_state(self.record, step, self.model.state_dict(), {})
        self.record[f"{step}: random stream"] = self.stream

    def precision(self) -> Any:
        kind = self.study.autocast
        return nullcontext() if kind is None else torch.autocast("cpu", kind)

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Have all random numbers come from the trial's own streams."""
        before = random.getstate(), numpy.random.get_state()
        with torch.random.fork_rng():
            torch.set_rng_state(self.stream)
            random.setstate(self.others[0])
            numpy.random.set_state(self.others[1])
            try:
                yield
            finally:
                self.stream = torch.get_rng_state()
                self.others = random.getstate(), numpy.random.get_state()
                random.setstate(before[0])
                numpy.random.set_state(before[1])


def note_outputs(record: Record, step: str, outputs: Any, loss: Tensor | None = None) -> None:
    for index, tensor in enumerate(tensors_of(outputs)):
        record[f"{step}: output {index}"] = tensor.detach().clone()
    if loss is not None:
        record[f"{step}: loss"] = loss.detach().clone()


def note_state(record: Record, step: str, model: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
    for name, tensor in model.items():
        record[f"{step}: {name}"] = tensor.clone()
    _flatten(record, f"{step}: optimizer", optimizer)


def _flatten(record: Record, name: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten(record, f"{name} {key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _flatten(record, f"{name} {index}", item)
    else:
        record[name] = value.clone() if isinstance(value, Tensor) else value


class Together:
    """Trials of one structure, fused."""

    def __init__(self, study: RandomStudy, members: Sequence[Member]) -> None:
        self.study, self.group = study, TrialGroup(study, members, OpenGate())
        self.records: list[Record] = [{} for _ in members]
        self._outputs: list[Any] = []
        fused = self.group._fused
        for forward in (fused.train, fused.eval):
            self._watch(forward)

    def train(self, step: str, inputs: Tensor, targets: Tensor) -> None:
        self.group.train_step(inputs, targets)
        (outputs,) = self._taken()
        losses_K, parameters = self.group.losses_K(), self.group._fused.rows.parameters
        for row, record in enumerate(self.records):
            note_outputs(record, step, [tensor[row] for tensor in tensors_of(outputs)], losses_K[row])
            for name, parameter in parameters.items():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                record[f"{step}: gradient of {name}"] = gradient[row].clone()
            note_state(record, step, *self.group.extract(row))
            record[f"{step}: random stream"] = self.group.progress(row)["rng_state"]

    def evaluate(self, step: str) -> None:
        scores = self.group.evaluate()
        for index, outputs in enumerate(self._taken()):
            for row, record in enumerate(self.records):
                note_outputs(record, f"{step}, batch {index}", [tensor[row] for tensor in tensors_of(outputs)])
        for row, record in enumerate(self.records):
            record[f"{step}: score"] = torch.tensor(scores[row]).to(self.study.kind)
            note_state(record, step, self.group.extract(row)[0], {})
            record[f"{step}: random stream"] = self.group.progress(row)["rng_state"]

    def ways(self) -> list[str]:
        fused = self.group._fused
        return [way for forward in (fused.train, fused.eval) for _, way in forward.ways()]

    def _watch(self, forward: Forward) -> None:
        run = forward.run

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._outputs.append(run(*args, **kwargs))
            return self._outputs[-1]

        forward.run = watched  # type: ignore[method-assign]

    def _taken(self) -> list[Any]:
        taken, self._outputs = self._outputs, []
        return taken


def schedule(trial: Any, study: RandomStudy) -> None:
    """Evaluate, train, evaluate, train, and evaluate a trial, or several together."""
    trial.evaluate("before")
    for step in range(STEPS):
        trial.train(f"step {step}", *study.data[step % len(study.data)])
        if step == 0:
            trial.evaluate("between")
    trial.evaluate("after")


def check(spec: Spec) -> Outcome:
    """Train the trials of a spec fused and alone.

    Raises:
        AssertionError: they differ.
    """
    study = RandomStudy(spec)
    alone = [Alone(study, number) for number in range(spec.size)]
    for trial in alone:
        schedule(trial, study)
    before = [(inputs.clone(), targets.clone()) for inputs, targets in study.data]
    random.seed(0)
    numpy.random.seed(0)
    ways: list[str] = []
    try:
        groups: dict[Any, list[Member]] = {}
        for number in range(spec.size):
            member = build_member(study, number, {"n": number})
            groups.setdefault(group_key(member), []).append(member)
        for members in groups.values():
            together = Together(study, members)
            schedule(together, study)
            ways += together.ways()
            for member, record in zip(members, together.records, strict=True):
                assert_equal(record, alone[member.number], study)
    except FuseError as error:
        assert len(str(error)) > 20, "a reason"
        return Outcome("refused", str(error))
    finally:
        for batch, own in zip(study.data, before, strict=True):
            assert all(map(torch.equal, batch, own)), "the batches belong to all"
        changed, _ = not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"), torch.set_grad_enabled(True)
        assert not changed, "modes outlive the trials' code"
    whole = [way for way in ways if not way.startswith("vmap of the call")]  # as much a rule as any
    found = [name for name in ("loop", "vmap") if any(way.startswith(name) for way in whole)]
    return Outcome(found[0] if found else "rule")


def assert_equal(record: Record, alone: Alone, study: RandomStudy) -> None:
    """Compare in the order of the steps; what rounding explains is equal."""
    expected = alone.record
    assert record.keys() == expected.keys(), record.keys() ^ expected.keys()
    coarse = study.autocast or study.kind
    nudged: list[Record] = []
    for key, right in expected.items():
        own = record[key]
        if not isinstance(right, (Tensor, float)):
            assert own == right, f"trial {alone.number}: {key}: {own!r}, alone {right!r}"
            continue
        own, right = torch.as_tensor(own), torch.as_tensor(right)
        assert own.shape == right.shape, f"trial {alone.number}: {key}: {list(own.shape)}, alone {list(right.shape)}"
        assert own.dtype == right.dtype, f"trial {alone.number}: {key}: {own.dtype}, alone {right.dtype}"
        if torch.equal(own, right):
            continue
        assert right.is_floating_point(), f"trial {alone.number}: {key}: {own}, alone {right}"
        own, right = own.double(), right.double()
        error = _apart(own, right)
        limit = ULPS[coarse] * torch.finfo(coarse).eps * max(_largest(right), torch.finfo(coarse).eps)
        if error > limit:
            nudged = nudged or _nudged(alone, study)
            moved = max(_apart(torch.as_tensor(run[key]).double(), right) for run in nudged)
            limit += SENSITIVITY * moved
        assert error <= limit, f"trial {alone.number}: {key}: off by {error:.2e}, rounding explains {limit:.2e}"


def _nudged(alone: Alone, study: RandomStudy) -> list[Record]:
    """What the trial alone makes of slightly other numbers."""
    runs = [
        Alone(study, alone.number, torch.finfo(study.autocast or study.kind).eps, seed) for seed in range(NUDGED_RUNS)
    ]
    for run in runs:
        schedule(run, study)
    return [run.record for run in runs]


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest difference; what is not finite equals itself."""
    same = (one == other) | (one.isnan() & other.isnan())
    return float(torch.where(same, 0.0, (one - other).abs().nan_to_num(torch.inf)).max()) if one.numel() else 0.0


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def model_of(spec: Spec) -> nn.Module:
    """One trial's model, to look at."""
    return RandomStudy(spec).model({"n": 0})
