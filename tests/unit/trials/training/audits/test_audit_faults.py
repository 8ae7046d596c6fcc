"""An audit finds each fault that is put into the fused way, and trials then give what they give alone."""

import copy
import random
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.support.audited import Audited, data, perceptron
from tests.support.fused_and_solo import (
    ToyStudy,
    assert_same_trial,
    close,
    members,
)
from tests.support.own_optimizers import Averaging, Lookahead, Remembering
from trials import TrialGroup
from trials.fusion.errors import RefusedError
from trials.fusion.graph.own_tensors import OwnTensors
from trials.fusion.graph.steps import CallStep, State
from trials.fusion.layers.activations import FusedElementwise
from trials.fusion.layers.dropout import FusedDropout
from trials.fusion.layers.norm import FusedBatchNorm, FusedLayerNorm
from trials.fusion.own_code.together import Together
from trials.fusion.rows import Rows
from trials.fusion.scores.scalar import Scalar
from trials.gate.base import OpenGate
from trials.optim.originals import Originals
from trials.optim.sgd import SGD
from trials.optim.vector import VectorOptimizer
from trials.training.audits.audit import Audit, Mismatch


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).detach())


def test_a_frozen_part_that_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    run = CallStep.run

    def keep_gradient(step: CallStep, state: State) -> None:
        if step.target == "detach":
            step.call, step.elementwise = (lambda x: x), True
        run(step, state)

    monkeypatch.setattr(CallStep, "run", keep_gradient)
    Audited(lambda n: Frozen()).assert_moved("vmap", "encoder.bias")


def test_a_backward_of_the_users_own_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FusedElementwise.run

    def half_the_gradient(layer: FusedElementwise, x: Tensor, per_trial: bool, training: bool) -> tuple[Any, bool]:
        y, own = run(layer, x, per_trial, training)
        return y / 2 + (y / 2).detach(), own

    monkeypatch.setattr(FusedElementwise, "run", half_the_gradient)
    audited = Audited(perceptron)
    audited.assert_moved("loop", "gradient at the output of 0.Linear")
    assert [(found.way, found.then) for found in audited.found] == [("rules", "vmap"), ("vmap", "loop")]


def test_a_parameter_that_is_not_used_but_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    step = VectorOptimizer.step

    def with_zeros(optimizer: VectorOptimizer, *args: Any) -> None:
        for parameter in optimizer._rows.parameters.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        step(optimizer, *args)

    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    monkeypatch.setattr(VectorOptimizer, "step", with_zeros)
    Audited(lambda n: Spare()).assert_moved("vmap", "spare.weight")


class Regularized(nn.Module):
    """Computes with its parameters, and gives a layer weights that are not its own."""

    def __init__(self, given: bool) -> None:
        super().__init__()
        self.first, self.last, self.given = nn.Linear(4, 4), nn.Linear(4, 4), given

    def forward(self, x: Tensor) -> Tensor:
        if self.given:
            return self.last(functional_call(self.first, {"weight": self.last.weight}, (x,)).tanh())
        return self.last(self.first(x)) * torch.stack([own.square().sum() for own in self.parameters()]).sum()


def test_a_number_of_parameters_that_the_graph_has_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnTensors, "__torch_dispatch__", lambda self, func, types, args, kwargs: func(*args, **kwargs))
    Audited(lambda n: Regularized(given=False)).assert_moved("vmap", "gradient")


def test_a_rule_that_takes_its_layers_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Together, "are_given", lambda self, places: True)
    Audited(lambda n: Regularized(given=True)).assert_moved("loop", "output of")


def test_a_trial_that_computes_with_anothers_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = Rows.vector
    monkeypatch.setattr(Rows, "vector", lambda rows, path, name: vector(rows, path, name)[::-1])
    audited = Audited(lambda n: nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(0.1 + 0.3 * n), nn.Linear(5, 3)))
    audited.assert_moved("loop", "output of 1.LeakyReLU")


def test_an_optimizer_that_takes_anothers_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    coefficients = SGD.coefficients

    def mixed_up(rule: SGD, h: Any, counts: Any) -> Any:
        return coefficients(rule, {name: values[..., ::-1] for name, values in h.items()}, counts)

    monkeypatch.setattr(SGD, "coefficients", mixed_up)
    audited = Audited(perceptron, "sgd")
    audited.assert_moved("vmap", "update of")
    assert isinstance(audited.group._optimizers["forward"], Originals)


class Counting(torch.optim.SGD):
    """Keeps a number of its own beside the settings, as Prodigy and schedule-free optimizers do."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["k"] = 1

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = 0.1 / self.param_groups[0]["k"]
        self.param_groups[0]["k"] += 1
        super().step()


def test_an_optimizer_that_forgets_what_it_keeps_among_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Originals.step

    def forget(optimizer: Originals, *args: Any) -> None:
        before = copy.deepcopy(optimizer.groups_K)
        step(optimizer, *args)
        for groups, saved in zip(optimizer.groups_K, before, strict=True):
            for group, own in zip(groups, saved, strict=True):
                group.update(own)

    monkeypatch.setattr(Originals, "step", forget)
    audited = Audited(perceptron, lambda n, parameters: Counting(parameters))
    with pytest.raises(RefusedError, match=r"trial [01], fused by loop .* setting: group 0 k"):
        audited.train()
    assert [found.then for found in audited.found] == ["vmap", "loop", None]


def test_memory_that_is_tied_in_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).tanh())

    tied = Audited(lambda n: Tied())
    tied.train()
    assert not tied.found
    monkeypatch.setattr(import_module("trials.fusion.compared.structure"), "ties", lambda table: {})
    with pytest.raises(RefusedError, match=r"fused by loop .* last\.weight"):
        Audited(lambda n: Tied()).train()


KEEPING: dict[str, Callable[[int, Any], torch.optim.Optimizer]] = {
    "two modes": lambda n, ps: Averaging(ps, lr=0.1 * (n + 1), beta=0.9 - 0.1 * n),
    "in attributes": lambda n, ps: Remembering(ps, lr=0.1 * (n + 1)),
    "around another": lambda n, ps: Lookahead(torch.optim.Adam(ps, lr=0.02 * (n + 1)), 2 + n),
    "by a rule": lambda n, ps: torch.optim.NAdam(ps, lr=0.02 * (n + 1)),
}


@pytest.mark.parametrize("name", KEEPING)
def test_optimizers_keep_their_state_when_trials_move(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    audited = Audited(perceptron, KEEPING[name])
    audited.audit.tables = []  # whatever it costs
    audited.train()
    assert not audited.found
    run = FusedElementwise.run
    monkeypatch.setattr(
        FusedElementwise, "run", lambda layer, *args: (run(layer, *args)[0] * 1.01, run(layer, *args)[1])
    )
    audited.group.end_epoch()
    audited.assert_moved("loop", "output of 1.Tanh")


def test_a_layer_that_gives_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FusedLayerNorm.run
    monkeypatch.setattr(
        FusedLayerNorm, "run", lambda layer, *args: (run(layer, *args)[0].to(torch.float16), run(layer, *args)[1])
    )
    study = ToyStudy(lambda n: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)))
    study.data = data(kind=torch.float32)
    study.autocast = torch.bfloat16
    found: list[Mismatch] = []
    group = TrialGroup(study, members(study, range(2)), OpenGate(), Audit(study, on_mismatch=found.append))
    group.train_step(*study.data[0])
    assert [each.then for each in found] == ["vmap", "loop"]
    assert found[0].what.startswith("output of 1.LayerNorm is float16, alone ")


class Shares(nn.Module):
    """Refuses other parameters than those near which it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.share, self.last = nn.Parameter(torch.ones(16, 1)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not bool(((self.share - 1).abs() < 0.01).all()):
            raise ValueError("too far")
        return self.last(x * self.share.mean())


def test_a_fault_where_other_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    coefficients = SGD.coefficients

    def mixed_up(rule: SGD, h: Any, counts: Any) -> Any:
        return coefficients(rule, {name: values[..., ::-1] for name, values in h.items()}, counts)

    monkeypatch.setattr(SGD, "coefficients", mixed_up)
    Audited(lambda n: Shares(), "sgd").assert_moved("vmap", "update of", steps=1)


class Asks(nn.Module):
    """Its answer is another one while a graph is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Any) -> Tensor:
        return self.head(2 * x if isinstance(x, Tensor) else x)


def test_an_answer_that_holds_for_the_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trials.fusion.graph.trace.refuse_questions", lambda observer: None)
    monkeypatch.setattr("trials.fusion.graph.tracer.is_library", lambda frame: True)
    Audited(lambda n: Asks()).assert_moved("vmap", "output of head.Linear")


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * (1 + random.random())


def test_a_random_number_that_the_graph_has_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trials.fusion.graph.trace.refuse_foreign", lambda streams, what: None)
    audited = Audited(lambda n: Draws(), size=1)  # of several, each would have kept another
    with pytest.raises(RefusedError, match="draws from Python's random"):
        audited.train()
    assert [(found.way, found.first.key.kind) for found in audited.found] == [("rules", "the model's output")]


def test_a_buffer_that_moves_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FusedBatchNorm.run

    def farther(layer: FusedBatchNorm, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        made = run(layer, x, per_trial, training)
        if training and layer.var_KC is not None:
            layer.var_KC.data.mul_(1.001)
        return made

    monkeypatch.setattr(FusedBatchNorm, "run", farther)
    audited = Audited(lambda n: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    audited.assert_moved("loop", "buffer 1.running_var")


def test_a_random_stream_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FusedDropout.run

    def with_the_same_masks(layer: FusedDropout, x: Tensor, per_trial: bool, training: bool) -> tuple[Any, bool]:
        generators = layer.masks.generators
        states = [generator.get_state() for generator in generators]
        made = run(layer, x, per_trial, training)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return made

    monkeypatch.setattr(FusedDropout, "run", with_the_same_masks)
    audited = Audited(lambda n: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.4), nn.Linear(5, 3)))
    audited.assert_moved("loop", "random stream")


def test_a_loss_that_belongs_to_another_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Scalar.__call__

    def mixed_up(scalar: Scalar, *args: Any, **named: Any) -> Tensor:
        values_K = call(scalar, *args, **named)
        return values_K.flip(0) if scalar._name == "Study.loss" else values_K

    monkeypatch.setattr(Scalar, "__call__", mixed_up)
    with pytest.raises(RefusedError, match=r"fused by loop .* alone: loss differs by"):
        Audited(perceptron).train()


def test_a_score_that_belongs_to_another_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    by_steps = Scalar._by_steps

    def mixed_up(scalar: Scalar, *args: Any) -> Tensor | None:
        values_K = by_steps(scalar, *args)
        return values_K if values_K is None or scalar._name != "Study.score" else values_K.flip(0)

    monkeypatch.setattr(Scalar, "_by_steps", mixed_up)
    audited = Audited(perceptron)
    audited.train()
    assert not audited.found
    close(audited.group.evaluate(), [solo.score() for solo in audited.solos], "score")
    assert [(found.mode, found.first.key.kind) for found in audited.found] == [("evaluation", "score")]
    audited.train()
    for row, solo in enumerate(audited.solos):
        assert_same_trial(audited.group, row, solo)


def test_a_mismatch_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Rows, "vector", lambda rows, path, name: [0.0] * rows.size)
    Audited(lambda n: nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(0.5), nn.Linear(5, 3))).train(1)
    first, *_ = caplog.messages
    assert first.startswith("the audit found that trial 1, fused by rules with 1 others, differs in training")
    assert "output of 1.LeakyReLU differs by " in first
    assert first.endswith("trials of its structure are trained from this step on, by vmap")


class Waves(nn.Module):
    """Has a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.turn).abs()


def test_a_fault_in_imaginary_parts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Audited(lambda n: Waves(), "sgd")
    sound.audit.tables = []
    sound.train()
    assert sound.audit.done and not sound.found
    step = Originals.step

    def grow(optimizer: Originals, *args: Any) -> None:
        step(optimizer, *args)
        optimizer._rows.parameters["turn"].detach().imag.mul_(1 + 1e-9)

    monkeypatch.setattr(Originals, "step", grow)
    with pytest.raises(RefusedError, match="update of turn differs"):
        Audited(lambda n: Waves(), "sgd").train()


def test_a_large_fault_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    step = VectorOptimizer.step

    def less(optimizer: VectorOptimizer, *args: Any) -> None:
        for parameter in optimizer._rows.parameters.values():
            parameter.grad = None if parameter.grad is None else parameter.grad * 0.7
        step(optimizer, *args)

    monkeypatch.setattr(VectorOptimizer, "step", less)
    study = ToyStudy(perceptron, "sgd", data(kind=torch.float32))
    study.autocast = torch.bfloat16
    audit = Audit(study)
    TrialGroup(study, members(study, range(2)), OpenGate(), audit).train_step(*study.data[0])
    assert audit.mismatches == 1 and audit.way == "vmap"
