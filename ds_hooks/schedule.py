"""Where the bubbles of a step are, found in its schedule before it runs.

DeepSpeed's schedules are pure, so every wait is known in advance. Waits with no compute between them are one bubble.
Its *slot* is the index of its first instruction, counted on from one schedule to the next. `ReduceGrads` computes while
it waits, so it joins no other bubble.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ds_hooks.shared.wire import InstructionKind, WaitKind

INSTRUCTION_KINDS = {
    "RecvActivation": InstructionKind.RECV_ACTIVATION,
    "RecvGrad": InstructionKind.RECV_GRAD,
    "SendActivation": InstructionKind.SEND_ACTIVATION,
    "SendGrad": InstructionKind.SEND_GRAD,
    "CommitP2P": InstructionKind.COMMIT_P2P,
    "ReduceTiedGrads": InstructionKind.REDUCE_TIED_GRADS,
    "ReduceGrads": InstructionKind.REDUCE_GRADS,
    "LoadMicroBatch": InstructionKind.LOAD_MICRO_BATCH,
    "ForwardPass": InstructionKind.FORWARD_PASS,
    "BackwardPass": InstructionKind.BACKWARD_PASS,
    "OptimizerStep": InstructionKind.OPTIMIZER_STEP,
}
_P2P = frozenset({"RecvActivation", "RecvGrad", "SendActivation", "SendGrad"})
_COMPUTES_TOO = "ReduceGrads"
"""Copies gradients into buckets, sums them and copies them back. So it is a bubble of its own, which stays shut unless
the configuration names its kind, and without peers it is no wait at all."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One instruction of a step, and whether a bubble opens before it or closes after it.

    Attributes:
        name: the instruction's class.
        kind: its number on the wire.
        opens: the kind of the bubble that opens before it, if one does: its first receive, since sends wait briefly,
            or else its first wait.
        closes: whether a bubble closes after it.
    """

    name: str
    kind: InstructionKind
    opens: WaitKind | None
    closes: bool


@dataclass(frozen=True, slots=True)
class Waits:
    """Which instructions of an engine wait on a peer, and which neither wait nor compute.

    Args:
        queued_p2p: sends and receives only queue, and `CommitP2P` waits (DualPipeV).
        tied: the model has weights tied across stages, so `ReduceTiedGrads` communicates.
        data_parallel: there are data-parallel peers, so `ReduceGrads` communicates.
    """

    queued_p2p: bool
    tied: bool
    data_parallel: bool

    def waiting(self) -> frozenset[str]:
        """The names of the instructions that wait."""
        names = {"CommitP2P"} if self.queued_p2p else set(_P2P)
        if self.tied:
            names.add("ReduceTiedGrads")
        if self.data_parallel:
            names.add(_COMPUTES_TOO)
        return frozenset(names)

    def passive(self) -> frozenset[str]:
        """The names of the instructions that neither wait nor compute, so that a bubble spans them."""
        return _P2P if self.queued_p2p else frozenset()


@dataclass(frozen=True, slots=True)
class NumberedSlots:
    """One schedule's instructions, and the numbers of its slots.

    Attributes:
        order: one `Slot` per instruction.
        first: the number of the first; those of the others, and of the loss, follow.
        collectives: the numbers of the collectives inside the optimizer's instruction that have been met, in order.
    """

    order: Sequence[Slot]
    first: int
    collectives: list[int]


class SlotNumbers:
    """Numbers the slots of all schedules of one engine, each by itself.

    A job may change its schedule, as by `set_train_batch_size`. What was learnt and planned for a bubble of one must
    not hold for a bubble of another that has the same index.

    Args:
        waits: what waits in this engine.
    """

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._known: dict[Hashable, NumberedSlots] = {}
        self._next = 0

    def of(self, schedule: Any) -> NumberedSlots:
        """The slots of `schedule`, the same whenever it comes again."""
        key = (type(schedule), schedule.micro_batches, schedule.stages, schedule.stage_id)
        found = self._known.get(key)
        if found is None:
            names = (type(command).__name__ for commands in schedule.steps() for command in commands)
            found = self._known[key] = NumberedSlots(find_slots(names, self._waits), self._next, [])
            self._next += len(found.order) + 1
        return found

    def of_collective(self, slots: NumberedSlots, index: int) -> int:
        """The slot of the collective `index` of the optimizer's instruction. A schedule does not say how many come."""
        while index >= len(slots.collectives):
            slots.collectives.append(self._next)
            self._next += 1
        return slots.collectives[index]


def find_slots(names: Iterable[str], waits: Waits) -> Sequence[Slot]:
    """Mark where bubbles open and close.

    Args:
        names: the class names of one stage's instructions in order.
        waits: what waits in this engine.

    Returns:
        One `Slot` per instruction.
    """
    order = list(names)
    waiting, passive = waits.waiting(), waits.passive()
    bubbles: list[list[int]] = []
    is_open = False
    for index, name in enumerate(order):
        if name in waiting:
            if not is_open or name == _COMPUTES_TOO:
                bubbles.append([])
            bubbles[-1].append(index)
            is_open = name != _COMPUTES_TOO
        elif name not in passive:
            is_open = False
    opens = {indexes[0]: _bubble_kind([order[index] for index in indexes]) for indexes in bubbles}
    closes = {indexes[-1] for indexes in bubbles}
    return [
        Slot(name, INSTRUCTION_KINDS.get(name, InstructionKind.OTHER), opens.get(index), index in closes)
        for index, name in enumerate(order)
    ]


def _bubble_kind(names: Sequence[str]) -> WaitKind:
    """The kind of a bubble of these merged waits."""
    first = next((name for name in names if name.startswith("Recv")), names[0])
    return WaitKind(int(INSTRUCTION_KINDS[first]))
