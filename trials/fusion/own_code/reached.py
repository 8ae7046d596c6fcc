"""Finds which trials' gradients reach which parameters: in a loop over trials, each takes its own way through the code.

A parameter that one trial does not use has no gradient alone. Among others its row's gradient is zero, which an
optimizer would take for one.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trials.fusion.own_code.trees import heads

_OF_A_LOOP = "stacks the outputs of trials"
"""The mark of a node in autograd's graph."""


class Reached:
    """What has reached the parameters since their gradients were None."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._watched: list[tuple[int, set[int]]] = []
        self._roots: list[Any] = []
        self._trials: dict[str, set[int]] = {}

    def forget(self) -> None:
        """Begin anew, because all gradients are None."""
        self._watched, self._roots, self._trials = [], [], {}

    def start_at(self, outputs: Any, one_of_several: bool = False) -> None:
        """Note where a backward pass will begin, if there was a loop before it, or may be in a later one."""
        if self._watched or one_of_several:
            self._roots += [tensor.grad_fn for tensor in heads(outputs)]

    def watch(self, tensor_K: Tensor, rows: Iterable[Tensor]) -> None:
        """Notice which of a tensor's rows get a gradient."""
        if not tensor_K.requires_grad or not torch.is_grad_enabled():
            return
        seen: set[int] = set()
        self._watched.append((len(tensor_K), seen))
        nodes: dict[Any, list[int]] = {}
        for number, row in enumerate(rows):
            nodes.setdefault(row.grad_fn, []).append(number)
        for node, numbers in nodes.items():
            node.register_prehook(_noting(seen, numbers))

    def leave(self, output: Any) -> None:
        """Mark the outputs of all trials, which a loop has stacked."""
        for tensor in heads(output):
            node: Any = tensor.grad_fn
            node.metadata[_OF_A_LOOP] = True

    def absent(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, frozenset[int]]:
        """Return the rows of each parameter that no gradient has reached, where others' have."""
        if not self._watched and not self._trials:
            return {}
        present = {name: p for name, p in parameters.items() if p.grad is not None}
        every = {name: set(range(len(p))) for name, p in present.items()}
        if any(0 < len(seen) < size for size, seen in self._watched):
            found = _reaching(self._roots, {id(p): name for name, p in present.items()})
        else:
            found = every
        for name in present:
            self._trials.setdefault(name, set()).update(found.get(name, every[name]))
        self._watched, self._roots = [], []
        missing = {name: frozenset(every[name] - self._trials[name]) for name in present}
        return {name: rows for name, rows in missing.items() if rows}


def _noting(seen: set[int], numbers: list[int]) -> Callable[[tuple[Tensor | None, ...]], None]:
    """Return a hook for a node that has one gradient for each of the rows in `numbers`."""

    def note(gradients: tuple[Tensor | None, ...]) -> None:
        seen.update(number for number, gradient in zip(numbers, gradients, strict=True) if gradient is not None)

    return note


def _reaching(roots: Iterable[Any], names: Mapping[int, str]) -> dict[str, set[int]]:
    """Return the trials from whose outputs a path leads to each parameter.

    Args:
        roots: where the backward passes began, for all trials.
        names: the id of each parameter -> its name.
    """
    every = -1  # a bit per trial
    masks = dict.fromkeys(roots, every)
    for node in reversed(_in_order(masks)):
        by_trial = node.name() == "StackBackward0" and _OF_A_LOOP in node.metadata
        for number, (following, _) in enumerate(node.next_functions):
            if following is not None:
                through = masks[node] & (1 << number) if by_trial else masks[node]
                masks[following] = masks.get(following, 0) | through
    found: dict[str, set[int]] = {}
    for node, mask in masks.items():
        variable: Any = getattr(node, "variable", None)
        if id(variable) in names:
            found[names[id(variable)]] = {row for row in range(len(variable)) if mask >> row & 1}
    return found


def _in_order(roots: Iterable[Any]) -> list[Any]:
    """Return all nodes of the graph, each after those that it leads to."""
    done: dict[Any, None] = {}
    waiting = [(root, False) for root in roots]
    while waiting:
        node, left = waiting.pop()
        if left:
            done[node] = None
        elif node not in done:
            waiting.append((node, True))
            waiting += [(following, False) for following, _ in node.next_functions if following is not None]
    return list(done)
