"""What an optimizer keeps, as plain containers that ``torch.load(..., weights_only=True)`` reads, and back."""

import types
from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from trials.fusion.compared.contents import contents
from trials.fusion.compared.describe import Describer
from trials.fusion.errors import FuseError, RefusedError

Optimizer = torch.optim.Optimizer

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set}
_EVERY = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)))
"""The attributes of every optimizer."""
_KEPT = ("defaults", "param_groups", "state")
_BY_SCHEDULERS = ("step", "_opt_called")


class NotPlainError(Exception):
    """A value is no number, text or tensor, nor a container of them."""


def pack(optimizer: Optimizer) -> dict[str, Any]:
    """Return all that `optimizer` keeps but its `fixed_parts`.

    Raises:
        FuseError: its groups or its state hold anything but numbers, text, tensors and containers of them.
    """
    return _Packer(optimizer).attributes(optimizer)


def unpack(packed: Mapping[str, Any], into: Optimizer, device: torch.device) -> None:
    """Replace what `into` keeps by what `pack` has returned; tensors go to `device` if they lay with the parameters."""
    _Unpacker(into, device).attributes(packed, into)


def fixed_parts(optimizer: Optimizer) -> dict[str, Hashable]:
    """Describe the attributes that `pack` leaves out, such as functions and hooks."""
    packer, describe = _Packer(optimizer), Describer(None, parameters_of(optimizer))
    found: dict[str, Hashable] = {}
    for each in packer.inside:
        kind = type(each).__name__
        for name, value in vars(each).items():
            if name in _EVERY and name.endswith("_hooks") and value:
                found[f"{kind}.{name}"] = describe(list(value.values()))
            elif _is_own(name) and name not in _KEPT and not packer.takes(value):
                found[f"{kind}.{name}"] = describe(value)
    return found


def class_values(optimizer: Optimizer) -> list[Hashable]:
    """Describe what the classes of `optimizer`, and of those inside it, hold beside methods."""
    describe = Describer()
    kinds = dict.fromkeys(kind for each in inside_of(optimizer) for kind in type(each).__mro__)
    users = [kind for kind in kinds if issubclass(kind, Optimizer) and kind is not Optimizer]
    own = [(name, value) for kind in users for name, value in vars(kind).items() if not name.startswith("__")]
    return [(name, describe(value)) for name, value in own if not isinstance(value, (types.FunctionType, property))]


class Unread:
    """Stands for what a stand-in has not: the parameters of a group, or the state."""

    def __init__(self, what: str) -> None:
        self._what = what

    def _refuse(self, *_: Any) -> NoReturn:
        raise RefusedError(
            f"Study.scheduler reads the {self._what} of its optimizer, which all trials have as one; allowed: the "
            "numbers in param_groups"
        )

    __iter__ = __getitem__ = __len__ = __bool__ = __contains__ = _refuse

    def __getattr__(self, name: str) -> Any:
        """Refuse what a list or a dict has."""
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return its parameters in order."""
    given = (group["params"] for group in optimizer.param_groups)
    return [p for own in given if not isinstance(own, Unread) for p in own]


def inside_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return `optimizer` and those inside it, as in a Lookahead."""
    return [value for _, value in contents(optimizer) if isinstance(value, Optimizer)]


def _is_own(name: str) -> bool:
    return name in _KEPT or name not in (*_EVERY, *_BY_SCHEDULERS)


class _Packer:
    """Turns values into plain ones. What occurs twice is one object again after `_Unpacker`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inside = inside_of(optimizer)
        parameters = parameters_of(optimizer)
        self._devices = {p.device for p in parameters}
        self._known: dict[int, dict[str, Any]] = {id(p): {"parameter": i} for i, p in enumerate(parameters)}
        self._alive: list[Any] = []

    def attributes(self, optimizer: Optimizer) -> dict[str, Any]:
        made = {}
        for name, value in vars(optimizer).items():
            if not _is_own(name):
                continue
            before = dict(self._known)
            try:
                made[name] = self._pack(value)
            except NotPlainError as error:
                if name in _KEPT:
                    raise FuseError(
                        f"optimizer {type(optimizer).__name__} cannot be saved: {error} in '{name}'; allowed: "
                        "numbers, text, tensors, and lists and dictionaries of them"
                    ) from error
                self._known = before
        return made

    def takes(self, value: Any) -> bool:
        """Whether it can be packed."""
        before = dict(self._known)
        try:
            self._pack(value)
        except NotPlainError:
            return False
        finally:
            self._known = before
        return True

    def _pack(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if id(value) in self._known:
            return self._known[id(value)]
        self._alive.append(value)
        made = self._known[id(value)] = {"same as": len(self._known)}
        return {"number": made["same as"], **self._content(value)}

    def _content(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Optimizer):
            return {"optimizer": self.inside.index(value), "kept": self.attributes(value)}
        if type(value) in (Tensor, nn.Parameter):
            return {"tensor": value.detach().clone(), "follows": value.device in self._devices}
        if isinstance(value, torch.Generator):
            return {"generator": value.get_state(), "device": value.device}
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
            return {"array": torch.from_numpy(np.array(value)), "scalar": isinstance(value, np.generic)}
        if type(value) is dict or (type(value) is defaultdict and value.default_factory is dict):
            return {
                "default": isinstance(value, defaultdict),
                "items": [[self._pack(key), self._pack(item)] for key, item in value.items()],
            }
        for name, kind in _CONTAINERS.items():
            if type(value) is kind:
                return {name: [self._pack(item) for item in value]}
        raise NotPlainError(f"a {type(value).__name__}")


class _Unpacker:
    """The reverse of `_Packer`."""

    def __init__(self, into: Optimizer, device: torch.device) -> None:
        self._inside, self._parameters, self._device = inside_of(into), parameters_of(into), device
        self._known: dict[int, Any] = {}

    def attributes(self, packed: Mapping[str, Any], into: Optimizer) -> None:
        packer = _Packer(into)
        for name, value in list(vars(into).items()):
            if _is_own(name) and name not in packed and packer.takes(value):
                del vars(into)[name]  # it was made later than what is loaded
        for name, value in packed.items():
            vars(into)[name] = self._unpack(value)

    def _unpack(self, packed: Any) -> Any:
        if not isinstance(packed, dict):
            return packed
        if "parameter" in packed:
            return self._parameters[packed["parameter"]]
        if "same as" in packed:
            return self._known[packed["same as"]]
        made = self._content(packed)
        self._known.setdefault(packed["number"], made)
        return made

    def _content(self, packed: dict[str, Any]) -> Any:
        if "optimizer" in packed:
            nested = self._known[packed["number"]] = self._inside[packed["optimizer"]]
            self.attributes(packed["kept"], nested)
            return nested
        if "tensor" in packed:
            return packed["tensor"].to(self._device, copy=True) if packed["follows"] else packed["tensor"].clone()
        if "generator" in packed:
            made = torch.Generator(packed["device"])
            made.set_state(packed["generator"])
            return made
        if "array" in packed:
            array = packed["array"].numpy().copy()
            return array[()] if packed["scalar"] else array
        if "items" in packed:
            table: dict[Any, Any] = defaultdict(dict) if packed["default"] else {}
            self._known[packed["number"]] = table
            table.update((self._unpack(key), self._unpack(item)) for key, item in packed["items"])
            return table
        ((name, items),) = ((name, packed[name]) for name in _CONTAINERS if name in packed)
        if name == "list":
            row: list[Any] = []
            self._known[packed["number"]] = row
            row.extend(self._unpack(item) for item in items)
            return row
        return _CONTAINERS[name](self._unpack(item) for item in items)
