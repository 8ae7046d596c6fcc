"""The optimizer's step after a pass by graph, as a CUDA graph of its own, clipping included.

What the host knows of a step, the coefficients of the trials' hyperparameters and counts, is copied to where the graph
reads it.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trials.fusion.errors import is_out_of_memory
from trials.fusion.rows import Rows
from trials.fusion.units import Units
from trials.optim import FusedOptimizer
from trials.optim.block import Block
from trials.optim.gradients import Gradients
from trials.optim.vector import VectorOptimizer
from trials.own_logger import own_logger
from trials.training import cuda_graph
from trials.training.cuda_graph import PROVEN_STEPS, PassGraph, Recorded

MOST_RECORDINGS = 8
"""A group records no more steps: something changes all the time."""

log = own_logger(__name__)

Change = Callable[[], Gradients | None]
"""Says how gradients are to be changed first. All that it does is queued on the device."""


@dataclass(eq=False)
class _Step:
    """A recorded step. `key` is equal while the host would queue the same on the same memory; it reads `held`, too."""

    key: Hashable
    blocks: list[Block]
    tables: list[Tensor]
    held: list[Tensor | None]
    recorded: Recorded
    proven: int = 0

    def copy_in(self) -> None:
        """Give the coefficients of the step that has begun to the graph."""
        torch._foreach_copy_(self.tables, [block.table for block in self.blocks])


class StepGraphs:
    """Takes the steps of one optimizer by graphs, where it can.

    Args:
        rows: of the group.
        units: of the group.
        optimizer: steps.
    """

    def __init__(self, rows: Rows, units: Units, optimizer: FusedOptimizer) -> None:
        self._rows, self._units = rows, units
        # others' kernels take longer than their launches
        self._optimizer = optimizer if isinstance(optimizer, VectorOptimizer) and len(optimizer.units) == 1 else None
        self._steps: WeakKeyDictionary[PassGraph, _Step] = WeakKeyDictionary()
        self._recordings = 0

    def takes(self, after: PassGraph | None) -> bool:
        """Whether steps after this pass are taken here."""
        return after is not None and self._optimizer is not None

    def run(self, after: PassGraph, enter: Callable[[int], None], change: Change, also: Hashable) -> None:
        """Take a step of all trials.

        Args:
            after: the pass that has left the gradients.
            enter: called with the index of the optimizer's unit before it runs.
            change: how the gradients are changed.
            also: equal while `change` queues the same on the same memory.
        """
        assert self._optimizer is not None  # see `takes`
        enter(0)
        blocks = self._optimizer.begin()
        step = self._steps.get(after)
        if not all(block.is_queued for block in blocks):
            step = None
        else:
            key = (*((id(block), block.coefficients, block.table.shape) for block in blocks), also)
            if step is None or step.key != key:
                step = self._record(after, key, blocks, change)
                enter(0)  # nothing is queued any more, and what follows must wait
        if step is None:
            self._ordinary(change)
            return
        step.copy_in()
        if step.proven < PROVEN_STEPS:
            self._prove(after, step, enter, change)
        else:
            step.recorded.replay()

    def _ordinary(self, change: Change) -> None:
        assert self._optimizer is not None
        self._optimizer.update(gradients=change())

    def _record(self, after: PassGraph, key: Hashable, blocks: Sequence[Block], change: Change) -> _Step | None:
        if self._recordings == MOST_RECORDINGS or cuda_graph.is_broken():
            return None
        self._recordings += 1
        given = [block.table for block in blocks]
        tables, held = [table.clone() for table in given], [block.addresses for block in blocks]
        self._units.settle()
        try:
            for block, table in zip(blocks, tables, strict=True):
                block.use(block.coefficients, table)
            with torch.no_grad(), self._units.unasked():
                _, recorded = cuda_graph.record(lambda: self._ordinary(change), self._rows, False)
        except Exception as error:
            self._refuse(f"it cannot be recorded: {error}", error)
            return None
        finally:
            for block, table in zip(blocks, given, strict=True):
                block.use(block.coefficients, table)
        made = self._steps[after] = _Step(key, list(blocks), tables, held, recorded)
        return made

    def _prove(self, after: PassGraph, step: _Step, enter: Callable[[int], None], change: Change) -> None:
        """Take the step both ways, from the same state, and compare. The ordinary one counts.

        The gate is asked for each part, none of which takes longer than a step.
        """
        held = [tensor for block in step.blocks for tensor in block.state()]
        try:
            before = [tensor.clone() for tensor in held]
            enter(0)
            step.recorded.replay()
            try:
                enter(0)
                found = [tensor.clone() for tensor in held]
            finally:
                torch._foreach_copy_(held, before)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            del self._steps[after]
            self._refuse("there is no room to prove it", error)
            self._ordinary(change)
            return
        enter(0)
        self._ordinary(change)
        enter(0)
        same = [_alike(one, other) for one, other in zip(found, held, strict=True)]
        all_same = torch.stack(same).all()
        self._units.settle()
        if all_same.item():
            step.proven += 1
            return
        del self._steps[after]
        self._refuse("it gave other weights than an ordinary step")

    def _refuse(self, reason: str, error: Exception | None = None) -> None:
        log.info("optimizer steps go without a CUDA graph, kernel by kernel: %s", reason.partition("\n")[0])
        self._recordings = MOST_RECORDINGS
        if error is not None and is_out_of_memory(error):
            torch.cuda.empty_cache()


def _alike(one: Tensor, other: Tensor) -> Tensor:
    return ((one == other) | (one != one) & (other != other)).all()
