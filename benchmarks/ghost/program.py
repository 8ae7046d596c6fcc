"""A pipeline's shape and its stages' steps as plain data: DeepSpeed's schedule in numbered operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Verb = Literal["send", "recv", "compute", "sync"]

# Instruction name -> (verb, what). LoadMicroBatch and the reductions are part of the compute that they stand beside.
_MEANING: dict[str, tuple[Verb, str]] = {
    "SendActivation": ("send", "activation"),
    "RecvActivation": ("recv", "activation"),
    "SendGrad": ("send", "gradient"),
    "RecvGrad": ("recv", "gradient"),
    "ForwardPass": ("compute", "forward"),
    "BackwardPass": ("compute", "backward"),
    "OptimizerStep": ("compute", "optimizer"),
}
_COMMIT = "CommitP2P"
"""In DualPipeV, sends and receives only queue, and this launches them together and waits for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GhostShape:
    """A pipeline's shape, and the number of its true stage.

    Attributes:
        stages: P, at least 2.
        stage: the true stage, 0 .. P-1.
        micro_batches: M, at least 1.
        slow_last: how many times slower the last stage computes than the others.
        jitter: every ghost compute is scaled by a factor drawn from 1 - jitter .. 1 + jitter.
        seed: of the jitter, the weights and the data.
        latency_us: time from a send to its message's arrival.
        clipping: clip gradients by their norm over all stages, as DeepSpeed does by default. Its all-reduce makes every
            stage wait in `OptimizerStep` for the last one to get there.
        dualpipev: DeepSpeed's DualPipeV: each rank holds two stages, and micro-batches travel out and back again.
    """

    stages: int
    stage: int
    micro_batches: int
    slow_last: float = 1.0
    jitter: float = 0.0
    seed: int = 0
    latency_us: float = 0.0
    clipping: bool = True
    dualpipev: bool = False

    def __post_init__(self) -> None:
        allowed = {
            "stages": (self.stages >= 2, "at least 2"),
            "stage": (0 <= self.stage < self.stages, f"0 .. {self.stages - 1}"),
            "micro_batches": (
                self.micro_batches >= (2 * self.stages if self.dualpipev else 1),
                f"at least {2 * self.stages}" if self.dualpipev else "at least 1",
            ),
            "slow_last": (self.slow_last > 0, "above 0"),
            "jitter": (0 <= self.jitter < 1, "from 0 to below 1"),
            "latency_us": (self.latency_us >= 0, "at least 0"),
        }
        for name, (valid, rule) in allowed.items():
            if not valid:
                raise ValueError(f"GhostShape.{name} = {getattr(self, name)!r}: must be {rule}")


class GhostModelError(RuntimeError):
    """The true stage and its program disagree, or nobody can send a requested message."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a stage in a step.

    Attributes:
        slot: index of the instruction in the stage's flattened schedule; the loss broadcast comes after the last one.
        verb: "send", "recv", "compute", or "sync": wait until every stage is there.
        what: "activation", "gradient", "loss" or "norm" for messages; "forward", "backward" or "optimizer" for compute.
        micro_batch: number of the micro-batch in the step; 0 for the optimizer, the loss and the norm. In DualPipeV's
            messages the number of its buffer, which both ends share.
        peer: the stage at the other end of a message; -1 where that is every other stage.
    """

    slot: int
    verb: Verb
    what: str
    micro_batch: int
    peer: int = -1

    @property
    def is_for_all(self) -> bool:
        """Every stage takes part."""
        return self.what in ("loss", "norm")


def meeting(op: Op, stage: int) -> tuple[str, int, int]:
    """What the operations of all parties to one message or collective have in common.

    Args:
        op: a message or collective.
        stage: one of its parties.
    """
    return op.what, op.micro_batch, -1 if op.is_for_all else min(stage, op.peer)


def stage_program(schedule: Any, *, clipping: bool = True) -> tuple[Op, ...]:
    """Flatten one stage's schedule into ops, and add the loss broadcast that follows it in `train_batch`.

    Args:
        schedule: a DeepSpeed `TrainSchedule` or `DualPipeVSchedule`; only `steps()`, `stage_id`, `stages` and class
            names are used, and of DualPipeV's instructions `buffer_id` and `phase`.
        clipping: the optimizer begins with an all-reduce of the gradients' norm over all stages.
    """
    stage = schedule.stage_id
    instructions = [instruction for commands in schedule.steps() for instruction in commands]
    queues = any(type(instruction).__name__ == _COMMIT for instruction in instructions)
    ops: list[Op] = []
    queued: list[Op] = []
    counts: dict[tuple[Verb, str], int] = {}
    for slot, instruction in enumerate(instructions):
        if type(instruction).__name__ == _COMMIT:
            # all that was queued is launched at once, so nothing is sent before its commit
            for verb in ("send", "recv"):
                ops += [replace(op, slot=slot) for op in queued if op.verb == verb]
            queued.clear()
        meaning = _MEANING.get(type(instruction).__name__)
        if meaning is None:
            continue
        if clipping and meaning == ("compute", "optimizer"):
            ops.append(Op(slot, "sync", "norm", 0))
        # Each kind passes through the micro-batches in order, so the n-th one belongs to micro-batch n.
        number = counts.get(meaning, 0)
        counts[meaning] = number + 1
        if meaning[0] == "compute":
            ops.append(Op(slot, *meaning, number))
        elif queues:
            peer = _peer(stage, *meaning, outwards=instruction.phase == 0)
            queued.append(Op(slot, *meaning, instruction.buffer_id, peer))
        else:
            ops.append(Op(slot, *meaning, number, _peer(stage, *meaning)))
    loss_stage = 0 if queues else schedule.stages - 1
    own: tuple[Verb, int] = ("send", -1) if stage == loss_stage else ("recv", loss_stage)
    return (*ops, Op(len(instructions), own[0], "loss", 0, own[1]))


def programs_of(shape: GhostShape) -> list[tuple[Op, ...]]:
    """Every stage's operations in a step."""
    from deepspeed.runtime.pipe import schedule

    kind = schedule.DualPipeVSchedule if shape.dualpipev else schedule.TrainSchedule
    schedules = [kind(shape.micro_batches, shape.stages, stage) for stage in range(shape.stages)]
    return [stage_program(one, clipping=shape.clipping) for one in schedules]


def _peer(stage: int, verb: Verb, what: str, *, outwards: bool = True) -> int:
    """The stage at the other end of a message."""
    downstream = (verb == "send") == (what == "activation")
    return stage + 1 if downstream == outwards else stage - 1


class StageCursor:
    """Follows the true stage through its program, to identify each of its messages by step and op.

    Args:
        program: the true stage's ops.
    """

    def __init__(self, program: Sequence[Op]) -> None:
        self._messages = [op for op in program if op.verb != "compute"]
        self._position = 0

    def peek(self, verb: Verb, what: str, peer: int = -1) -> tuple[int, Op]:
        """Return (step, op) of the next message.

        Args:
            verb: what the engine does.
            what: the message.
            peer: the stage at its other end; -1: whichever.

        Raises:
            GhostModelError: if the next message of the program is of another kind.
        """
        step, index = divmod(self._position, len(self._messages))
        op = self._messages[index]
        if (op.verb, op.what) != (verb, what) or peer not in (-1, op.peer):
            raise GhostModelError(f"step {step}: the engine wants to {verb} {what}, but its schedule has {op}")
        return step, op

    def take(self, verb: Verb, what: str, peer: int = -1) -> tuple[int, Op]:
        """Like `peek`, then move to the message after it."""
        found = self.peek(verb, what, peer)
        self._position += 1
        return found
