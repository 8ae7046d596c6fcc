"""Random numbers that the user's code draws in the backward pass: each trial's own, or refused."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trials
from tests.support.fused_and_solo import Solo, ToyStudy, assert_same_trial, close, members
from tests.support.two_layers import Forward, TwoLayers, assert_fused_is_alone, batches, hooked, plain
from trials import FuseError, TrialGroup
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit


def study_of(forward: Forward) -> ToyStudy:
    return ToyStudy(lambda n: TwoLayers(forward).double(), batches=batches())


class Noisy(torch.autograd.Function):
    """Adds noise to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] + torch.randn_like(gradients[0])


def noise(gradient: Tensor) -> Tensor:
    return gradient + torch.empty_like(gradient).normal_()


def noisy_function(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.drop(Noisy.apply(m.drop(m.a(x)))))


def noisy_hook(m: TwoLayers, x: Tensor) -> Tensor:
    return m.drop(hooked(m, m.drop(x), noise))


def noisy_hook_on_the_output(m: TwoLayers, x: Tensor) -> Tensor:
    y: Tensor = m.b(Noisy.apply(m.a(m.drop(x))))
    if y.requires_grad:
        y.register_hook(noise)
    return y


def noise_of_a_module(layer: nn.Module, given: Any, own: Any) -> Any:
    return (noise(given[0]),)


def noisy_hook_of_a_module(m: TwoLayers, x: Tensor) -> Tensor:
    handle = m.b.register_full_backward_hook(noise_of_a_module)
    y: Tensor = m.b(Noisy.apply(m.a(x)))
    handle.remove()
    return m.drop(y)


NOISY = [noisy_function, noisy_hook, noisy_hook_on_the_output, noisy_hook_of_a_module]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("forward", NOISY)
def test_each_trial_draws_in_the_backward_pass_from_its_own_stream(forward: Forward, size: int) -> None:
    study = study_of(forward)
    others = torch.get_rng_state()
    assert_fused_is_alone(study, size)
    assert torch.equal(torch.get_rng_state(), others)


class DrawingGate(OpenGate):
    """While it is shut, others draw."""

    def enter(self, unit: int) -> None:
        torch.rand(3)


@pytest.mark.parametrize("forward", NOISY)
def test_what_others_draw_meanwhile_does_not_matter(forward: Forward) -> None:
    study = study_of(forward)
    groups = [TrialGroup(study, members(study, range(2)), gate) for gate in (OpenGate(), DrawingGate())]
    for batch in study.data:
        for group in groups:
            group.train_step(*batch)
    one, other = (group.extract(1)[0] for group in groups)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("forward", NOISY)
def test_so_it_does_in_a_loop_of_ones_own(forward: Forward) -> None:
    models = [TwoLayers(forward).double() for _ in range(2)]
    streams = [torch.Generator().manual_seed(n) for n in range(2)]
    fused = trials.fuse(models, streams)
    x, _ = batches()[0]
    others = torch.get_rng_state()
    fused(x).sum().backward()
    assert torch.equal(torch.get_rng_state(), others)
    for row, model in enumerate(models):
        with torch.random.fork_rng():
            torch.manual_seed(row)
            model(x).sum().backward()
        for name, parameter in model.named_parameters():
            found = fused.get_parameter(f"trials.{name}").grad
            if parameter.grad is not None:
                assert found is not None
                close(found[row], parameter.grad, name)


@pytest.mark.parametrize("forward", NOISY)
def test_an_audit_draws_the_same(forward: Forward) -> None:
    study = study_of(forward)
    audit = Audit(study)
    audit.tables = []
    group = TrialGroup(study, members(study, range(3)), OpenGate(), audit)
    for batch in study.data:
        group.train_step(*batch)
        group.unproven = {"training"}
    assert (audit.mismatches, audit.done) == (0, 3)


class ByRule(Noisy):
    """The same for all trials at once."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """It keeps nothing."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 1

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return ByRule.apply(x), in_dims[0]


class ByMadeRule(Noisy):
    generate_vmap_rule = True
    setup_context = ByRule.setup_context

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 1


def noisy_hook_on_a_parameter(m: TwoLayers, x: Tensor) -> Tensor:
    if m.training:
        m.a.weight.register_hook(noise)
    return m.b(m.a(x))


def swallowing(m: TwoLayers, x: Tensor) -> Tensor:
    def try_it(gradient: Tensor) -> Tensor:
        try:
            return noise(gradient)
        except Exception:
            return gradient

    if m.training:
        m.a.weight.register_hook(try_it)
    return m.b(m.a(x))


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.b(ByRule.apply(m.a(x))),
        lambda m, x: m.b(ByMadeRule.apply(m.a(x))),
        noisy_hook_on_a_parameter,
        swallowing,
    ],
    ids=["rule", "made rule", "parameter", "caught"],
)
def test_random_numbers_that_are_no_trials_are_refused(forward: Forward) -> None:
    with pytest.raises(FuseError, match="the backward pass draws random numbers where they are no trial's own"):
        assert_fused_is_alone(study_of(forward), 3)


def with_a_hook(outputs: Tensor) -> Tensor:
    if outputs.requires_grad:
        outputs.register_hook(noise)
    return outputs


@pytest.mark.parametrize("first", [0, 5], ids=["at once", "late"])
@pytest.mark.parametrize("make_noisy", [Noisy.apply, with_a_hook], ids=["function", "hook"])
@pytest.mark.parametrize("forward", [plain, noisy_function], ids=["rules", "own code"])
@pytest.mark.parametrize("size", [1, 3])
def test_so_are_those_of_a_loss(
    size: int, forward: Forward, make_noisy: Callable[[Tensor], Tensor], first: int
) -> None:
    """Whenever they begin: here with the first batch whose targets are not 0."""

    class NoisyLoss(ToyStudy):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return super().loss(make_noisy(outputs) if targets.any() else outputs, targets)

    data = [(x, torch.full((5,), float(step >= first))) for step, (x, _) in enumerate(batches(7))]
    group_of = NoisyLoss(lambda n: TwoLayers(forward).double(), batches=data)
    group = TrialGroup(group_of, members(group_of, range(size)), OpenGate())
    for batch in data[:first]:
        group.train_step(*batch)
    with pytest.raises(FuseError, match="the backward pass draws random numbers where they are no trial's own"):
        group.train_step(*data[first])


@torch.library.custom_op("tests::noisy", mutates_args=())
def noisy_operator(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


noisy_operator.register_autograd(lambda ctx, gradient: noise(gradient))
noisy_operator.register_vmap(lambda info, in_dims, x: (noisy_operator(x), in_dims[0]))


def noisy_in_training(m: TwoLayers, x: Tensor) -> Tensor:
    return noisy_operator(x) if m.training else x


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.b(m.drop(noisy_in_training(m, m.a(x)))),
        lambda m, x: noisy_in_training(m, m.b(m.a(x) if x.any() else x)),
    ],
    ids=["traced", "untraced"],
)
def test_what_operators_of_the_users_draw_is_each_trials_own(forward: Forward, size: int) -> None:
    """In both passes, though no mode sees what their kernels call."""
    assert_fused_is_alone(study_of(forward), size)


def test_so_it_is_in_a_loss_and_a_score() -> None:
    class Scored(ToyStudy):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return super().loss(outputs + noisy_operator(outputs).detach(), targets)

        def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return noisy_operator(outputs).mean()

    study = Scored(lambda n: TwoLayers(plain).double(), batches=batches())
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solos = [Solo(study, number) for number in range(3)]
    for batch in study.data:
        group.train_step(*batch)
        for solo in solos:
            solo.step(*batch)
    scores = group.evaluate()
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)
        with torch.random.fork_rng():
            torch.set_rng_state(solo.rng_state)
            close(scores[row], solo.score(), "score")


def test_what_a_hook_asks_of_a_gradients_memory_is_answered() -> None:
    """In the first pass, too, in which such questions about parameters are refused."""

    def checked(gradient: Tensor) -> Tensor:
        return noise(copy.deepcopy(gradient)) * float(gradient.untyped_storage().nbytes() > 0)

    assert_fused_is_alone(study_of(lambda m, x: m.drop(hooked(m, x, checked))), 3)


def test_hooks_of_a_users_own_loop_draw_from_no_trials_stream() -> None:
    def trained(hook: Callable[[Tensor], Tensor] | None) -> list[Tensor]:
        torch.manual_seed(3)
        models = [TwoLayers(noisy_function).double() for _ in range(2)]
        fused = trials.fuse(models, streams := [torch.Generator().manual_seed(n) for n in range(2)])
        for parameter in fused.parameters() if hook is not None else ():
            parameter.register_hook(hook)
        for x, _ in batches():
            fused(x).sum().backward()
        return [stream.get_state() for stream in streams]

    assert all(map(torch.equal, trained(noise), trained(None)))


def test_a_loss_of_a_users_own_loop_may_draw_from_the_trials_streams() -> None:
    models = [TwoLayers(noisy_function).double() for _ in range(2)]
    streams = [torch.Generator().manual_seed(n) for n in range(2)]
    fused = trials.fuse(models, streams)

    def loss(y: Tensor, stream: torch.Generator | None) -> Tensor:
        y = y + torch.randn(y.shape, dtype=y.dtype, generator=stream)
        y.register_hook(lambda gradient: gradient + torch.randn(y.shape, dtype=y.dtype, generator=stream))
        return y.square().sum()

    x, _ = batches()[0]
    torch.stack([loss(*own) for own in zip(fused(x), streams, strict=True)]).sum().backward()
    for row, model in enumerate(models):
        with torch.random.fork_rng():
            torch.manual_seed(row)
            loss(model(x), None).backward()
        for name, parameter in model.named_parameters():
            found = fused.get_parameter(f"trials.{name}").grad
            if parameter.grad is not None:
                assert found is not None
                close(found[row], parameter.grad, name)


def test_so_are_pythons_own() -> None:
    with pytest.raises(FuseError, match="the backward pass draws from Python's random"):
        assert_fused_is_alone(study_of(lambda m, x: hooked(m, x, lambda g: g * random.random())), 3)
