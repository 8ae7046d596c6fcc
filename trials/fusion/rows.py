"""All tensors of a group's trials, each with a leading axis K, one entry per trial. A trial is one row of each."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trials.fusion.errors import FuseError
from trials.fusion.own_code.backward import Backward
from trials.fusion.own_code.drawing import Drawn
from trials.fusion.own_code.reached import Reached
from trials.fusion.row_moves import joined, parted, taken
from trials.fusion.shared_base import HeldOnce, same_bits, spread

Vectors = dict[str, dict[str, list[float]]]


class Rows:
    """Parameters, buffers, varying attributes and random generators of K trials.

    Attributes:
        parameters: canonical name in the user's model -> ``[K, *shape]``.
        buffers: the same for buffers, and for plain tensors that the user's forward reads.
        vectors: layer path -> attribute -> one number per trial.
        aliases: further names of tied parameters and buffers -> the canonical name.
        unread: a digest per trial of what its own code may read, though its graph does not.
        generators: one random stream per trial, so a trial's dropout masks do not depend on its neighbours.
        reached: which trials' gradients have reached which parameters.
        backward: the modules that run by their own code.
        once: the only copies of frozen parameters that all trials have in common. Those in `parameters` are views.
        rebind: lets all that holds these tensors take them anew, after `unshare`.
        again: long layers on a CPU call it between their parts, to ask the gate once more.
        settle: waits until all that the gate has let through has ended.
        drawn: see `trials.fusion.own_code.inner.Streams`.
        are_drawn_for: whether something is drawn for each element of the forward's outputs, as by the loss.
        orders: of tensors that lie in another order in memory in the trial alone than here; see `memory_order`.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        buffers: dict[str, Tensor],
        vectors: Vectors,
        aliases: dict[str, str],
        generators: list[torch.Generator],
        unread: list[str],
        once: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take the given tables as they are; all have the same K. Those `once` are not in `parameters` yet."""
        self.once = HeldOnce(once or {})
        self.parameters = {**parameters, **{n: spread(t, len(generators)) for n, t in self.once.items()}}
        self.buffers = buffers
        self.vectors = vectors
        self.aliases = aliases
        self.generators = generators
        self.reached, self.backward = Reached(), Backward()
        self.unread = unread
        self.drawn: list[Drawn] | None = None
        self.are_drawn_for = False
        self.orders: Mapping[str, tuple[int, ...]] = {}
        self.again: Callable[[], None] = ask_no_gate
        self.settle: Callable[[], None] = ask_no_gate
        self.rebind: Callable[[], None] = ask_no_gate
        self._written: set[str] = set()
        self._noted: dict[str, Tensor] = {}

    @property
    def size(self) -> int:
        """K."""
        return len(self.generators)

    def get(self, path: str, name: str) -> Tensor | None:
        """Return the stacked tensor of attribute `name` of the module at `path`; None: the module has none."""
        return self.tensor(f"{path}.{name}" if path else name)

    def require(self, path: str, name: str) -> Tensor:
        """Like `get`, for an attribute that the module always has."""
        found = self.get(path, name)
        if found is None:
            raise FuseError(f"module '{path}' has no tensor '{name}'")
        return found

    def canonical(self, name: str) -> str:
        """Return the first name of a tensor that has several."""
        return self.aliases.get(name, name)

    def tensor(self, name: str) -> Tensor | None:
        """Return the stacked tensor called `name` in the user's model."""
        name = self.canonical(name)
        parameter = self.parameters.get(name)
        return self.buffers.get(name) if parameter is None else parameter

    def versions(self, module: nn.Module) -> list[tuple[int, int]]:
        """Return what is equal as long as no buffer has changed, while the code of `module` runs."""
        present = [t for inner in module.modules() for t in inner._buffers.values() if t is not None]
        with torch._C.DisableTorchFunction():  # or code under `vmap` would seem to ask
            return [(id(tensor), tensor._version) for tensor in (*present, *self.buffers.values())]

    def vector(self, path: str, name: str) -> list[float]:
        """Return the varying attribute `name` of the layer at `path`, one number per trial."""
        return self.vectors[path][name]

    def forget_gradients(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self.reached.forget()

    def absent(self) -> dict[str, frozenset[int]]:
        """Return the rows of each parameter that have no gradient, though others have."""
        return self.reached.absent(self.parameters)

    def note_buffers(self) -> None:
        """Store the buffers for `put_back`."""
        if not self.buffers:
            return
        if any(_facts(self._noted.get(n)) != _facts(t) for n, t in self.buffers.items()):
            self._noted = {n: torch.empty_like(t) for n, t in self.buffers.items()}
        torch._foreach_copy_(list(self._noted.values()), list(self.buffers.values()))

    def put_back(self, rows: Sequence[int]) -> None:
        """Restore the buffers of the trials in `rows` from the last `note_buffers`."""
        for name, tensor in self.buffers.items():
            tensor[rows] = self._noted[name][rows]

    def put_back_all_but(self, alive_K: Tensor) -> None:
        """The same for the trials that are not in ``alive_K`` (``[K]``, bool), with few operations and no read."""
        alike: dict[torch.dtype, list[str]] = {}
        for name, tensor in self.buffers.items():
            alike.setdefault(tensor.dtype, []).append(name)
        for names in alike.values():
            own = [self.buffers[name] for name in names]
            new, old = (torch.cat([_matrix(t) for t in each], 1) for each in (own, [self._noted[n] for n in names]))
            kept = torch.where(alive_K[:, None], new, old).split([_matrix(t).shape[1] for t in own], 1)
            torch._foreach_copy_(own, [part.reshape(t.shape) for part, t in zip(kept, own, strict=True)])

    @property
    def row_bytes(self) -> int:
        """The memory of one trial's tensors, without what is held once."""
        own = [t for n, t in self.parameters.items() if n not in self.once]
        return sum(t.nbytes for t in (*own, *self.buffers.values())) // max(self.size, 1)

    def take(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in that order."""
        index = list(rows)
        self._begin_move()
        for name, tensor in self.parameters.items():
            self.parameters[name] = (
                spread(self.once[name], len(index))
                if name in self.once
                else _parameter(taken(tensor, index), tensor.requires_grad)
            )
        for name, buffer in self.buffers.items():
            self.buffers[name] = taken(buffer, index)
        self.vectors = self._vectors_of(index)
        self.generators = [self.generators[i] for i in index]
        self.unread = [self.unread[i] for i in index]

    def move(self, rows: Sequence[int], to: "Rows") -> None:
        """Move `rows`, in that order, to where no trial is, but trials of the same structure were."""
        index = list(rows)
        stay = [row for row in range(self.size) if row not in index]
        most = self.row_bytes
        self._begin_move()
        to.once, to._written = self.once, set(self._written)  # the same copies: nothing writes to them
        for name, tensor in self.parameters.items():
            if name in self.once:
                self.parameters[name], to.parameters[name] = (spread(self.once[name], len(n)) for n in (stay, index))
            else:
                parts = parted(tensor, stay, index, most)
                self.parameters[name], to.parameters[name] = (_parameter(p, tensor.requires_grad) for p in parts)
        for name, buffer in self.buffers.items():
            self.buffers[name], to.buffers[name] = parted(buffer, stay, index, most)
        to.vectors, self.vectors = self._vectors_of(index), self._vectors_of(stay)
        to.generators, self.generators = ([self.generators[i] for i in own] for own in (index, stay))
        to.unread, self.unread = ([self.unread[i] for i in own] for own in (index, stay))

    def append(self, other: "Rows") -> None:
        """Take over the trials of `other`, which have the same structure, after these; `other` is of no use then.

        What both hold once stays so if its bits are equal. Else each trial gets its own.
        """
        both = {n: t for n, t in self.once.items() if n in other.once and same_bits(t, other.once[n])}
        size = self.size + other.size
        for each in (self, other):
            each._begin_move()
        for name, tensor in self.parameters.items():
            if name in both:
                self.parameters[name] = spread(both[name], size)
                continue
            own, more = tensor, other.parameters[name]
            apart = name not in self.once and name not in other.once  # others may refer to what is held once
            self.parameters[name] = _parameter((joined if apart else _joined)(own, more), tensor.requires_grad)
        self.once = HeldOnce(both)
        for name, buffer in self.buffers.items():
            self.buffers[name] = joined(buffer, other.buffers[name])
        for path, table in self.vectors.items():
            for name in table:
                table[name] = table[name] + other.vectors[path][name]
        self.generators = self.generators + other.generators
        self.unread = self.unread + other.unread

    def _begin_move(self) -> None:
        """Forget what belongs to the last step."""
        self.forget_gradients()
        self._noted = {}

    def _vectors_of(self, rows: Sequence[int]) -> Vectors:
        return {
            path: {n: [values[i] for i in rows] for n, values in table.items()} for path, table in self.vectors.items()
        }

    def to(self, device: torch.device) -> None:
        """Move all rows. On another kind of device, a random stream continues from a seed that it draws."""
        self.once = HeldOnce({n: t.to(device) for n, t in self.once.items()})
        self.parameters = {
            n: spread(self.once[n], self.size) if n in self.once else _parameter(t.detach().to(device), t.requires_grad)
            for n, t in self.parameters.items()
        }
        self.buffers = {n: t.to(device) for n, t in self.buffers.items()}
        self.generators = [moved(g, device) for g in self.generators]

    def unshare(self, names: Collection[str]) -> None:
        """Give each trial its own copy of the parameters in `names`, for good: they are held once and written to."""
        self._written.update(names)
        own = {
            n: _parameter(self.parameters[n].detach().clone(memory_format=torch.contiguous_format), False)
            for n in names
        }
        self.once = HeldOnce({n: t for n, t in self.once.items() if n not in own})
        self.parameters = {n: own.get(n, t) for n, t in self.parameters.items()}
        self.rebind()

    def share(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the only copies in `tensors` by these."""
        self.once = HeldOnce({n: tensors.get(n, t) for n, t in self.once.items()})
        self.parameters = {
            n: spread(self.once[n], self.size) if n in self.once else t for n, t in self.parameters.items()
        }
        self.rebind()

    def state_dict(self) -> dict[str, Any]:
        """Return all rows as plain containers of tensors and numbers. What is held once is not copied."""
        return {
            "parameters": {n: t.detach().clone() for n, t in self.parameters.items() if n not in self.once},
            "once": dict(self.once.items()),
            "buffers": {n: t.clone() for n, t in self.buffers.items()},
            "vectors": {p: {n: list(v) for n, v in table.items()} for p, table in self.vectors.items()},
            "generators": [g.get_state() for g in self.generators],
            "unread": list(self.unread),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all rows by those of `state`. K may change.

        Raises:
            FuseError: `state` is from trials of another structure.
        """
        once, size = state["once"], len(state["generators"])
        stacked = {**state["parameters"], **{n: t.unsqueeze(0) for n, t in once.items()}}
        for mine, theirs in ((self.parameters, stacked), (self.buffers, state["buffers"])):
            for name in sorted(mine.keys() | theirs.keys()):
                want = _shape(mine.get(name))
                have = _shape(theirs.get(name))
                if want != have:
                    raise FuseError(f"checkpoint of another structure: '{name}' is {have} there, and {want} here")
        device = self.generators[0].device
        self.once = HeldOnce({n: t.to(device) for n, t in once.items()})
        self.parameters = {
            n: spread(self.once[n], size)
            if n in self.once
            else _parameter(state["parameters"][n].detach().to(t.device, copy=True), t.requires_grad)
            for n, t in self.parameters.items()
        }
        self.buffers = {n: state["buffers"][n].to(t.device, copy=True) for n, t in self.buffers.items()}
        self.vectors = {p: {n: list(v) for n, v in table.items()} for p, table in state["vectors"].items()}
        self.generators = [generator(device, state=saved) for saved in state["generators"]]
        self.unread = list(state["unread"])
        if written := self._written.intersection(self.once):
            self.unshare(written)


def ask_no_gate(unit: int = 0) -> None:
    """Let a unit run at once."""


def generator(device: torch.device, seed: int = 0, state: Tensor | None = None) -> torch.Generator:
    """Return a random stream on `device` that starts at `state` or, if that does not fit, at `seed`."""
    made = torch.Generator(device)
    made.manual_seed(seed)
    if state is not None and state.shape == made.get_state().shape:  # a state of another device kind has another size
        made.set_state(state)
    return made


def moved(stream: torch.Generator, device: torch.device) -> torch.Generator:
    """Move `stream` to `device`. On another kind of device it continues from a seed that it draws."""
    if stream.device.type == device.type:
        return generator(device, state=stream.get_state())
    return generator(device, int(torch.randint(2**62, (), generator=stream, device=stream.device)))


def stack_parameters(tensors_K: Sequence[Tensor]) -> nn.Parameter:
    """Copy K trials' parameters into one parameter ``[K, *shape]``, in this order in memory whatever theirs is."""
    return _parameter(torch.stack([t.detach() for t in tensors_K]).contiguous(), tensors_K[0].requires_grad)


def _joined(one: Tensor, other: Tensor) -> Tensor:
    return torch.cat([one.detach(), other.detach()])


def _parameter(data: Tensor, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=requires_grad)


def _facts(tensor: Tensor | None) -> object:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape[1:])}"
