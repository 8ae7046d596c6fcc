"""Small parameters side by side as one matrix over trials, so that a few kernels update them all."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trials.optim.gradients import Gradients
from trials.optim.registry import Rule

Span = tuple[int, int]
Counts = dict[str, NDArray[Any]]


class Block:
    """Parameters of one param group and type, and the state of their updates, each kind one tensor ``[K, N]``.

    A rule that is not elementwise has blocks of a single parameter, and sees its own shape.

    Attributes:
        names: the parameters.
        state: kind -> ``[K, N]``.
        counts: the state's numbers, each ``[K]``.
        columns: N; 0 where the rule is not elementwise.
        vectors: the coefficients of the step under way.
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
        self.vectors: dict[str, Tensor] = {}
        self._parameters = [parameters[name] for name in names]
        self._views = [p.detach().view(_matrix(p)) for p in self._parameters] if rule.elementwise else []
        self._sizes = [view.shape[1] for view in self._views]
        self.columns = sum(self._sizes)

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

    def step(self, span: Span, scratch: Tensor, change: Gradients | None, skip: list[int]) -> None:
        """Update columns `span` of all trials but those in `skip`.

        Args:
            span: first and last column.
            scratch: at least four rows of ``K · columns`` elements.
            change: what is done to the gradients first.
            skip: rows that stay as they are.
        """
        p, g, s, work = self._piece(span, scratch)
        if change is not None:
            g = change.apply(g)
        if self.rule.maximize:
            g = g.neg()
        kept = [(t, t[skip]) for t in (p, *s.values())] if skip else ()
        self.rule.update(p, g, s, self.vectors, *work)
        for tensor, rows in kept:
            tensor[skip] = rows
        if len(self._views) > 1:
            torch._foreach_copy_(self._views, p.split(self._sizes, 1))

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

    def _piece(self, span: Span, scratch: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor], tuple[Tensor, Tensor]]:
        """Parameters, gradients, state and scratch space of columns `span`."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not self.rule.elementwise:
            return self.like.detach(), gradients[0], self.state, (scratch[0], scratch[0])
        start, end = span
        rows = len(self.like)
        spare = scratch[:, : rows * (end - start)].view(4, rows, end - start)
        if len(gradients) > 1:
            p = torch.cat(self._views, 1, out=spare[2])
            g = torch.cat([_flat(g) for g in gradients], 1, out=spare[3])
            return p, g, self.state, (spare[0], spare[1])
        p, g, s = self._views[0], _flat(gradients[0]), self.state
        if end - start < p.shape[1]:
            p, g, s = p[:, start:end], g[:, start:end], {kind: t[:, start:end] for kind, t in s.items()}
        return p, g, s, (spare[0], spare[1])


def join(tensors: Sequence[Tensor], elementwise: bool) -> Tensor:
    """``[K, *shape]`` tensors side by side; a single one that is not elementwise keeps its shape."""
    flat = [_flat(t) if elementwise else t for t in tensors]
    return torch.cat(flat, 1) if len(flat) > 1 else flat[0].clone(memory_format=torch.contiguous_format)


def _matrix(tensor: Tensor) -> tuple[int, int]:
    return len(tensor), prod(tensor.shape[1:])


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 2 else tensor.reshape(_matrix(tensor))
