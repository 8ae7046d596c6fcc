"""Copies one trial's module, to run its code with the tensors of any trial."""

import copy
import types
from functools import partial
from typing import Any

from torch import Tensor, nn

from trials.fusion.compared.describe import plain_tensors
from trials.fusion.errors import RefusedError
from trials.fusion.registry import plain_forward, replaced_function


def template(module: nn.Module, path: str) -> nn.Module:
    """Return a copy of the module at `path`.

    Functions that it holds and that refer to a module in it, as ``lambda x: self.layer(x)`` does, refer to the copy.

    Raises:
        RefusedError: it cannot be copied.
    """
    memo: dict[int, Any] = {}
    try:
        made = copy.deepcopy(module, memo)
    except Exception as error:
        raise RefusedError(f"module '{path}' ({type(module).__name__}) cannot be copied: {error}") from error
    for inner in made.modules():
        for name, value in vars(inner).items():
            if isinstance(value, types.FunctionType) and value.__closure__:
                vars(inner)[name] = _moved(value, memo)
    return made


def use_plain_forwards(module: nn.Module) -> None:
    """Let layers of PyTorch's made of others run without their branches on values, which `vmap` cannot do."""
    for inner in module.modules():
        plain = plain_forward(inner)
        if plain is not None and not replaced_function():
            inner.forward = partial(plain, inner)


def without_data(module: nn.Module) -> None:
    """Take away the tensors of a template, so that code which reads them without being given a trial's own fails.

    Those that are plain attributes become buffers: each trial has its own of these, too.
    """
    empty: dict[int, Tensor] = {}
    for inner in module.modules():
        for name, plain in plain_tensors(inner).items():
            delattr(inner, name)
            inner.register_buffer(name, plain, persistent=False)
        for table in (inner._parameters, inner._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = empty.setdefault(id(tensor), _without_data(tensor))  # type: ignore[assignment]
        if isinstance(inner, nn.RNNBase):
            inner._flat_weights = [getattr(inner, name, None) for name in inner._flat_weights_names]


def _without_data(tensor: Tensor) -> Tensor:
    found = tensor.detach().to("meta")
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def _moved(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """Return `function` with the copies in `memo` of the objects around it."""
    cells = tuple(_moved_cell(cell, memo) for cell in function.__closure__ or ())
    moved = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    moved.__kwdefaults__ = function.__kwdefaults__
    moved.__dict__.update(function.__dict__)
    return moved


def _moved_cell(cell: types.CellType, memo: dict[int, Any]) -> types.CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # not set yet
        return cell
    return types.CellType(memo[id(content)]) if id(content) in memo else cell
