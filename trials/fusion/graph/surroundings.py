"""What surrounds a call without being one of its inputs: gradient modes, autocast, default types, hooks and modes.

A graph keeps calls, but not what surrounds them. Code under `vmap` keeps all but what looks at whole tensors.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint
from torch.utils._device import DeviceContext

from trials.fusion.errors import FuseError, RefusedError
from trials.late_compiler import is_compiler_loaded

_DEVICE_TYPES = ("cpu", "cuda")
_entered_autocasts: list[int] = []


def surroundings() -> dict[str, object]:
    """Return the present surroundings of a call, each by a name for messages."""
    attention = torch.backends.cuda
    found: dict[str, object] = {
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": tuple(_entered_autocasts),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "the default type": torch.get_default_dtype(),
        "the kernels of attention": (
            attention.flash_sdp_enabled(),
            attention.mem_efficient_sdp_enabled(),
            attention.math_sdp_enabled(),
            attention.cudnn_sdp_enabled(),
        ),
        "the precision of products": torch.get_float32_matmul_precision(),
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "function modes": tuple(map(id, _get_current_function_mode_stack())),
        **over_whole_tensors(),
    }
    for kind in _DEVICE_TYPES:
        found[f"autocast on {kind}"] = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return found


def kept() -> Callable[[], None]:
    """Return a function that undoes what code may set without a ``with``, and leave so where it fails."""
    attention, sets = torch.backends.cuda, torch.set_autocast_enabled
    before: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (torch.set_grad_enabled, (torch.is_grad_enabled(),)),
        (torch.set_default_dtype, (torch.get_default_dtype(),)),
        (torch.set_autocast_cache_enabled, (torch.is_autocast_cache_enabled(),)),
        (torch.set_float32_matmul_precision, (torch.get_float32_matmul_precision(),)),
        (attention.enable_flash_sdp, (attention.flash_sdp_enabled(),)),
        (attention.enable_mem_efficient_sdp, (attention.mem_efficient_sdp_enabled(),)),
        (attention.enable_math_sdp, (attention.math_sdp_enabled(),)),
        (attention.enable_cudnn_sdp, (attention.cudnn_sdp_enabled(),)),
        *((sets, (kind, torch.is_autocast_enabled(kind))) for kind in _DEVICE_TYPES),
        *((torch.set_autocast_dtype, (kind, torch.get_autocast_dtype(kind))) for kind in _DEVICE_TYPES),
    ]

    def put_back() -> None:
        for set_it, values in before:
            set_it(*values)

    return put_back


def over_whole_tensors() -> dict[str, object]:
    """Return those whose code would see all trials' tensors as one, where a `vmap` calls a layer."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return {
        "torch.func": None if interpreter is None else interpreter.level(),
        "forward-mode derivatives": forward_ad._current_level,
        "hooks on saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }


def own_function_modes() -> int:
    """Return how many function modes are active, beside those that only choose a device."""
    return sum(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def changed(before: dict[str, object], after: dict[str, object]) -> str:
    """Return the name of the first difference, or nothing."""
    return next((name for name, value in before.items() if after[name] != value), "")


@contextmanager
def noting_autocasts() -> Iterator[None]:
    """Make each `torch.autocast` a difference, also one that sets what is set: outside, the study may set another."""
    kind = autocast_mode.autocast
    enter, leave = kind.__enter__, kind.__exit__

    def noted_enter(self: Any) -> Any:
        found = enter(self)
        _entered_autocasts.append(id(self))
        return found

    def noted_leave(self: Any, *error: Any) -> Any:
        _entered_autocasts.pop()
        return leave(self, *error)

    with replaced(kind, __enter__=noted_enter, __exit__=noted_leave):
        yield


@contextmanager
def without_recomputing(reentrant: Callable[..., Any], state: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Let `torch.utils.checkpoint` keep its activations: recomputed later, they would be of other tensors.

    Args:
        reentrant: called for checkpoints with ``use_reentrant=True``: with the function, and its inputs.
        state: returns what is equal as long as no buffer has changed. What is recomputed changes buffers twice.
    """

    def keep(_function: Any, preserve_rng_state: bool, *_: Any, **__: Any) -> Iterator[None]:
        if torch.is_grad_enabled() and not preserve_rng_state:
            raise RefusedError(
                "torch.utils.checkpoint with preserve_rng_state=False draws other random numbers, such as dropout's, "
                "when it computes a part of the forward again; allowed: preserve_rng_state=True, the default"
            )
        before = state()
        yield
        if torch.is_grad_enabled() and state() != before:
            raise RefusedError(
                "torch.utils.checkpoint computes a part of the forward twice, which changes buffers, such as a batch "
                "norm's; allowed: no checkpoint around what changes buffers"
            )

    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        output = None
        for _ in keep(function, preserve_rng_state):
            output = reentrant(function, *args)
        return output

    with (
        replaced(checkpoint, _checkpoint_without_reentrant_generator=keep),
        replaced(checkpoint.CheckpointFunction, apply=staticmethod(apply)),
    ):
        yield


def reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Compute what a checkpoint with ``use_reentrant=True`` does: without an input to train, it trains nothing."""
    trains = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
        return function(*args)


def refused_checkpoint(*_: Any) -> Any:
    """Refuse it where inputs do not show whether they are trained."""
    raise FuseError(
        "torch.utils.checkpoint with use_reentrant=True looks at requires_grad; allowed: use_reentrant=False"
    )


@contextmanager
def as_written() -> Iterator[None]:
    """Run functions of `torch.compile` as they are written: compiled, they do not know proxies, nor trials as one."""
    if not is_compiler_loaded():  # then nothing is compiled, and loading it takes seconds
        yield
        return
    compiler: Any = sys.modules["torch._dynamo"]
    with torch.compiler.set_stance("force_eager"), compiler.config.patch(error_on_nested_fx_trace=False):
        yield


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of a module or class meanwhile."""
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)
