"""Remembers the attributes of modules, with the containers in them, and puts them back."""

import copy
from collections import OrderedDict, deque
from operator import is_
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

from trials.fusion.compared.contents import NUMBERS, contents

Attribute = tuple[str, str]
"""The path of a module, and the name of its attribute."""

_COPIED = frozenset((dict, OrderedDict, list, set, deque))
"""Their own method takes a tenth of the time of `copy.copy`."""


class ModuleAttributes:
    """The attributes of a module and of those inside it, as they are when this is made. Tensors count as one thing."""

    def __init__(self, module: nn.Module) -> None:
        """Remember them."""
        self._module = module
        self._tables: dict[int, tuple[str, dict[str, Any], dict[str, Any]]] = {}
        self._containers: dict[int, tuple[Attribute, Any, Any]] = {}
        self._tensors: list[tuple[Attribute, Tensor, int]] = []
        inside = {id(each) for each in module.modules()}
        for path, each in module.named_modules():
            self._tables.update({id(table): (path, table, dict(table)) for table in _tables(each)})
            for name, value in vars(each).items():
                own_table = name in ("_parameters", "_buffers", "_modules")
                if not own_table and not _is_passed_over(name) and not isinstance(value, (Tensor, nn.Module)):
                    self._add((path, name), value, inside)

    def _add(self, attribute: Attribute, value: Any, inside: set[int]) -> None:
        if _is_empty(value):  # as most are, such as hooks
            self._containers.setdefault(id(value), (attribute, value, value.copy()))
        elif type(value) not in NUMBERS:
            self._add_contents(attribute, value, inside)

    def _add_contents(self, attribute: Attribute, value: Any, inside: set[int]) -> None:
        for _, part in contents(value, beyond=inside):
            if id(part) in inside:
                continue
            if isinstance(part, Tensor):
                if not part.is_inference():
                    self._tensors.append((attribute, part, part._version))
            elif isinstance(part, (dict, list, set, deque)):
                kept = part.copy() if type(part) in _COPIED else copy.copy(part)
                self._containers.setdefault(id(part), (attribute, part, kept))
            elif isinstance(part, FunctionType):
                for cell in part.__closure__ or ():
                    self._containers.setdefault(id(cell), (attribute, cell, _content(cell)))
            elif type(getattr(part, "__dict__", None)) is dict and not isinstance(part, type):
                table = vars(part)
                self._containers.setdefault(id(table), (attribute, table, dict(table)))

    def renew(self, module: nn.Module) -> None:
        """Remember the attributes of one `module` inside as they are now."""
        for table in _tables(module):
            if id(table) in self._tables:
                self._tables[id(table)] = self._tables[id(table)][0], table, dict(table)

    def changed(self) -> list[Attribute]:
        """Return the attributes that are not as they were, each once."""
        found: dict[Attribute, None] = {}
        for path, table, before in self._changed_tables():
            names = [
                name for name in {**before, **table} if _differ(table.get(name, _Absent), before.get(name, _Absent))
            ]
            found.update(dict.fromkeys((path, name) for name in names if not _is_passed_over(name)))
        found.update(dict.fromkeys(attribute for attribute, _, _ in self._changed_containers()))
        return list(found)

    def _changed_tables(self) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Those that do not hold the very objects that they held. A step asks for thousands, most of them empty."""
        return [each for each in self._tables.values() if (each[1] or each[2]) and not _same(each[1], each[2])]

    def _changed_containers(self) -> list[tuple[Attribute, Any, Any]]:
        """The same; most of them are empty, such as a module's hooks."""
        return [each for each in self._containers.values() if (each[1] or each[2]) and not _same(each[1], each[2])]

    def changed_inside(self) -> list[Attribute]:
        """Return the attributes in which a tensor has changed in place, which cannot be put back."""
        return [attribute for attribute, tensor, version in self._tensors if tensor._version != version]

    def put_back(self) -> None:
        """Restore them."""
        for _, table, before in self._changed_tables():
            passed_over = {name: value for name, value in table.items() if _is_passed_over(name)}
            table.clear()
            table.update({**before, **passed_over})
        for _, part, before in self._changed_containers():
            _fill(part, before)


class _Absent:
    """Stands for what is not there."""


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return vars(module), module._parameters, module._buffers, module._modules


def _is_empty(value: Any) -> bool:
    """Whether it is an ordinary container without anything in it."""
    return type(value) in _COPIED and not value and not getattr(value, "__dict__", None)


def _is_passed_over(name: str) -> bool:
    """Whether it is set by us or by `torch.fx`, or made of a recurrent layer's parameters."""
    return name in ("training", "forward", "_flat_weights", "_flat_weight_refs") or name.startswith("_tensor_constant")


def _same(part: Any, before: Any) -> bool:
    """Whether a container holds the very objects that it held."""
    if isinstance(part, CellType):
        return _content(part) is before
    if len(part) != len(before):
        return False
    if isinstance(part, dict):  # hundreds per step
        return all(map(is_, part, before)) and all(map(is_, part.values(), before.values()))
    return part == before if isinstance(part, set) else all(map(is_, part, before))


def _fill(part: Any, before: Any) -> None:
    if isinstance(part, CellType):
        if before is _Absent:
            del part.cell_contents
        else:
            part.cell_contents = before
        return
    part.clear()
    if isinstance(part, (list, deque)):
        part.extend(before)
    else:
        part.update(before)


def _differ(one: object, other: object) -> bool:
    """Whether two attributes differ. Parameters and buffers are given by whoever calls the module."""
    return one is not other and not (isinstance(one, Tensor) and isinstance(other, Tensor))


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return _Absent
