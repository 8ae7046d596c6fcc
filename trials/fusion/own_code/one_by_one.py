"""The tensors of one trial after another, for code that runs once per trial, and what such code has changed."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trials.fusion.compared.sharing import refuse_shared
from trials.fusion.errors import RefusedError, refused_freezing
from trials.fusion.layers.memory_order import Order, as_ordered
from trials.fusion.own_code.reached import Reached

Slot = tuple[dict[str, Tensor], str, str, Tensor]
"""A module's table of tensors, a name there, the same with the module's path, and the tensor of all trials."""


class ChangedError(Exception):
    """Code changes tensors in a way that was not foreseen.

    Args:
        names: theirs.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__("changed")
        self.names = frozenset(names)


class OneByOne:
    """The tensors of K trials, row by row.

    Args:
        parameters: name -> ``[K, *shape]``.
        buffers: likewise.
        changing: the names of parameters that code changes in place, and of tensors that it replaces or gives new data.
            It gets copies of them, for a backward may need what they were before.
        once: name -> ``[*shape]``, of parameters that all trials have in common.
        orders: those of tensors that lie in another order in memory in the trial alone. Code gets copies of them, too.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        changing: Container[str],
        once: Mapping[str, Tensor],
        orders: Mapping[str, Order],
    ) -> None:
        self._parameters, self._stacked, self._changing = parameters, {**parameters, **buffers}, changing
        self._once, self._orders = once, orders
        with torch.enable_grad():  # in evaluation, too, a parameter can be differentiated by
            self._rows = {
                name: [in_order(once[name].detach(), orders.get(name)) for _ in tensor]
                if name in once
                else _rows(tensor, name in changing, orders.get(name))
                for name, tensor in parameters.items()
            }
        for name, tensor in buffers.items():
            # each row counts its own changes: a backward asks whether a value that it needs has changed
            is_copied = name in changing or name in orders
            self._rows[name] = [_copy(row, orders.get(name)) if is_copied else row.data for row in tensor.detach()]

    @property
    def asked(self) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        """What stands for trained parameters, and for all other tensors, with their names."""
        trained = self._parameters.keys() - self._once.keys()
        found = [(name, row) for name, rows in self._rows.items() for row in rows]
        return [each for each in found if each[0] in trained], [each for each in found if each[0] not in trained]

    def watch(self, reached: Reached) -> None:
        """Have noticed which parameters get a gradient."""
        for name, tensor in self._parameters.items():
            reached.watch(tensor, self._rows[name])

    @contextmanager
    def of(self, row: int) -> Iterator[tuple[dict[str, Tensor], list[str]]]:
        """Yield the tensors of a trial by name, for code that may replace them, and a list.

        Afterwards the list has the names of buffers that are replaced by others of another shape or type. The other
        changes are in the tensors of all trials.

        Raises:
            ChangedError: it has changed others than were foreseen.
        """
        tensors: dict[str, Tensor] = {name: rows[row] for name, rows in self._rows.items()}
        mark(tensors[name] for name in self._parameters)
        memory = {name: _memory(tensor) for name, tensor in tensors.items()}
        versions = {name: tensors[name]._version for name in self._orders}
        others: list[str] = []
        try:
            with _recurrent_weights_in_place(), _refusing_to_freeze():
                yield tensors, others
        except RuntimeError as error:
            if "Unbind" not in str(error):
                raise
            raise ChangedError(self._parameters.keys() - self._once.keys()) from error
        new = {
            name: tensors[name] for name, rows in self._rows.items() if _is_new(tensors[name], rows[row], memory[name])
        }
        written = [name for name, version in versions.items() if tensors[name]._version != version]
        others += _others(new, self._stacked)
        unforeseen = [name for name in new if name not in self._changing and name not in others]
        if unforeseen := unforeseen + [name for name in written if name in self._once]:
            raise ChangedError(unforeseen)
        refuse_shared([name for name in new if name not in others], tensors)
        for name in tensors:
            if (name in self._changing or name in written) and name not in others:
                self._stacked[name].data[row].copy_(tensors[name].detach())


def split(leaves: Sequence[Any], owned: Sequence[int | None], size: int, reached: Reached) -> list[list[Any]]:
    """Return each input of `size` trials for one after another. Those that are not `owned`, by None, are shared."""
    found = []
    for leaf, dim in zip(leaves, owned, strict=True):
        found.append([leaf] * size if dim is None else [leaf[row] for row in range(size)])
        if dim is not None:
            reached.watch(leaf, found[-1])
    return found


def slots(inside: Mapping[str, nn.Module], stacked: Callable[[str], Tensor]) -> list[Slot]:
    """Return the slots of the modules `inside` a module, by path. `stacked` gives a name's tensor of all trials."""
    found: list[Slot] = []
    for path, module in inside.items():
        tables: Any = module._parameters, module._buffers
        for table in tables:
            for name in [name for name, tensor in table.items() if tensor is not None]:
                whole = f"{path}.{name}" if path else name
                found.append((table, name, whole, stacked(whole)))
    return found


@contextmanager
def in_slots(own: Sequence[Slot]) -> Iterator[tuple[list[str], list[tuple[str, Tensor]]]]:
    """Let a module have the tensors of the only trial itself. Yields a list as `OneByOne.of` does, and `trained`.

    Raises:
        ChangedError: the module's code replaces some, or gives them new data.
    """
    with torch.enable_grad():  # in evaluation, too, a parameter can be differentiated by
        rows = {id(tensor): tensor.squeeze(0) for *_, tensor in own}
    views = [rows[id(tensor)] for *_, tensor in own]  # tied tensors stay one
    mark(view for view, (*_, tensor) in zip(views, own, strict=True) if isinstance(tensor, nn.Parameter))
    memory = [_memory(view) for view in views]
    before = [table[name] for table, name, _, _ in own]
    others: list[str] = []
    for (table, name, _, _), view in zip(own, views, strict=True):
        table[name] = view
    try:
        with _refusing_to_freeze():
            yield (
                others,
                [(whole, view) for view, (*_, whole, all_) in zip(views, own, strict=True) if all_.requires_grad],
            )
        new = {
            whole: table[name]
            for (table, name, whole, _), view, was in zip(own, views, memory, strict=True)
            if _is_new(table[name], view, was)
        }
        others += _others(new, {whole: tensor for _, _, whole, tensor in own}) if new else []
        if len(new) > len(others):
            raise ChangedError(new.keys() - others)
    finally:
        for (table, name, _, _), tensor in zip(own, before, strict=True):
            table[name] = tensor


@contextmanager
def _refusing_to_freeze() -> Iterator[None]:
    """Refuse what PyTorch refuses of the rows of a parameter."""
    try:
        yield
    except RuntimeError as error:
        if "requires_grad flags of leaf" in str(error):
            raise refused_freezing("what may be a parameter") from error
        raise


def mark(parameters: Iterable[Any]) -> None:
    """Let ``isinstance(x, nn.Parameter)`` be true of tensors that stand for parameters."""
    for each in parameters:
        each._is_param = True


def fits(tensor: Tensor, like: Tensor) -> bool:
    """Whether a tensor's new value can take the place of the old one."""
    return tensor.shape == like.shape and tensor.dtype == like.dtype


def refuse_ties(label: str, aliases: Mapping[str, str], prefix: str, names: Iterable[str]) -> None:
    """Refuse to replace, in the module `label`, one of several names of a tensor, which would then differ.

    Args:
        label: of the module whose code replaces tensors.
        aliases: see `Rows`.
        prefix: the module's, in the model.
        names: of the tensors, in the module.
    """
    for name in (prefix + name for name in names):
        if name in aliases or name in aliases.values():
            raise RefusedError(
                f"module '{label}' replaces '{name}', which is one tensor under several names; allowed: to change it "
                "in place"
            )


def refused_change(label: str) -> RefusedError:
    """Return the error for the module `label`, which changes a tensor for the first time after its first batch."""
    return RefusedError(
        f"module '{label}' replaces a tensor or changes a parameter in its forward, though not for its first batch; "
        "allowed: to do so for every batch, or to change buffers in place"
    )


def refused_change_of_input(label: str) -> RefusedError:
    """Return the error for the module `label`, which changes its input."""
    return RefusedError(
        f"module '{label}' changes its input in place, and the next trial and epoch would see that; allowed: to change "
        "a clone of it"
    )


@contextmanager
def _recurrent_weights_in_place() -> Iterator[None]:
    """Recurrent layers on a CUDA device move weights that they have not seen to memory of their own choice, for speed.

    A trial's are a part of all trials'.
    """
    flatten = nn.RNNBase.flatten_parameters
    nn.RNNBase.flatten_parameters = _leave  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.RNNBase.flatten_parameters = flatten  # type: ignore[method-assign]


def _leave(layer: nn.RNNBase) -> None:
    """Change nothing."""


def _memory(tensor: Tensor) -> object:
    """Return where the data of a tensor are."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _is_new(tensor: Tensor, before: Tensor, memory: object) -> bool:
    """Whether a tensor has been replaced, or its data, which were at `memory`."""
    return tensor is not before or _memory(tensor) != memory


def _others(new: Mapping[str, Tensor], stacked: Mapping[str, Tensor]) -> list[str]:
    """Return the names of `new` tensors that differ in shape or type from the trials' own.

    Raises:
        RefusedError: a parameter does.
    """
    found = [name for name, tensor in new.items() if not fits(tensor, stacked[name][0])]
    for name in found:
        if isinstance(stacked[name], nn.Parameter):
            raise RefusedError(
                f"the forward gives the parameter '{name}' data of another shape or type; allowed: equal ones"
            )
    return found


def in_order(row: Tensor, order: Order) -> Tensor:
    """Return one trial's tensor as it lies in memory in the trial alone, if that is in an `order` of its own."""
    return row if order is None else as_ordered(row[None], order)[0]


def _copy(row: Tensor, order: Order) -> Tensor:
    """A view would not do: code may change it in place."""
    return row.clone() if order is None else torch.empty_like(in_order(row, order)).copy_(row)


def _rows(tensor: Tensor, changing: bool, order: Order) -> Sequence[Tensor]:
    if not changing and order is None:
        return tensor.unbind(0)
    found: Sequence[Tensor] = _Apart.apply(tensor, order)
    return found


class _Apart(torch.autograd.Function):
    """The rows of a tensor, each of which can be changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: Order) -> tuple[Tensor, ...]:
        """Copies of them, in an order in memory."""
        ctx.set_materialize_grads(False)
        ctx.shape = tensor.shape
        return tuple(_copy(row, order) for row in tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Together again."""
        like = next(gradient for gradient in gradients if gradient is not None)
        zeros = like.new_zeros(ctx.shape[1:])
        return torch.stack([zeros if gradient is None else gradient for gradient in gradients]), None
