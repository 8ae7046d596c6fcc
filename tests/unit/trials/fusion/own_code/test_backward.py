"""What a forward asks of a parameter's place in autograd's graph, and what it has the backward pass do."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import ToyStudy
from tests.support.two_layers import TwoLayers, assert_fused_is_alone, batches, hooked
from trials import FuseError

Forward = Callable[[TwoLayers, Tensor], Tensor]


def study_of(forward: Forward, extra: Any = None) -> ToyStudy:
    return ToyStudy(lambda n: TwoLayers(forward, extra).double(), batches=batches())


def by_gradient(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * (1.0 if m.a.weight.grad is None else 2.0)


def by_all_gradients(m: TwoLayers, x: Tensor) -> Tensor:
    sizes = [p.grad.abs().sum() for p in m.parameters() if p.grad is not None]
    return m.b(m.a(x)) * (1 + sum(sizes))


def by_gradient_by_name(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * (1.0 if getattr(m.a.weight, "grad", None) is None else 2.0)


def by_clipped_gradients(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * (1 + torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0))


def by_leaf(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.a(x * 1.5 if m.a.weight.is_leaf and float(x.sum()) < 1e9 else x))


def catching(m: TwoLayers, x: Tensor) -> Tensor:
    try:
        return by_gradient(m, x)
    except Exception:
        return m.b(m.a(x)) * 3.0


def copied_layer(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.a(x)) + copy.deepcopy(m.b)(x).detach()


def hook_by_gradient(m: TwoLayers, x: Tensor) -> Tensor:
    return hooked(m, x, lambda g: g if m.b.weight.grad is None else g * 2)


def hook_by_taken_gradient(m: TwoLayers, x: Tensor) -> Tensor:
    weight = m.b.weight
    return hooked(m, x, lambda g: g if weight.grad is None else g * 2)


def by_storage(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * sum(m.a.weight.detach().storage().tolist())


def by_all_storages(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * sum(parameter.untyped_storage().nbytes() for parameter in m.parameters())


def by_offset(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * (1 + m.a.bias.storage_offset()) * float(x.sum())


def by_version(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * m.a.weight._version


def by_own_attribute(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * getattr(m.a.weight, "scale", 1.0)


def looping_by_own_attribute(m: TwoLayers, x: Tensor) -> Tensor:
    return by_own_attribute(m, x) * float(x.sum())


def by_all_own_attributes(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * sum(getattr(parameter, "scale", 1.0) for parameter in m.parameters())


def hook_after_accumulation(m: TwoLayers, x: Tensor) -> Tensor:
    if m.training:
        m.a.weight.register_post_accumulate_grad_hook(lambda p: None)
    return m.b(m.a(x))


ASKING = [
    *(by_gradient, by_all_gradients, by_gradient_by_name, by_clipped_gradients, by_leaf, catching, copied_layer),
    *(hook_by_gradient, hook_by_taken_gradient, hook_after_accumulation),
    *(by_storage, by_all_storages, by_offset, by_version),
    *(by_own_attribute, looping_by_own_attribute, by_all_own_attributes),
]


def with_scale(m: TwoLayers) -> None:
    vars(m.a.weight)["scale"] = 2.0


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("forward", ASKING)
def test_questions_that_only_a_parameter_alone_answers_are_refused(forward: Forward, size: int) -> None:
    with pytest.raises(FuseError, match=r"asks for '.*' of the parameter"):
        assert_fused_is_alone(study_of(forward, with_scale), size)


def by_the_memory_of_all_buffers(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * sum(buffer.untyped_storage().nbytes() for buffer in m.buffers())


def by_the_memory_of_a_buffer(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.norm(m.a(x))) * sum(m.norm.get_buffer("running_var").storage().tolist())


@pytest.mark.parametrize("forward", [by_the_memory_of_all_buffers, by_the_memory_of_a_buffer])
def test_so_are_questions_about_the_memory_of_buffers(forward: Forward) -> None:
    assert_fused_is_alone(study_of(forward), 1)
    with pytest.raises(FuseError, match=r"asks for '.*storage' of the parameter 'norm.running"):
        assert_fused_is_alone(study_of(forward), 3)


def looping_by_memory_of_values(m: TwoLayers, x: Tensor) -> Tensor:
    y: Tensor = m.a(x)
    return m.b(y) * len(y.storage()) * (1 + y.storage_offset()) * float(x.sum())


@pytest.mark.parametrize("size", [1, 3])
def test_what_it_computes_answers_for_itself_and_attributes_that_it_does_not_read_do_not_matter(size: int) -> None:
    assert_fused_is_alone(study_of(looping_by_memory_of_values, with_scale), size)


def hook_with_weight(m: TwoLayers, x: Tensor) -> Tensor:
    return hooked(m, x, lambda g: g * m.b.weight.norm())


def hook_of_training(m: TwoLayers, x: Tensor) -> Tensor:
    y: Tensor = m.a(x)
    if m.training:
        y.register_hook(lambda g: g * m.b.weight.norm())
    return m.b(y)


def hook_with_number(m: TwoLayers, x: Tensor) -> Tensor:
    return hooked(m, x, lambda g: g * float(m.norm.get_buffer("running_var").sum()))


def hook_of_module(m: TwoLayers, x: Tensor) -> Tensor:
    def hook(layer: nn.Module, given: Any, own: Any) -> Any:
        return (given[0] * layer.get_parameter("weight").norm(),)

    handle = m.b.register_full_backward_hook(hook)
    y: Tensor = m.b(m.a(x))
    handle.remove()
    return y


class OfModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, m: TwoLayers) -> Tensor:
        ctx.m = m
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.m.b.weight.norm(), None


def function_of_module(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(OfModule.apply(m.a(x), m))


def of_a_layer_under_two_names(m: TwoLayers, x: Tensor) -> Tensor:
    return hooked(m, x, lambda g: g * m.held[0].weight.norm()) + m.held[1](x)


def two_names(m: TwoLayers) -> None:
    layer = nn.Linear(4, 4)
    m.held = nn.ModuleList([layer, layer])


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "forward",
    [
        hook_with_weight,
        hook_of_training,
        hook_with_number,
        hook_of_module,
        function_of_module,
        of_a_layer_under_two_names,
    ],
)
def test_no_parameter_of_the_module_is_a_trials_in_the_backward_pass(forward: Forward, size: int) -> None:
    extra = two_names if forward is of_a_layer_under_two_names else None
    with pytest.raises(FuseError, match="uses a parameter or a buffer of its module"):
        assert_fused_is_alone(study_of(forward, extra), size)


def hook_keeps(m: TwoLayers, x: Tensor) -> Tensor:
    def keep(gradient: Tensor) -> None:
        m.held = gradient.norm().item()

    return hooked(m, x, keep) * (1 + m.held)


def hook_counts(m: TwoLayers, x: Tensor) -> Tensor:
    def count(gradient: Tensor) -> None:
        m.get_buffer("seen").add_(1)

    return hooked(m, x, count) * (1 + m.get_buffer("seen"))


def holding(m: TwoLayers) -> None:
    m.held = 0.0
    m.register_buffer("seen", torch.zeros(()))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("forward", [hook_keeps, hook_counts])
def test_nothing_is_kept_in_the_backward_pass(forward: Forward, size: int) -> None:
    with pytest.raises(FuseError, match=r"in the backward pass, .* of module 'TwoLayers' changes"):
        assert_fused_is_alone(study_of(forward, holding), size)


def hook_with_taken_weight(m: TwoLayers, x: Tensor) -> Tensor:
    weight = m.b.weight
    return hooked(m, x, lambda g: g * weight.detach().norm())


def hook_of_parameter(m: TwoLayers, x: Tensor) -> Tensor:
    if m.training:
        m.a.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return m.b(m.a(x))


def clearing(m: TwoLayers, x: Tensor) -> Tensor:
    m.zero_grad()
    return m.b(m.a(x)) * (1.0 if float(x.sum()) < 1e9 else 2.0)


def adapted(m: TwoLayers, x: Tensor) -> Tensor:
    """A step of a second optimization, also in evaluation."""
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(m.b(m.a(x)).square().mean(), [m.b.weight], create_graph=True)
    return nn.functional.linear(m.a(x), m.b.weight - 0.1 * gradient)


def by_training(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * (2.0 if m.a.weight.requires_grad else 1.0)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("forward", [hook_with_taken_weight, hook_of_parameter, clearing, adapted, by_training])
def test_the_rest_is_exact(forward: Forward, size: int) -> None:
    assert_fused_is_alone(study_of(forward), size)
