"""Tells which functions draw random numbers, or may do so unseen."""

from collections.abc import Mapping
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

RANDOM_NAMES = (
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "bernoulli", "normal", "multinomial"),
    *("poisson", "randperm", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "native_dropout"),
    *("feature_alpha_dropout", "gumbel_softmax", "rrelu", "fractional_max_pool2d", "fractional_max_pool3d"),
    *("binomial", "_standard_gamma", "_sample_dirichlet"),
)
WITH_RULES = "allowed: dropout, torch.randn and others that docs/fusing.md names"
"""For messages."""
_IN_PLACE = (
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
    "rrelu_",
)
_ALL = frozenset((*RANDOM_NAMES, *_IN_PLACE))


def draws_numbers(function: Any) -> bool:
    """Whether a function or method of PyTorch's draws random numbers, also in place."""
    return getattr(function, "__name__", "") in _ALL


Drawn = tuple[tuple[int, ...], tuple[int, ...]]
"""For what numbers were drawn: the shape of one trial's tensor, and its axes from the slowest to the fastest in memory,
but for those of size 1."""


def draws_for_each(function: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a call of a function, or of the method of that name, draws a number for each element of a tensor.

    It does so in the order of memory. Dropout of channels draws for a small tensor that it makes itself.

    Args:
        function: see `draws_numbers`.
        arguments: by their names, defaults included.
    """
    name, rate = getattr(function, "__name__", function), arguments.get("p")
    is_off = arguments.get("training") is False or (isinstance(rate, (int, float)) and not rate)
    return name in FOR_EACH and not is_off


FOR_EACH = _ALL - {
    *("dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "rand", "randn", "randint", "randperm"),
}
"""Names of functions and methods that draw a number for each element of a tensor that they are given."""

DRAWING = FOR_EACH | {"dropout_", "alpha_dropout_", "sample", "rsample"}
"""Names in code that draws such numbers. The last two are methods of ``torch.distributions``."""


def may_draw_unseen(function: Any) -> bool:
    """Whether a function is an operator that PyTorch does not have itself, as `torch.library` registers it.

    No mode sees what its kernels call, forward or backward. Neither does `vmap` if it has a rule.
    """
    if isinstance(function, OpOverload):
        function = function.overloadpacket
    return isinstance(function, OpOverloadPacket) and not function._qualified_op_name.startswith(_OF_PYTORCH)


_OF_PYTORCH = ("aten::", "prim::", "prims::", "profiler::")
