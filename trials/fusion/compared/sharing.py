"""Memory that tensors of one model, or of several, have in common.

Stacked tensors share memory only if they are one under several names. All other sharing is refused.
"""

import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds
from torch import Tensor, nn

from trials.fusion.compared.contents import contents
from trials.fusion.compared.describe import attributes_of_user, plain_tensors
from trials.fusion.errors import FuseError, RefusedError
from trials.fusion.registry import label


def ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map further names of a tensor to its first name. Buffers over the same memory count as one."""
    first: dict[object, str] = {}
    keys = {name: id(t) if isinstance(t, nn.Parameter) else _view(t) for name, t in tensors.items()}
    for name, key in keys.items():
        first.setdefault(key, name)
    return {name: first[key] for name, key in keys.items() if first[key] != name}


def refuse_overlaps(model: nn.Module) -> None:
    """Refuse tensors of `model` that share memory and are not one under several names, and those without strides.

    An array of numpy over a tensor's memory counts as another view of it, unless the tensor is a frozen parameter.

    Raises:
        FuseError: it names them.
    """
    held = dict(_held(model))
    for name, tensor in held.items():
        if tensor.layout is not torch.strided:
            raise FuseError(
                f"tensor '{name}' has the layout {tensor.layout}, which trials cannot have as one; allowed: a dense "
                "tensor, or the indices and values, of which forward makes it"
            )
        if tensor.grad_fn is not None:
            raise FuseError(
                f"tensor '{name}' was computed from others, and its gradient leads to them; allowed: to compute it in "
                "forward, or to detach and clone it"
            )
    aliases = ties(held)
    own = {name: t for name, t in held.items() if name not in aliases and _has_memory(t)}
    for name, tensor in own.items():
        if isinstance(tensor, nn.Parameter) and _overlaps_itself(tensor):
            raise FuseError(
                f"parameter '{name}' has several elements in one place; allowed: a clone, as by contiguous()"
            )
    by_storage: dict[int, list[str]] = {}
    for name, tensor in own.items():
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    for names in by_storage.values():
        for one, other in combinations(names, 2):
            if _overlap(own[one], own[other]):
                raise FuseError(
                    f"'{other}' shares memory with '{one}', but is another view of it; allowed: the same tensor under "
                    "both names, or a clone"
                )
    _refuse_arrays(model, own)


def refuse_common(models: Sequence[Iterable[tuple[str, Tensor]]]) -> None:
    """Refuse tensors that two models share, given the names and tensors of each.

    Raises:
        FuseError: it names one.
    """
    owners: dict[int, int] = {}
    for number, tensors in enumerate(models):
        for name, tensor in tensors:
            storage = tensor.untyped_storage().data_ptr()
            if storage and owners.setdefault(storage, number) != number:
                raise FuseError(
                    f"models {owners[storage]} and {number} share the tensor '{name}'; allowed: tensors of their own"
                )


def refuse_shared(new: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that a forward sets to the memory of others: alone, they would change with those from then on.

    Args:
        new: the names of those that it has set.
        tensors: all, as the forward leaves them.

    Raises:
        RefusedError: it names both.
    """
    memory = {name: _memory(tensor) for name, tensor in tensors.items()} if new else {}
    for name in new:
        for other, own in memory.items():
            if other != name and own == memory[name] != 0:
                raise RefusedError(
                    f"the forward gives '{name}' the memory of '{other}', so that each changes with the other; "
                    "allowed: a clone"
                )


def refuse_outside(module: nn.Module, path: str, made: nn.Module) -> None:
    """Refuse a module whose code finds tensors elsewhere than in its own, because only these become each trial's.

    Args:
        module: the user's.
        path: its path in the model.
        made: a copy of it.

    Raises:
        RefusedError: it names the attribute.
    """
    before = {id(each) for table in (module.modules(), module.parameters(), module.buffers()) for each in table}
    inside = {id(each) for each in made.modules()}
    registered = {id(each) for each in made.buffers()}
    for inner, owner in made.named_modules():
        direct = plain_tensors(owner)
        for name, value in attributes_of_user(owner).items():
            for where, part in contents(value, name, beyond=inside):
                outside = id(part) in before or isinstance(part, nn.Parameter) or id(part) in registered
                if outside and not (where == name and name in direct):
                    whole = ".".join(filter(None, (path, inner)))
                    raise RefusedError(
                        f"module '{label(owner, whole)}' reaches a {type(part).__name__} by '{where}', which stays "
                        "that of one trial; allowed: a parameter, buffer or module of its own"
                    )


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that `model` holds in any way, and their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    registered = {id(t) for table in (model.parameters(), model.buffers()) for t in table}
    for where, part in _kept(model):
        if isinstance(part, Tensor) and id(part) not in registered:
            yield where, part


def _kept(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield all that the user's attributes of modules reach, and where it is."""
    inside = {id(each) for each in model.modules()}
    for path, module in model.named_modules():
        for name, value in attributes_of_user(module).items():
            yield from contents(value, f"{path}.{name}" if path else name, beyond=inside)


def _refuse_arrays(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    ranges = {
        name: (tensor.data_ptr(), tensor.data_ptr() + _span(tensor) * tensor.element_size())
        for name, tensor in tensors.items()
        if tensor.device.type == "cpu" and (tensor.requires_grad or not isinstance(tensor, nn.Parameter))
    }
    for where, part in _kept(model):
        if isinstance(part, _WITH_MEMORY):
            first, last = byte_bounds(part if isinstance(part, np.ndarray) else np.frombuffer(part, np.uint8))
            for name, (start, end) in ranges.items():
                if max(start, first) < min(end, last):
                    raise FuseError(
                        f"the {type(part).__name__} '{where}' shares memory with '{name}', whose numbers will be each "
                        "trial's; allowed: a copy, as by torch.tensor"
                    )


_WITH_MEMORY = (np.ndarray, bytearray, array.array)
"""What `torch.from_numpy` and `torch.frombuffer` take, and keep the memory of."""


def _view(tensor: Tensor) -> object:
    """Equal for tensors that are the same view of the same memory."""
    if not _has_memory(tensor):
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _memory(tensor: Tensor) -> int:
    """Return where a tensor's memory begins, also of all trials' under `vmap`; 0 if it has none."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0 and tensor.device.type != "meta"


def _overlaps_itself(tensor: Tensor) -> bool:
    return len(torch.unique(_elements(tensor))) < tensor.numel() if 0 in _strides(tensor) else False


def _strides(tensor: Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two views of one storage have bytes in common."""
    if one.dtype != other.dtype:
        return True
    ranges = [(t.storage_offset(), t.storage_offset() + _span(t)) for t in (one, other)]
    if max(start for start, _ in ranges) >= min(end for _, end in ranges):
        return False
    return bool(torch.isin(_elements(one), _elements(other)).any())


def _span(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _elements(tensor: Tensor) -> Tensor:
    """The offsets of a tensor's elements in its storage."""
    offsets = torch.tensor(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    return offsets.flatten()
