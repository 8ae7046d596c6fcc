"""Random numbers that a model's own code draws, such as a diffusion's noise: each trial's from its own stream.

PyTorch's own function draws for one trial after another, so the numbers are those of the trial alone, bit by bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from trials.fusion.layers.memory_order import as_ordered, order_of
from trials.fusion.own_code.streams import drawing_from, lent
from trials.fusion.registry import CallRule, FuseError, call_rule

_NOT_TAKEN = ("generator", "out", "names", "layout", "requires_grad", "pin_memory")
"""Options of PyTorch's functions that no rule here takes."""


def _of_sizes(*args: Any, **options: Any) -> None:
    """The signature of functions whose inputs are the same for all trials, such as sizes and bounds."""


def _of_one(input: Any, *args: Any, **options: Any) -> None:
    """That of functions of a tensor."""


def _of_two(mean: Any, std: Any = 1.0, *args: Any, **options: Any) -> None:
    """That of `torch.normal`, whose mean and deviation may be tensors."""


def _of_counts(count: Any, prob: Any, *args: Any, **options: Any) -> None:
    """That of `torch.binomial`."""


def _plain(name: str, per_trial: Sequence[bool], options: dict[str, Any]) -> dict[str, Any]:
    """Return the `options` of a call of the function `name` that matter.

    Raises:
        FuseError: they, or other inputs that `per_trial` speaks of, are none that a rule takes.
    """
    if any(per_trial):
        raise FuseError(f"{name} is called with sizes or bounds that are each trial's own; allowed: plain numbers")
    if given := [key for key in _NOT_TAKEN if options.get(key) is not None and options[key] is not False]:
        raise FuseError(f"{name} is called with {given[0]}; allowed: without")
    return {key: value for key, value in options.items() if key not in _NOT_TAKEN}


def _drawn(
    function: Callable[..., Tensor],
    seeded: Callable[..., Tensor],
    args: Sequence[Any],
    options: dict[str, Any],
    stream: torch.Generator,
) -> Tensor:
    """Call `function` with random numbers from `stream`; on a CPU `seeded`, which is the same but for a generator.

    Raises:
        FuseError: it draws on another device, where no trial has a stream.
    """
    device = options.get("device")
    if device is None:
        device = next((arg.device for arg in args if isinstance(arg, Tensor)), None) or torch.get_default_device()
    if (drawn_on := torch.device(device).type) == stream.device.type == "cpu":
        return seeded(*args, generator=stream, **options)
    if drawn_on == stream.device.type:
        with lent(stream):  # a graph that records it has to know
            found = function(*args, **options)
        drawn_on = found.device.type  # not all functions follow the default device
    if drawn_on != stream.device.type:
        raise FuseError(f"{function.__name__} draws on {drawn_on}, and the trials are on {stream.device.type}")
    return found


def _call_rule(function: Callable[..., Tensor], inputs: int, seeded: Callable[..., Tensor] | None = None) -> CallRule:
    """The rule for a `function` of PyTorch's, whose first `inputs` may be tensors of each trial's own.

    `seeded` is the same with the option ``generator``, if `function` lacks that.
    """

    def call(values: Sequence[Any], per_trial: Sequence[bool], streams: list[torch.Generator]) -> tuple[Tensor, bool]:
        *given, args, options = values
        options, drawn = _plain(function.__name__, per_trial[inputs:], options), []
        for row, stream in enumerate(streams):
            own = [x[row] if is_own else x for x, is_own in zip(given, per_trial, strict=False)]
            drawn.append(_drawn(function, seeded or function, (*own, *args), options, stream))
        return as_ordered(torch.stack(drawn), order_of(drawn[0])), True

    return call


def _by_global_stream(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Give a `function` that takes no generator one."""

    def call(*args: Any, generator: torch.Generator, **options: Any) -> Tensor:
        with drawing_from(generator):
            return function(*args, **options)

    return call


def _in_place(method: Callable[..., Tensor]) -> CallRule:
    """The rule for a `method` that fills a tensor with random numbers."""

    def call(values: Sequence[Any], per_trial: Sequence[bool], streams: list[torch.Generator]) -> tuple[Tensor, bool]:
        x_K, args, options = values
        name = method.__name__
        if not per_trial[0]:
            raise FuseError(f"{name} fills a tensor that all trials share; allowed: one of torch.empty or x.new_empty")
        options = _plain(name, per_trial[1:], options)
        if not x_K[0].is_contiguous() or (len(x_K) > 1 and x_K.stride(0) < x_K[0].numel()):
            raise FuseError(f"{name} fills a tensor with gaps or another order in memory, in which it would draw")
        for row, stream in enumerate(streams):
            _drawn(method, method, (x_K[row], *args), options, stream)
        return x_K, True

    return call


def _empty(function: Callable[..., Tensor]) -> CallRule:
    """The rule for a `function` that makes memory to be filled: each trial's own, for each may fill it otherwise."""

    def call(values: Sequence[Any], per_trial: Sequence[bool], streams: list[torch.Generator]) -> tuple[Tensor, bool]:
        args, options = values
        first, rest = args[:1], args[1:]
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves((rest, options))):
            raise FuseError(f"{function.__name__} is called with tensors; allowed: plain sizes")  # or with out=
        made = function(*(x[0] if per_trial[0] else x for x in first), *rest, **options)
        if made.layout is not torch.strided or any(options.get(key) for key in ("requires_grad", "pin_memory")):
            return made, False
        return as_ordered(made.new_empty((len(streams), *made.shape)), order_of(made)), True

    return call


_Functions = tuple[Callable[..., Any], ...]
_FACTORIES: _Functions = torch.rand, torch.randn, torch.randint, torch.randperm
_OF_A_TENSOR: _Functions = torch.bernoulli, torch.multinomial, torch.poisson, torch._standard_gamma
_WITHOUT_GENERATOR: _Functions = torch.randint_like, functional.gumbel_softmax
_EMPTY: _Functions = torch.empty, torch.empty_like, Tensor.new_empty
_IN_PLACE = ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")

for _function in _FACTORIES:
    call_rule(_function, like=_of_sizes)(_call_rule(_function, 0))
for _function in _OF_A_TENSOR:
    call_rule(_function, like=_of_one)(_call_rule(_function, 1))
for _name in ("bernoulli", "multinomial"):
    _method = getattr(Tensor, _name)
    for _target in (_name, _method):
        call_rule(_target, like=_of_one)(_call_rule(_method, 1))
call_rule(torch.normal, like=_of_two)(_call_rule(torch.normal, 2))
call_rule(torch.binomial, like=_of_counts)(_call_rule(torch.binomial, 2))
for _function in _WITHOUT_GENERATOR:
    call_rule(_function, like=_of_one)(_call_rule(_function, 1, _by_global_stream(_function)))


def _filling(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes a tensor like another and fills it. In older releases PyTorch's own takes no generator."""

    def call(like: Tensor, *, generator: torch.Generator, **options: Any) -> Tensor:
        return fill(torch.empty_like(like, **options), generator=generator)

    return call


call_rule(torch.randn_like, like=_of_one)(_call_rule(torch.randn_like, 1, _filling(Tensor.normal_)))
call_rule(torch.rand_like, like=_of_one)(_call_rule(torch.rand_like, 1, _filling(Tensor.uniform_)))
for _name in _IN_PLACE:
    _method = getattr(Tensor, _name)
    call_rule(_method, like=_of_one)(_in_place(_method))
for _function in _EMPTY:
    call_rule(_function, like=_of_sizes)(_empty(_function))
