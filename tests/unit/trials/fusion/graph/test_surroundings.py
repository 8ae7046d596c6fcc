"""What surrounds calls, and functions with a backward of their own: a graph loses both, so the user's code runs."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tests.support.fused_and_solo import ToyStudy, members
from tests.support.random_models.surroundings import Halved, Straight
from tests.support.slow_cases import crossed
from tests.support.two_layers import Forward, TwoLayers, assert_fused_is_alone, batches, plain
from trials import FuseError, TrialGroup
from trials.fusion.graph.trace import trace
from trials.gate.base import OpenGate

LOOP, VMAP, RULE = "loop over trials", "vmap", "rule"


class OwnVmap(Halved):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return OwnVmap.apply(x), in_dims[0]


class DrawingVmap(Halved):
    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return DrawingVmap.apply(x), in_dims[0]


class OtherVmap(Halved):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return OtherVmap.forward(x), in_dims[0]


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[0].sign()


@torch.library.custom_op("tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_autograd(lambda ctx, gradient: gradient * 7)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is functional.linear else found


@contextlib.contextmanager
def own_manager() -> Iterator[None]:
    with torch.no_grad():
        yield


@torch.no_grad()
def decorated(m: TwoLayers, x: Tensor) -> Tensor:
    return m.a(x)


def inside(manager: Callable[[], Any]) -> Forward:
    def forward(m: TwoLayers, x: Tensor) -> Tensor:
        with manager():
            y = m.a(x)
        return m.b(y.tanh())

    return forward


def inference(m: TwoLayers, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = m.a(x)
    return m.b(x) + y.clone() * 2


def nested(m: TwoLayers, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.a(x)
        with torch.enable_grad():
            z = m.a(x)
    return m.b(y + z)


def scaled_when_saved(m: TwoLayers, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t / t.abs().max(), lambda t: t):
        y = m.a(x).tanh().square()
    return m.b(y)


def attention(m: TwoLayers, x: Tensor) -> Tensor:
    y = m.a(x).view(1, 1, 5, 4)
    with sdpa_kernel(SDPBackend.MATH):
        y = functional.scaled_dot_product_attention(y, y, y)
    return m.b(y.view(5, 4))


def other_rate(m: TwoLayers, x: Tensor) -> Tensor:
    rate, m.drop.p = m.drop.p, 0.7
    y = m.b(m.drop(m.a(x)))
    m.drop.p = rate
    return y


def forked(m: TwoLayers, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        y = m.drop(m.a(x))
    return m.b(m.drop(y))


def forward_mode(m: TwoLayers, x: Tensor) -> Tensor:
    dual = torch.autograd.forward_ad
    with dual.dual_level():
        y = dual.unpack_dual(m.a(dual.make_dual(x, torch.ones_like(x))).tanh()).tangent
    assert y is not None
    return m.b(y)


def default_type(m: TwoLayers, x: Tensor) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    third = torch.ones(4) / 3
    torch.set_default_dtype(before)
    return m.b(m.a(x) + third)


def checkpointed(reentrant: bool, first: bool) -> Forward:
    def forward(m: TwoLayers, x: Tensor) -> Tensor:
        y = checkpoint(lambda z: m.drop(m.a(z)).tanh(), x if first else m.norm(x), use_reentrant=reentrant)
        return m.b(y)

    return forward


def hooked(m: TwoLayers, x: Tensor) -> Tensor:
    y = m.a(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 3)
    return m.b(y)


def penalty(m: TwoLayers, x: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(m.a(z).tanh().sum(), z, create_graph=True)
    return m.b(m.a(x)) + gradient.square().sum(1, keepdim=True)


def changes_a_mode(m: TwoLayers, x: Tensor) -> Tensor:
    m.drop.eval()
    y = m.drop(m.a(x))
    m.drop.train(m.training)
    return m.b(m.drop(y))


def leaves_a_mode(m: TwoLayers, x: Tensor) -> Tensor:
    m.norm.eval()
    return m.b(m.norm(m.a(x)))


def switched_for_a_while(m: TwoLayers, x: Tensor) -> Tensor:
    """What fails in between, under trace or vmap, leaves gradients off."""
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    y = m.a(x) if x.sum() < 1e9 else x
    torch.set_grad_enabled(before)
    return m.b(y) + m.a(x)


def replaced_forward(m: TwoLayers) -> None:
    own = types.MethodType(lambda layer, x: functional.linear(x, layer.weight) * 3, m.a)
    m.a.forward = own  # type: ignore[method-assign]


def hooked_layer(m: TwoLayers, x: Tensor) -> Tensor:
    """A hook on a layer, for a while."""
    handle = m.a.register_forward_hook(lambda layer, inputs, y: y * 2)
    y = m.a(x)
    handle.remove()
    return m.b(y)


FORWARDS: dict[str, tuple[Forward, str]] = {
    "no_grad": (inside(torch.no_grad), VMAP),
    "no_grad as a decorator": (lambda m, x: m.b(decorated(m, x)), VMAP),
    "no_grad in a manager of the user's": (inside(own_manager), VMAP),
    "set_grad_enabled": (inside(lambda: torch.set_grad_enabled(False)), VMAP),
    "gradients in no_grad": (nested, VMAP),
    "gradients off in code that fails": (switched_for_a_while, VMAP),
    "gradients as they are": (inside(torch.enable_grad), RULE),
    "detach": (lambda m, x: m.b(m.a(x).detach()), RULE),
    "inference mode": (inference, VMAP),
    "autocast": (inside(lambda: torch.autocast("cpu", torch.bfloat16)), VMAP),
    "device": (inside(lambda: torch.device("cpu")), VMAP),
    "kernels of attention": (attention, VMAP),
    "default type": (default_type, VMAP),
    "hooks on saved tensors": (scaled_when_saved, LOOP),
    "a function mode": (inside(Doubling), LOOP),
    "forked random numbers": (forked, LOOP),
    "a seed": (lambda m, x: m.b(m.drop(torch.manual_seed(3) and m.a(x))), LOOP),
    "forward-mode derivatives": (forward_mode, LOOP),
    "straight-through": (lambda m, x: m.b(Straight.apply(m.a(x) * 3)), LOOP),
    "a rule for vmap": (lambda m, x: m.b(Halved.apply(m.a(x))), VMAP),
    "own vmap": (lambda m, x: m.b(OwnVmap.apply(m.a(x))), VMAP),
    "own vmap that draws": (lambda m, x: m.b(m.drop(DrawingVmap.apply(m.a(x)) if m.training else m.a(x))), LOOP),
    "own vmap with other derivatives": (lambda m, x: m.b(OtherVmap.apply(m.a(x))), LOOP),
    "differentiable once": (lambda m, x: m.b(Once.apply(m.a(x))), LOOP),
    "a custom operator": (lambda m, x: m.b(twice(m.a(x))), LOOP),
    "checkpoint": (checkpointed(False, True), RULE),
    "checkpoint, reentrant": (checkpointed(True, False), LOOP),
    "checkpoint, reentrant, that trains nothing": (checkpointed(True, True), LOOP),
    "a hook on a value": (hooked, LOOP),
    "a hook on a layer": (hooked_layer, VMAP),
    "derivatives by autograd": (penalty, LOOP),
    "derivatives by torch.func": (
        lambda m, x: m.b(torch.func.grad(lambda z: m.a(z).tanh().sum())(x)), LOOP,
    ),
    "vmap inside": (lambda m, x: m.b(torch.vmap(m.a)(x)), LOOP),
    "a mode changed for a while": (changes_a_mode, LOOP),
    "a mode changed": (leaves_a_mode, LOOP),
    "a number changed for a while": (other_rate, LOOP),
    "a number changed for a while, untraced": (lambda m, x: other_rate(m, x) if x.any() else x, LOOP),
}  # fmt: skip


@pytest.mark.parametrize(("name", "size"), crossed(FORWARDS, [1, 2], 2))
def test_forward(name: str, size: int) -> None:
    forward, way = FORWARDS[name]
    found = assert_fused_is_alone(ToyStudy(lambda n: TwoLayers(forward).double(), "sgd", batches()), size)
    assert size == 1 or found.startswith(way)


@pytest.mark.parametrize("sizes", [((2, 2), (1, 2)), ([2, 2], [1, 2])], ids=["tuple", "list"])
@pytest.mark.parametrize("looks", [False, True])
def test_several_numbers_changed_for_a_while(looks: bool, sizes: tuple[Any, Any]) -> None:
    def forward(m: TwoLayers, x: Tensor) -> Tensor:
        if looks and x.sum() > 1e9:
            return x
        usual, m.held.output_size = m.held.output_size, sizes[1]
        y = m.b(m.a(x)) + m.held(m.a(x)[None]).sum()
        m.held.output_size = usual
        return y

    def with_pool(m: TwoLayers) -> None:
        m.held = nn.AdaptiveAvgPool2d(sizes[0])

    study = ToyStudy(lambda n: TwoLayers(forward, with_pool).double(), "sgd", batches())
    assert assert_fused_is_alone(study, 2).startswith(LOOP)


@pytest.mark.parametrize("looks", [None, lambda m, x: len(x), lambda m, x: m.a(x).sum()], ids=["no", "length", "data"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_checkpoint_around_what_changes_buffers(size: int, reentrant: bool, looks: Forward | None) -> None:
    """Alone, the batch norm's statistics move twice in a step."""

    def forward(m: TwoLayers, x: Tensor) -> Tensor:
        if looks is not None and looks(m, x) > 1e9:
            return x
        return m.b(checkpoint(lambda z: m.norm(z).tanh(), m.a(x), use_reentrant=reentrant))

    study = ToyStudy(lambda n: TwoLayers(forward).double(), "sgd", batches())
    with pytest.raises(FuseError, match=r"a part of the forward twice.*changes buffers.*allowed: no checkpoint"):
        assert_fused_is_alone(study, size)


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_checkpoint_that_draws_anew(size: int, reentrant: bool, looks: bool) -> None:
    """Alone, dropout has one mask in the forward, and another in the backward."""

    def forward(m: TwoLayers, x: Tensor) -> Tensor:
        if looks and m.a(x).sum() > 1e9:
            return x
        return m.b(checkpoint(m.drop, m.a(x), use_reentrant=reentrant, preserve_rng_state=False))

    study = ToyStudy(lambda n: TwoLayers(forward).double(), "sgd", batches())
    with pytest.raises(FuseError, match=r"preserve_rng_state=False draws other.*allowed: preserve_rng_state=True"):
        assert_fused_is_alone(study, size)


def test_layer_with_a_forward_of_its_own() -> None:
    study = ToyStudy(lambda n: TwoLayers(plain, replaced_forward).double(), "sgd", batches())
    assert assert_fused_is_alone(study, 2) == "vmap: module 'a' (Linear) has a forward of its own"


def test_autocast_that_is_off_as_it_is_while_tracing() -> None:
    class Lowered(ToyStudy):
        autocast = torch.bfloat16

    def off(m: TwoLayers, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return m.a(x)

    study = Lowered(lambda n: TwoLayers(off), "sgd")
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    found = group._fused.train
    with torch.autocast("cpu", torch.bfloat16):
        assert found.run(torch.ones(5, 4), torch.device("cpu")).dtype == torch.float32


def test_mode_of_the_models_outlives_a_trace() -> None:
    model = TwoLayers(changes_a_mode)
    model.norm.eval()
    with pytest.raises(FuseError, match="the forward sets the mode of Dropout"):
        trace(model, training=True)
    assert model.training and model.drop.training and not model.norm.training


def freezes(m: TwoLayers, x: Tensor) -> Tensor:
    m.a.requires_grad_(False)
    return plain(m, x)


def freezes_for_a_while(m: TwoLayers, x: Tensor) -> Tensor:
    m.a.weight.requires_grad = False
    for parameter in m.a.parameters():
        parameter.requires_grad_(False)
    y = m.a(x)
    for parameter in m.a.parameters():
        parameter.requires_grad_(True)
    return m.b(y)


FOREIGN = nn.Parameter(torch.ones(4, dtype=torch.float64))

REFUSED: dict[str, tuple[Forward, str]] = {
    "freezes": (freezes, "sets requires_grad in .*allowed: torch.no_grad"),
    "freezes for a while": (freezes_for_a_while, r"sets requires_grad in a\.weight.*allowed: torch.no_grad"),
    "a parameter of nobody": (lambda m, x: m.b(m.a(x)) * FOREIGN, r"trains a parameter of shape \[4\] that its module"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    forward, message = REFUSED[name]
    with pytest.raises(FuseError, match=message):
        assert_fused_is_alone(ToyStudy(lambda n: TwoLayers(forward).double(), "sgd", batches()), 2)


def test_scripted_module_is_refused() -> None:
    study = ToyStudy(lambda n: nn.Sequential(torch.jit.script(nn.Linear(4, 4))), "sgd", batches())
    with pytest.raises(FuseError, match=r"module '0' is compiled by torch\.jit; allowed"):
        assert_fused_is_alone(study, 2)


def test_backward_that_runs_the_module_again_is_loud() -> None:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.module = module
            return module(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                ctx.module(x).backward(gradients[0])
            return None, x.grad

    def forward(m: TwoLayers, x: Tensor) -> Tensor:
        return m.b(Again.apply(m.a, x.clone().requires_grad_()))

    with pytest.raises(FuseError, match="uses a parameter or a buffer of its module"):
        assert_fused_is_alone(ToyStudy(lambda n: TwoLayers(forward).double(), "sgd", batches()), 2)
