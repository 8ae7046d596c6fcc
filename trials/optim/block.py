"""Small parameters side by side as one matrix over trials, so that a few kernels update them all."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trials.optim.gradients import Gradients
from trials.optim.registry import Rule

Piece = tuple[int, int]
"""Number i of n pieces into which a block is divided."""

Counts = dict[str, NDArray[Any]]

ROW_COLUMNS = 8192
"""From how many weights per trial on K calls of a kernel for one trial beat kernels that all trials share."""


class Block:
    """Parameters of one param group and type, and the state of their updates, each kind one tensor ``[K, N]``.

    A rule that is not elementwise has blocks of a single parameter, and sees its own shape.

    Attributes:
        names: the parameters.
        state: kind -> ``[K, N]``.
        counts: the state's numbers, each ``[K]``.
        columns: N; 0 where the rule is not elementwise.
        by_row: whether it is updated trial by trial, by a kernel that passes over the memory once.
        waits: whether the parameters have no gradient in the step under way.
        vectors: the coefficients of the step under way, or, by row, nothing.
        numbers_K: by row, each trial's hyperparameters.
        common: the hyperparameters that are equal for all trials.
    """

    def __init__(
        self,
        rule: Rule,
        group: int,
        names: Sequence[str],
        parameters: Mapping[str, nn.Parameter],
        state: dict[str, Tensor],
        counts: Counts,
    ) -> None:
        """Take `state` and `counts` as they are; `parameters` by name."""
        self.rule = rule
        self.group = group
        self.names = tuple(names)
        self.state = state
        self.counts = counts
        self.waits = False
        self.vectors: dict[str, Tensor] = {}
        self.numbers_K: Sequence[Mapping[str, float]] = ()
        self.common: Mapping[str, float] = {}
        self._parameters = [parameters[name] for name in names]
        self._views = [p.detach().view(_matrix(p)) for p in self._parameters] if rule.elementwise else []
        self._sizes = [view.shape[1] for view in self._views]
        self.columns = sum(self._sizes)
        self._single_pass = rule.single_pass and self.like.device.type == "cpu"
        self.by_row = self._single_pass and (len(self.like) == 1 or self.columns >= ROW_COLUMNS)
        # one trial's tensors stay where they are
        self._apart = self.by_row and len(self.like) == 1 and len(names) > 1
        if self._apart:
            self._row = [view[0] for view in self._views]
            self._row_state = {kind: list(t[0].split(self._sizes)) for kind, t in state.items()}
        elif self.by_row:
            self._state_rows = {kind: t.unbind(0) for kind, t in state.items()}

    @property
    def like(self) -> nn.Parameter:
        """A parameter, for type, device and number of axes."""
        return self._parameters[0]

    @property
    def torn(self) -> bool:
        """Whether only some of the parameters have a gradient."""
        first = self.like.grad is None
        return any((p.grad is None) is not first for p in self._parameters)

    @property
    def key(self) -> Hashable:
        """Equal for blocks that have the same coefficients in their next step."""
        return self.key_at(self.counts)

    def key_at(self, counts: Counts) -> Hashable:
        """What `key` is when the counts are these."""
        axes = 2 if self.rule.elementwise else self.like.ndim
        return self.group, self.like.dtype, axes, b"".join([values.tobytes() for values in counts.values()])

    def step(self, piece: Piece, scratch: Tensor, change: Gradients | None, skip: list[int]) -> None:
        """Update a piece of the parameters of all trials but those in `skip`.

        Args:
            piece: which one; blocks of several parameters have one only.
            scratch: at least four rows, each with the elements of the largest piece of columns.
            change: what is done to the gradients first.
            skip: rows that stay as they are.
        """
        if self.by_row:
            self._step_rows(piece, scratch, change, skip)
            return
        p, g, s, work = self._piece(piece, scratch)
        if change is not None:
            g = change.apply(g)
        if self.rule.maximize:
            g = g.neg()
        kept = [(t, t[skip]) for t in (p, *s.values())] if skip else ()
        # trials that stay as they are must not decide how the others are computed
        steps = set(np.delete(self.counts["step"], skip).tolist()) if self._single_pass and piece[1] == 1 else set()
        if len(steps) == 1 and self.common.keys() >= self.rule.shared:
            step = torch.tensor(steps.pop(), dtype=torch.float32)
            self.rule.update_common(p, g, s, self.vectors, self.common, step, *work)
        else:
            self.rule.update(p, g, s, self.vectors, *work)
        for tensor, rows in kept:
            tensor[skip] = rows
        if len(self._views) > 1:
            torch._foreach_copy_(self._views, p.split(self._sizes, 1))

    def _step_rows(self, piece: Piece, scratch: Tensor, change: Gradients | None, skip: list[int]) -> None:
        """`step`, trial by trial. A piece is a range of all trials' weights, one trial after another."""
        steps = {count: torch.tensor(count, dtype=torch.float32) for count in set(self.counts["step"].tolist())}
        step_K = [steps[count] for count in self.counts["step"].tolist()]
        if self._apart:
            if not skip:
                gradients = [p.grad for p in self._parameters if p.grad is not None]
                g = [_flat(grad if change is None else change.apply(grad))[0] for grad in gradients]
                self.rule.update_row(self._row, g, self._row_state, self.numbers_K[0], step_K[0])
            return
        size, columns = len(self.like), self.columns
        p_KN, g_KN, _, _ = self._piece((0, 1), scratch)
        start, end = (size * columns * i // piece[1] for i in (piece[0], piece[0] + 1))
        p_K, g_K = p_KN.unbind(0), g_KN.unbind(0)
        for row in range(start // columns, -(-end // columns)):
            if row in skip:
                continue
            p_N, g_N, s_N = p_K[row], g_K[row], {kind: tensors[row] for kind, tensors in self._state_rows.items()}
            if change is not None:
                g_N = change.of(slice(row, row + 1)).apply(g_N[None])[0]
            first, last = max(start - row * columns, 0), min(end - row * columns, columns)
            if last - first < columns:
                p_N, g_N = p_N[first:last], g_N[first:last]
                s_N = {kind: t[first:last] for kind, t in s_N.items()}
            self.rule.update_row([p_N], [g_N], {k: [t] for k, t in s_N.items()}, self.numbers_K[row], step_K[row])
        if len(self._views) > 1:
            torch._foreach_copy_(self._views, p_KN.split(self._sizes, 1))

    def parts(self) -> "Iterator[Block]":
        """This block, or, where only some parameters have a gradient, two of them."""
        if not self.torn:
            yield self
            return
        present = [p.grad is not None for p in self._parameters]
        for wanted in (True, False):
            names = [name for name, has in zip(self.names, present, strict=True) if has is wanted]
            tables = self.tables()
            state = {kind: join([tables[name][kind] for name in names], True) for kind in self.state}
            counts = {name: values.copy() for name, values in self.counts.items()}
            parameters = dict(zip(self.names, self._parameters, strict=True))
            yield Block(self.rule, self.group, names, parameters, state, counts)

    def tables(self) -> dict[str, dict[str, Tensor]]:
        """Views of the state by parameter and kind, each ``[K, *shape]``."""
        made: dict[str, dict[str, Tensor]] = {name: {} for name in self.names}
        for kind, tensor in self.state.items():
            pieces = tensor.split(self._sizes, 1) if self.rule.elementwise else (tensor,)
            for name, p, piece in zip(self.names, self._parameters, pieces, strict=True):
                made[name][kind] = piece.reshape(p.shape)
        return made

    def _piece(self, piece: Piece, scratch: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor], tuple[Tensor, Tensor]]:
        """Parameters, gradients, state and scratch space of a piece of the columns."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not self.rule.elementwise:
            return self.like.detach(), gradients[0], self.state, (scratch[0], scratch[0])
        start, end = (self.columns * i // piece[1] for i in (piece[0], piece[0] + 1))
        rows = len(self.like)
        if len(gradients) > 1:
            spare = scratch[:, : rows * self.columns].view(4, rows, self.columns)
            p = torch.cat(self._views, 1, out=spare[2])
            g = torch.cat([_flat(g) for g in gradients], 1, out=spare[3])
            return p, g, self.state, (spare[0], spare[1])
        p, g, s = self._views[0], _flat(gradients[0]), self.state
        if self.by_row:
            return p, g, s, (scratch[0], scratch[0])
        if end - start < p.shape[1]:
            p, g, s = p[:, start:end], g[:, start:end], {kind: t[:, start:end] for kind, t in s.items()}
        spare = scratch[:, : rows * (end - start)].view(4, rows, end - start)
        return p, g, s, (spare[0], spare[1])


def join(tensors: Sequence[Tensor], elementwise: bool) -> Tensor:
    """``[K, *shape]`` tensors side by side; a single one that is not elementwise keeps its shape."""
    flat = [_flat(t) if elementwise else t for t in tensors]
    return torch.cat(flat, 1) if len(flat) > 1 else flat[0].clone(memory_format=torch.contiguous_format)


def _matrix(tensor: Tensor) -> tuple[int, int]:
    return len(tensor), prod(tensor.shape[1:])


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(_matrix(tensor)).contiguous()
