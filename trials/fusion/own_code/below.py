"""How a layer's call leaves the `vmap` around it, and its output enters it again.

PyTorch's public way is an own `autograd.Function` with a rule for `vmap`, and takes 0.2 ms of Python per call: 4% of a
step of a small BERT with adapters. So what PyTorch does for it under our own `vmap` is done here, in 8 µs.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class Callee(Protocol):
    """What is computed outside a `vmap`, with the trials' tensors as they are."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the output, and its `vmap` dimensions.

        Args:
            args: each tensor that differs between trials has the leading axis K.
            kwargs: likewise.
            dims: 0 for each tensor with that axis, None for all others, in trees like those of `args` and `kwargs`.
        """


def below(callee: Callee, row: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `callee` from within a `vmap` over trials, which gives each its number `row`."""
    vmap = _functorch.peek_interpreter_stack()
    if vmap is None or vmap.key() != _functorch.TransformType.Vmap or _functorch.maybe_get_level(row) != vmap.level():
        return _Below.apply(callee, row, args, kwargs)  # the code around the call transforms it, too
    level = vmap.level()
    alone = not kwargs and len(args) == 1 and isinstance(args[0], Tensor)  # as in most layers; trees take longer
    leaves, spec = (list(args), None) if alone else tree_flatten((args, kwargs))
    found = [_functorch._unwrap_batched(leaf, level) if isinstance(leaf, Tensor) else (leaf, None) for leaf in leaves]
    with temporarily_pop_interpreter_stack():
        output, dims = _run(callee, found, spec)
    given = {id(own): leaf for (own, _), leaf in zip(found, leaves, strict=True)}

    def entered(own: Any, dim: int | None) -> Any:
        if not isinstance(own, Tensor) or id(own) in given:
            return given.get(id(own), own)  # an input that is returned stays the same object
        return own if dim is None else _functorch._add_batch_dim(own, dim, level)

    if isinstance(output, Tensor):
        return entered(output, dims)
    outputs, form = tree_flatten(output)
    return tree_unflatten([entered(own, dim) for own, dim in zip(outputs, tree_flatten(dims)[0], strict=True)], form)


def _run(callee: Callee, found: list[tuple[Any, int | None]], spec: TreeSpec | None) -> tuple[Any, Any]:
    """Run it.

    Args:
        callee: see `below`.
        found: the leaves of its arguments, each with its `vmap` dimension.
        spec: their tree. None: the only argument is a tensor.
    """
    own = [leaf.movedim(dim, 0) if dim else leaf for leaf, dim in found]
    dims = [None if dim is None else 0 for _, dim in found]
    if spec is None:
        return callee.run((own[0],), {}, ((dims[0],), {}))
    args, kwargs = tree_unflatten(own, spec)
    return callee.run(args, kwargs, tree_unflatten(dims, spec))


class _Below(torch.autograd.Function):
    """The public way."""

    @staticmethod
    def forward(*_: Any) -> Any:
        """Never called, because the row's number always comes from the `vmap`."""
        raise RuntimeError("a layer was called outside its vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Required by `vmap`. Autograd records what the static method below does."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, callee: Callee, row: Tensor, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Compute it."""
        leaves, spec = tree_flatten((args, kwargs))
        return _run(callee, list(zip(leaves, tree_flatten((in_dims[2], in_dims[3]))[0], strict=True)), spec)
