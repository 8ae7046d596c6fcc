"""Small parameters side by side as one matrix over trials, so that a few kernels update them all."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trials.optim.gradients import Gradients
from trials.optim.multi_tensor import multi_tensor
from trials.optim.registry import Rule, SinglePass, Tensors

Piece = tuple[int, int]
"""Number i of n pieces into which a block is divided."""

Counts = dict[str, NDArray[Any]]

Tables = dict[str, dict[str, Tensor]]
"""Parameter -> kind of state -> ``[K, *shape]``."""

Absent = Mapping[str, frozenset[int]]
"""A parameter -> the rows that have no gradient, though others have."""

ROW_COLUMNS = 8192
"""From how many weights per trial on K calls of a kernel for one trial beat kernels that all trials share."""

ROWS_ELEMENTS = 1 << 15
"""Update this many weights trial by trial before asking the gate again: a quarter of a millisecond of one core."""

MANY_WEIGHTS = 1 << 17
"""From how many weights of all trials on small parameters are updated where they are, not as one matrix."""


class Block:
    """Parameters of one param group, type and multipliers, and the state of their updates.

    They lie side by side as one matrix over trials, so that a few kernels update them all. A single-pass kernel takes
    them one by one instead, as they are, without copies. A rule that is not elementwise has blocks of a single
    parameter, and sees its own shape.

    Attributes:
        names: the parameters.
        part: the number of their param group and multipliers.
        counts: the state's numbers, each ``[K]``.
        columns: how many weights a trial has in it; 0 where the rule is not elementwise.
        by_row: whether it is updated trial by trial, by a kernel that passes over the memory once.
        waits: whether the parameters have no gradient in the step under way.
        skip: the rows that stay as they are in the step under way; others may by `Gradients.alive_K`.
        table: the coefficients of the step under way, ``[n, K, ...]``, or, by row, nothing.
        coefficients: their names.
        numbers_K: by row, each trial's hyperparameters.
        common: the hyperparameters that are equal for all trials.
    """

    def __init__(
        self,
        rule: Rule,
        part: int,
        names: Sequence[str],
        parameters: Mapping[str, nn.Parameter],
        tables: Mapping[str, Mapping[str, Tensor]],
        counts: Counts,
        alike: bool,
    ) -> None:
        """Take `counts` and, where it has the right form, the state in `tables` as they are; `parameters` by name.

        With `alike`, the trials agree in everything that a single-pass kernel takes only once.
        """
        self.rule = rule
        self.part = part
        self.names = tuple(names)
        self.counts = counts
        self.waits = False
        self.skip: list[int] = []
        self.table = torch.empty(0)
        self.coefficients: tuple[str, ...] = ()
        self._vectors: dict[str, Tensor] = {}
        self.numbers_K: Sequence[Mapping[str, float]] = ()
        self.common: Mapping[str, float] = {}
        self._parameters = [parameters[name] for name in names]
        self._views = [p.detach().view(_matrix(p)) for p in self._parameters] if rule.elementwise else []
        self._sizes = [view.shape[1] for view in self._views]
        self.columns = sum(self._sizes)
        self._single_pass = rule if isinstance(rule, SinglePass) and self.like.device.type == "cpu" else None
        self.by_row = self._single_pass is not None and (len(self.like) == 1 or self.columns >= ROW_COLUMNS)
        self._alike = alike
        self._apart = self._single_pass is not None and len(names) > 1 and (self.by_row or self._large)
        state = {kind: [tables[name][kind] for name in names] for kind in rule.kinds}
        if self._apart:
            self._pieces = {kind: [_flat(t) for t in own] for kind, own in state.items()}
        else:
            self._state = {kind: _join(own, rule.elementwise) for kind, own in state.items()}
        by_one = self._single_pass is None and rule.elementwise
        self._multi_tensor = multi_tensor(rule, self._views, self._state) if by_one else None
        # one trial's are taken as they are
        self._alone = self._apart and len(self.like) == 1
        if self._alone:
            like = [p.detach() for p in self._parameters]
            self._p_K = [like]
            self._s_K = [{k: [t.view_as(p) for t, p in zip(own, like, strict=True)] for k, own in self._pieces.items()}]
        elif self.by_row:
            pieces = self._pieces if self._apart else {kind: [t] for kind, t in self._state.items()}
            size = len(self.like)
            self._p_K = [[view[row] for view in self._views] for row in range(size)]
            self._s_K = [{kind: [t[row] for t in own] for kind, own in pieces.items()} for row in range(size)]

    @property
    def like(self) -> nn.Parameter:
        """A parameter, for type, device and number of axes."""
        return self._parameters[0]

    @property
    def _large(self) -> bool:
        """Whether copies would cost more than calls, and the trials are equal enough to do without."""
        same = self._alike and len(set(self.counts["step"].tolist())) == 1
        return same and len(self.like) * self.columns >= MANY_WEIGHTS

    def is_torn(self, absent: Absent) -> bool:
        """Whether the parameters differ in which trials have a gradient; `absent` names the rows without."""
        return len(self._names_by_gradient(absent)) > 1

    @property
    def key(self) -> Hashable:
        """Equal for blocks that have the same coefficients in their next step."""
        return self.key_at(self.counts)

    def key_at(self, counts: Counts) -> Hashable:
        """What `key` is when the counts are these."""
        axes = 2 if self.rule.elementwise else self.like.ndim
        return self.part, self.like.dtype, axes, b"".join([values.tobytes() for values in counts.values()])

    def use(self, names: tuple[str, ...], table: Tensor) -> None:
        """Take the coefficients of the next steps from `table`; the gradients are there already."""
        self.coefficients, self.table = names, table
        self._vectors = dict(zip(names, table.unbind(0), strict=True))
        if self._multi_tensor is not None:
            self._multi_tensor.look(self._parameters, self._gradients())

    @property
    def addresses(self) -> Tensor | None:
        """What a recorded step reads besides `state` and `table`, as long as the gradients stay where they are."""
        return None if self._multi_tensor is None else self._multi_tensor.addresses

    def state(self) -> list[Tensor]:
        """Return all tensors that `step` changes."""
        kept = (t for own in self._pieces.values() for t in own) if self._apart else self._state.values()
        return [p.detach() for p in self._parameters] + list(kept)

    @property
    def is_queued(self) -> bool:
        """Whether all that `step` does is queued on the device, and reads nothing of the host's but `table`."""
        return self._single_pass is None and not self.skip

    def step(self, piece: Piece, scratch: Tensor, change: Gradients | None, again: Callable[[], None]) -> None:
        """Update a piece of the parameters of all trials but those in `self.skip`, and those that `change` keeps.

        Args:
            piece: which one; blocks of several parameters have one only.
            scratch: at least four rows, each with the elements of the largest piece of columns.
            change: changes the gradients first.
            again: called now and then between trials that are updated one by one.
        """
        gradients, skip, ours = self._gradients(), self.skip, self._multi_tensor
        given = piece, self.coefficients, self.table, self._parameters, gradients, change
        if ours is not None and not skip and ours.run(*given):
            return
        if self.by_row:
            assert change is None or change.alive_K is None  # who has such kernels waits for no value
            self._step_rows(piece, gradients, change, skip, again)
            return
        if self._apart:
            sizes = [view.numel() for view in self._views]
            a, b = (list(row[: sum(sizes)].split(sizes)) for row in scratch[:2])
            work = (
                [t.view_as(v) for t, v in zip(a, self._views, strict=True)],
                [t.view_as(v) for t, v in zip(b, self._views, strict=True)],
            )
            self._update(self._views, [_flat(g) for g in gradients], self._pieces, work, piece, change, skip)
            return
        p, g, s, one, other = self._piece(piece, scratch, gradients)
        self._update([p], [g], {kind: [t] for kind, t in s.items()}, ([one], [other]), piece, change, skip)
        if len(self._views) > 1:
            torch._foreach_copy_(self._views, p.split(self._sizes, 1))

    def _update(
        self,
        p: Tensors,
        g: Tensors,
        s: dict[str, Tensors],
        work: tuple[Tensors, Tensors],
        piece: Piece,
        change: Gradients | None,
        skip: list[int],
    ) -> None:
        """All trials at once."""
        if change is not None:
            g = [change.apply(own) for own in g]
        if self.rule.maximize:
            g = [own.neg() for own in g]
        alive_K, changed = None if change is None else change.alive_K, [t for own in (p, *s.values()) for t in own]
        kept = [(t, t[skip]) for t in changed] if skip else ()
        before = [] if alive_K is None else [t.clone() for t in changed]
        # trials that stay as they are must not decide how the others are computed
        is_whole = self._single_pass is not None and piece[1] == 1
        steps = set(np.delete(self.counts["step"], skip).tolist()) if is_whole else set()
        if self._single_pass is not None and len(steps) == 1 and self.common.keys() >= self._single_pass.shared:
            step = torch.tensor(steps.pop(), dtype=torch.float32)
            self._single_pass.update_common(p, g, s, self._vectors, self.common, step, work)
        else:
            for index, (own, gradient, *rest) in enumerate(zip(p, g, *work, strict=True)):
                self.rule.update(own, gradient, {kind: t[index] for kind, t in s.items()}, self._vectors, *rest)
        for tensor, rows in kept:
            tensor[skip] = rows
        if alive_K is not None:
            for tensor, own in zip(changed, before, strict=True):
                torch.where(alive_K.view(-1, *[1] * (tensor.ndim - 1)), tensor, own, out=tensor)

    def _step_rows(
        self,
        piece: Piece,
        gradients: Tensors,
        change: Gradients | None,
        skip: list[int],
        again: Callable[[], None],
    ) -> None:
        """`step`, trial by trial. A piece is a range of all trials' weights, one trial after another."""
        assert self._single_pass is not None  # the caller looked
        steps = {count: torch.tensor(count, dtype=torch.float32) for count in set(self.counts["step"].tolist())}
        if self._alone:
            g = gradients if change is None else [change.apply(own) for own in gradients]
            g = [own.neg() if self.rule.maximize else own.contiguous() for own in g]
            if not skip:
                (step,) = steps.values()
                self._single_pass.kernel(self._p_K[0], g, self._s_K[0], self.numbers_K[0], step)
            return
        g_K = list(zip(*(_flat(g).unbind(0) for g in gradients), strict=True))
        size, columns = len(self.like), self.columns
        start, end = (size * columns * i // piece[1] for i in (piece[0], piece[0] + 1))
        updated = 0
        for row in range(start // columns, -(-end // columns)):
            if row in skip:
                continue
            if updated >= ROWS_ELEMENTS:
                again()
                updated = 0
            updated += columns
            p, g, s = self._p_K[row], list(g_K[row]), self._s_K[row]
            if change is not None:
                g = [change.of(slice(row, row + 1)).apply(own[None])[0] for own in g]
            if self.rule.maximize:
                g = [own.neg() for own in g]
            first, last = max(start - row * columns, 0), min(end - row * columns, columns)
            if last - first < columns:
                p, g = [p[0][first:last]], [g[0][first:last]]
                s = {kind: [t[0][first:last]] for kind, t in s.items()}
            self._single_pass.kernel(p, g, s, self.numbers_K[row], steps[float(self.counts["step"][row])])

    def _gradients(self) -> Tensors:
        return [p.grad for p in self._parameters if p.grad is not None]

    def let_go(self) -> None:
        """Hold no memory of the parameters any more. The block cannot step then, but still has its state."""
        self._views, self._p_K = [], []

    def parts(self, absent: Absent) -> "Iterator[Block]":
        """This block or, if it is torn, several."""
        parts = self._names_by_gradient(absent)
        if len(parts) == 1:
            yield self
            return
        tables, parameters = self.tables(), dict(zip(self.names, self._parameters, strict=True))
        for names in parts:
            counts = {name: values.copy() for name, values in self.counts.items()}
            yield Block(self.rule, self.part, names, parameters, tables, counts, self._alike)

    def _names_by_gradient(self, absent: Absent) -> list[list[str]]:
        parts: dict[Hashable, list[str]] = {}
        for name, p in zip(self.names, self._parameters, strict=True):
            missing = None if p.grad is None else absent.get(name, frozenset())
            parts.setdefault(missing, []).append(name)
        return list(parts.values())

    def tables(self) -> Tables:
        """Views of the state by parameter and kind, each ``[K, *shape]``."""
        made: Tables = {name: {} for name in self.names}
        for kind in self.rule.kinds:
            if self._apart:
                pieces: Sequence[Tensor] = self._pieces[kind]
            else:
                tensor = self._state[kind]
                pieces = tensor.split(self._sizes, 1) if self.rule.elementwise else (tensor,)
            for name, p, piece in zip(self.names, self._parameters, pieces, strict=True):
                made[name][kind] = piece.reshape(p.shape)
        return made

    def _piece(
        self, piece: Piece, scratch: Tensor, gradients: Tensors
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor, Tensor]:
        """Parameters, gradients, state and two of scratch space, of a piece of the columns."""
        if not self.rule.elementwise:
            return self.like.detach(), gradients[0], self._state, scratch[0], scratch[0]
        start, end = (self.columns * i // piece[1] for i in (piece[0], piece[0] + 1))
        rows = len(self.like)
        spare = scratch[:, : rows * (end - start)].view(4, rows, end - start)
        if len(gradients) > 1:
            p = torch.cat(self._views, 1, out=spare[2])
            return p, torch.cat([_flat(g) for g in gradients], 1, out=spare[3]), self._state, spare[0], spare[1]
        p, g, s = self._views[0], _flat(gradients[0]), self._state
        if end - start < p.shape[1]:
            p, g, s = p[:, start:end], g[:, start:end], {kind: t[:, start:end] for kind, t in s.items()}
        return p, g, s, spare[0], spare[1]


def change_each(tables: Tables, change: Callable[[str, str, Tensor], Tensor]) -> Tables:
    """Change the tensors of `tables` one after another, so that each can be given back; `tables` is empty then."""
    made: Tables = {}
    while tables:
        name = next(iter(tables))
        kinds = tables.pop(name)
        made[name] = {kind: change(name, kind, kinds.pop(kind)) for kind in tuple(kinds)}
    return made


def first_state(rule: Rule, parameter: Tensor, states: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Tensor], Counts]:
    """One parameter's state for all trials, from their ordinary ones."""
    tensors = {}
    for kind in rule.kinds:
        tensors[kind] = parameter.detach().new_zeros((len(states), *parameter.shape[1:]))
        for row, state in zip(tensors[kind], states, strict=True):
            if (given := state.get(kind)) is not None:
                row.copy_(given.detach())
    numbers = [rule.start(state, parameter) for state in states]
    return tensors, {name: np.array([own[name] for own in numbers]) for name in rule.counts}


def counts_of(counts: Mapping[str, Counts], rows: Sequence[int]) -> dict[str, Counts]:
    """The counts of each parameter for the trials in `rows`."""
    return {name: {kind: values[rows] for kind, values in own.items()} for name, own in counts.items()}


def with_row(counts: Counts, row: int, like: Counts) -> Counts:
    """A copy of `counts` in which the trial in `row` has those in `like`."""
    made = {kind: values.copy() for kind, values in counts.items()}
    for kind, values in made.items():
        values[row] = like[kind][row]
    return made


def _join(tensors: Sequence[Tensor], elementwise: bool) -> Tensor:
    """``[K, *shape]`` tensors side by side; a single one that is not elementwise keeps its shape."""
    flat = [_flat(t) if elementwise else t for t in tensors]
    return torch.cat(flat, 1) if len(flat) > 1 else flat[0].contiguous()


def _matrix(tensor: Tensor) -> tuple[int, int]:
    return len(tensor), prod(tensor.shape[1:])


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(_matrix(tensor)).contiguous()
