"""Recordings of a pipeline's stages whose times are known."""

from collections.abc import Callable, Sequence

from benchmarks.ghost.program import Op
from benchmarks.ghost.recording import RecordedStep, Recording


def messages_of(program: Sequence[Op]) -> list[Op]:
    """All but the computations."""
    return [op for op in program if op.verb != "compute"]


def recorded(
    programs: Sequence[Sequence[Op]], length_ns: Callable[[int, int, Op], int], *, steps: int, transfer_ns: int
) -> list[Recording]:
    """Recordings in which each computation takes `length_ns(stage, step, op)`, and each transfer `transfer_ns`."""
    return [
        Recording.of([_step(program, stage, step, length_ns, transfer_ns) for step in range(steps)])
        for stage, program in enumerate(programs)
    ]


def _step(
    program: Sequence[Op], stage: int, step: int, length_ns: Callable[[int, int, Op], int], transfer_ns: int
) -> RecordedStep:
    segments_ns = [0]
    for op in program:
        if op.verb == "compute":
            segments_ns[-1] += length_ns(stage, step, op)
        else:
            segments_ns.append(0)
    return RecordedStep(segments_ns[:-1], [transfer_ns] * (len(segments_ns) - 1))
