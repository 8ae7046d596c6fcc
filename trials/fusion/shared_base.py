"""Frozen parameters that are equal in all trials of a group: held once, and computed once for all rows.

Their stacked tensor ``[K, *shape]`` is a view of the only copy, without a stride along K. So all code that takes rows
works on it as on any other, and a layer that looks (`only`) multiplies all rows by one matrix.

Nothing may write to the only copy, because every trial would see it. A forward that does gets a copy for each trial if
it does so for its first batch, and is refused if later.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from trials.fusion.errors import FuseError, RefusedError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WrittenError(RefusedError):
    """A forward has changed parameters that are held once. They are as before.

    Attributes:
        names: theirs.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = sorted(names)
        super().__init__(
            f"the forward changes the frozen parameter '{self.names[0]}', which all trials hold in common, though not "
            "for its first batch; allowed: to do so for every batch, or never"
        )


class Seal:
    """Knows whether something has written to a tensor that nothing may write to."""

    def __init__(self, tensor: Tensor) -> None:
        """Nothing has yet."""
        self._tensor = tensor
        self._version = tensor._version

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is as it was."""
        return self._tensor._version == self._version

    @torch.no_grad()
    def put_back(self, value: Tensor) -> None:
        """Undo a change."""
        self._tensor.copy_(value)
        self._version = self._tensor._version


class HeldOnce:
    """The only copies, by canonical name.

    Attributes:
        seals: theirs.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Take `tensors` as they are."""
        self._tensors = dict(tensors)
        self.seals = {name: Seal(tensor) for name, tensor in self._tensors.items()}

    def __contains__(self, name: object) -> bool:
        """Whether there is one."""
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        """All names."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        """``[*shape]``, for reading."""
        return self._tensors[name]

    def items(self) -> Iterable[tuple[str, Tensor]]:
        """Names and tensors."""
        return self._tensors.items()

    def written(self) -> list[str]:
        """Return the names of tensors that something has written to."""
        return [name for name, seal in self.seals.items() if not seal.is_whole]

    def snapshot(self, names: Iterable[str]) -> "Snapshot":
        """Copy those in `names`."""
        return Snapshot(self, {name: self._tensors[name].clone() for name in names})


class Snapshot(TorchDispatchMode):
    """Copies of what is held once, while code runs for the first time that may write to it.

    As a context it sees each write, also one that leaves equal values: a teacher that is as yet a copy of what it
    follows will differ later. At its end it undoes them.

    Raises:
        WrittenError: there were some.
    """

    def __init__(self, held: HeldOnce, before: Mapping[str, Tensor]) -> None:
        """`before` are copies of the tensors in `held`."""
        super().__init__()
        self._held, self._before = held, before
        self._memory = {name: _storage(held[name]) for name in before}
        self._written: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what an operation writes to, by whatever view or alias of it."""
        kwargs = kwargs or {}
        given = [*zip(func._schema.arguments, args, strict=False)]
        given += [(each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs]
        for argument, value in given:
            if argument.is_write:
                storages = {_storage(each) for each in tree_leaves(value) if isinstance(each, Tensor)}
                self._written.update(name for name, memory in self._memory.items() if memory in storages)
        return func(*args, **kwargs)

    def put_back(self) -> list[str]:
        """Undo all changes, and return the names of what was written to."""
        changed = [n for n, v in self._before.items() if n in self._written or not same_bits(self._held[n], v)]
        for name in changed:
            self._held.seals[name].put_back(self._before[name])
        return changed

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """See the class."""
        super().__exit__(kind, error, trace)
        if error is None and (changed := self.put_back()):
            raise WrittenError(changed)


_adopted = WeakIdKeyDictionary()
"""The parameters that have the memory of another model's by `Bases`."""


class Bases:
    """Lets models that are built one after another hold equal frozen parameters in the same memory, while they wait."""

    def __init__(self) -> None:
        """Know none yet."""
        self._known: dict[tuple[object, ...], list[tuple[weakref.ref[nn.Parameter], int]]] = {}

    def adopt(self, model: nn.Module) -> None:
        """Give the frozen parameters of `model` the memory of equal ones in an earlier model that still lives.

        Nothing may write to either.
        """
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad and can_be_held_once(parameter):
                self._adopt(name, parameter)

    def _adopt(self, name: str, parameter: nn.Parameter) -> None:
        kind = name, parameter.dtype, parameter.shape, parameter.stride(), parameter.device
        living = []
        for ref, memory in self._known.get(kind, ()):
            other = ref()
            if other is None or other.data_ptr() != memory:
                continue
            if same_bits(parameter, other):
                parameter.data = other.data
                _adopted[parameter] = None
                return
            living.append((ref, memory))
        self._known[kind] = [*living, (weakref.ref(parameter), parameter.data_ptr())]


def part(models: Iterable[nn.Module], once: Collection[str]) -> None:
    """Give parameters that are not to be held `once` memory of their own again, where `Bases` has given them others'.

    So it is in a group where some trials have equal frozen parameters, but not all.
    """
    for model in models:
        for name, parameter in model.named_parameters():
            if name not in once and parameter in _adopted:
                parameter.data = parameter.data.clone()
                del _adopted[parameter]


def spread(tensor: Tensor, size: int) -> nn.Parameter:
    """Return the only copy ``[*shape]`` as the frozen parameter ``[K, *shape]`` of K = `size` trials."""
    return nn.Parameter(tensor.detach().expand(size, *tensor.shape), requires_grad=False)


def only(tensor_K: Tensor | None) -> Tensor | None:
    """Return the only copy ``[*shape]`` behind ``[K, *shape]``; None: each trial has its own, or there is one trial."""
    return tensor_K[0] if tensor_K is not None and len(tensor_K) > 1 and tensor_K.stride(0) == 0 else None


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit by bit: -0.0 is not 0.0, and a NaN is equal to the same NaN."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return torch.equal(_bits(one), _bits(other))


def can_be_held_once(tensor: Tensor) -> bool:
    """Whether it is of a kind of which bits can be compared, and has any."""
    return (
        tensor.layout is torch.strided
        and tensor.numel() > 0
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and (tensor.element_size() in _BITS or tensor.is_complex())
    )


def find(
    models: Sequence[nn.Module], patterns: Sequence[str] = (), apart: Collection[str] = frozenset()
) -> frozenset[str]:
    """Return the canonical names of frozen parameters that are equal in all of `models`, which have one structure.

    Args:
        models: one per trial.
        patterns: what must be among them; see `Study.shared`.
        apart: what cannot be, because something else than the forward may change it.

    Raises:
        FuseError: a parameter in `patterns` is not among them, or a pattern has none.
    """
    tables = [dict(model.named_parameters()) for model in models]
    shortened = {
        id(module.weight)
        for module in models[0].modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    }
    canonical = {id(parameter): name for name, parameter in tables[0].items()}
    every = dict(models[0].named_parameters(remove_duplicate=False))
    said = {canonical[id(every[name])]: pattern for name, pattern in _said(every, patterns).items()}
    found = set()
    for name, parameter in tables[0].items():
        why = ""
        if parameter.requires_grad:
            why = "it is trainable"
        elif name in apart:
            why = "an optimizer without a rule has it, and may change it"
        elif id(parameter) in shortened:
            why = "its embedding has a max_norm, and changes it in place"
        elif not can_be_held_once(parameter):
            why = "its bits cannot be compared"
        elif not all(same_bits(parameter, table[name]) for table in tables[1:]):
            why = "it differs between trials"
        if not why:
            found.add(name)
        elif name in said:
            raise FuseError(
                f"parameter '{name}' is not to be shared, as {said[name]!r} in Study.shared says: {why}; allowed: "
                "frozen parameters that are equal, bit by bit, in all trials"
            )
    return frozenset(found)


def refuse_other_bits(ours: HeldOnce, theirs: HeldOnce, names: Mapping[str, str], patterns: Sequence[str]) -> None:
    """Refuse trials that join and differ in what the study says is shared.

    Args:
        ours: of the trials that are there.
        theirs: of those that join.
        names: each name of a parameter -> the canonical one.
        patterns: see `Study.shared`.

    Raises:
        FuseError: it names the parameter.
    """
    for any_name, pattern in _said(names, patterns).items():
        name = names[any_name]
        if name not in ours or name not in theirs or not same_bits(ours[name], theirs[name]):
            raise FuseError(
                f"parameter '{name}' differs between the trials that join and those that are there, though {pattern!r} "
                "in Study.shared says that all trials share it; allowed: equal bits"
            )


def _said(names: Iterable[str], patterns: Sequence[str]) -> dict[str, str]:
    """Return the first pattern that fits each name.

    Raises:
        FuseError: a pattern fits none.
    """
    names = list(names)
    found: dict[str, str] = {}
    for pattern in patterns:
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise FuseError(
                f"Study.shared has {pattern!r}, which fits no parameter of the model; allowed: patterns of names such "
                f"as {names[0] if names else 'base.weight'!r}"
            )
        for name in fitting:
            found.setdefault(name, pattern)
    return found


def _storage(tensor: Tensor) -> int:
    """Return what all views and aliases of a tensor have in common."""
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(_BITS[plain.element_size()])
