"""The protocol between the hooks and a daemon: fixed-size, versioned messages.

Each message is a header and a body, a struct per kind in `KINDS`; little-endian, no pointers, no pickle. All times are
CLOCK_MONOTONIC in ns, which the processes of one machine share. The strings under fields and messages are their
rows in docs/protocol.md.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"BSQZ"
VERSION = 5
INSTRUCTIONS_PER_MESSAGE = 32

HEADER_LAYOUT = "<4sBBHQq"
_HEADER = struct.Struct(HEADER_LAYOUT)


class ProtocolError(Exception):
    """Bytes that are not a message of this protocol version."""


class InstructionKind(IntEnum):
    """DeepSpeed's pipeline instructions, numbered for the wire; OTHER is one that this version does not know."""

    OTHER = 0
    RECV_ACTIVATION = 1
    RECV_GRAD = 2
    SEND_ACTIVATION = 3
    SEND_GRAD = 4
    COMMIT_P2P = 5
    REDUCE_TIED_GRADS = 6
    REDUCE_GRADS = 7
    LOSS = 8
    LOAD_MICRO_BATCH = 9
    FORWARD_PASS = 10
    BACKWARD_PASS = 11
    OPTIMIZER_STEP = 12


class WaitKind(IntEnum):
    """What a stage waits for, by the number of the instruction.

    A bubble of merged waits has the kind of its first receive, or else of its first wait.
    """

    RECV_ACTIVATION = InstructionKind.RECV_ACTIVATION
    RECV_GRAD = InstructionKind.RECV_GRAD
    SEND_ACTIVATION = InstructionKind.SEND_ACTIVATION
    SEND_GRAD = InstructionKind.SEND_GRAD
    COMMIT_P2P = InstructionKind.COMMIT_P2P
    REDUCE_TIED_GRADS = InstructionKind.REDUCE_TIED_GRADS
    REDUCE_GRADS = InstructionKind.REDUCE_GRADS
    LOSS = InstructionKind.LOSS
    OPTIMIZER_STEP = InstructionKind.OPTIMIZER_STEP
    """A collective inside the optimizer's step: the all-reduce of the gradients' norm, if gradients are clipped."""


NOT_IDLE = WaitKind.REDUCE_GRADS
"""The kind of wait in which DeepSpeed copies and sums gradients; shut by default, since its cost is not measured."""


class Header(NamedTuple):
    """What every message begins with."""

    magic: bytes
    """`BSQZ`"""
    version: int
    """the protocol's version"""
    kind: int
    """which message follows"""
    flags: int
    """0; not read"""
    seq: int
    """the sender's running number, from 1; 0 in `Hello`"""
    t_ns: int
    """when it happened"""


class Hello(NamedTuple):
    """A main job has attached its hooks."""

    pid: int
    """the main job's process"""
    rank: int
    """its global rank"""
    world_size: int
    """ranks of the job"""
    stage: int
    """the rank's pipeline stage, from 0"""
    stages: int
    """stages of the pipeline"""
    micro_batches: int
    """micro-batches of a step"""
    master_port: int
    """the port at which the job's ranks have met, so the same for all, or 0: the seed of the draw of alone steps"""


class StepStart(NamedTuple):
    """A step begins."""

    step: int
    """calls of `train_batch` since `attach`, with hooks or without, from 1"""


class StepEnd(NamedTuple):
    """A step has ended."""

    step: int
    """as in `StepStart`"""
    dropped: int
    """messages that the main job has dropped so far"""
    work: int
    """trial-samples that side tasks have trained so far"""


class BubbleStart(NamedTuple):
    """A bubble begins: the stage's device waits from now on."""

    step: int
    """as in `StepStart`"""
    epoch: int
    """bubbles of this page so far, from 1; continues when another job takes the page over"""
    slot: int
    """the bubble's slot"""
    wait: int
    """a `WaitKind`"""
    side_cpu_ns: int
    """CPU time of the side task's process so far; 0 without one, -1 where CPU time means nothing (CUDA)"""
    permit_ns: int
    """the permit's length; 0: the bubble stays shut"""


class BubbleEnd(NamedTuple):
    """A bubble has ended: the wait is over."""

    step: int
    """as in `BubbleStart`"""
    epoch: int
    """as in `BubbleStart`"""
    slot: int
    """as in `BubbleStart`"""
    wait: int
    """as in `BubbleStart`"""
    side_cpu_ns: int
    """as in `BubbleStart`"""
    main_cpu_ns: int
    """CPU time of the main job's process in the bubble, such as for copying what it has received; -1 where CPU time \
means nothing"""
    stopped: int
    """1: the side task was awake and had to be stopped"""


class Instructions(NamedTuple):
    """When up to 32 instructions of a step ran; for traces."""

    step: int
    """as in `StepStart`"""
    base_ns: int
    """start of the step"""
    items: tuple[tuple[int, int, int, int], ...]
    """an `InstructionKind`, the index in its schedule, begin and end in ns after `base_ns`; zeros after the last"""


class Bye(NamedTuple):
    """The hooks leave."""

    rank: int
    """as in `Hello`"""
    fault: int
    """1: a fault switched them off; 0: they were detached"""


Message = Hello | StepStart | StepEnd | BubbleStart | BubbleEnd | Instructions | Bye
KINDS: dict[int, tuple[type[Message], struct.Struct]] = {
    kind: (message, struct.Struct(HEADER_LAYOUT + body))
    for kind, message, body in (
        (1, Hello, "qiiiiii"),
        (2, StepStart, "q"),
        (3, StepEnd, "qQq"),
        (4, BubbleStart, "qqiiqq"),
        (5, BubbleEnd, "qqiiqqi"),
        (6, Instructions, "qqi" + "BxHqq" * INSTRUCTIONS_PER_MESSAGE),
        (7, Bye, "ii"),
    )
}
"""Kind number to message and its layout, header included."""
_LAYOUTS = {message: (kind, layout) for kind, (message, layout) in KINDS.items()}
_EMPTY_ITEM = (0, 0, 0, 0)


class Envelope(NamedTuple):
    """A message with its place in the sender's stream."""

    seq: int
    t_ns: int
    message: Message


def encode(seq: int, t_ns: int, message: Message) -> bytes:
    """Encode one message.

    Args:
        seq: the sender's running number; the receiver takes a gap for lost messages.
        t_ns: when it happened.
        message: `Instructions` have at most `INSTRUCTIONS_PER_MESSAGE` items.
    """
    kind, layout = _LAYOUTS[type(message)]
    if isinstance(message, Instructions):
        padding = INSTRUCTIONS_PER_MESSAGE - len(message.items)
        flat = [value for item in (*message.items, *(_EMPTY_ITEM,) * padding) for value in item]
        return layout.pack(MAGIC, VERSION, kind, 0, seq, t_ns, message.step, message.base_ns, len(message.items), *flat)
    return layout.pack(MAGIC, VERSION, kind, 0, seq, t_ns, *message)


def decode(data: bytes) -> Envelope:
    """Decode one message.

    Raises:
        ProtocolError: wrong magic, version, length or kind, or an unknown wait or instruction; the text names it and
            what this side speaks.
    """
    if len(data) < _HEADER.size:
        raise ProtocolError(f"message of {len(data)} bytes; a header alone has {_HEADER.size}")
    magic, version, kind, _flags, seq, t_ns = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"message begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise ProtocolError(f"message of protocol version {version}; this side speaks version {VERSION}")
    message, layout = KINDS.get(kind, (None, _HEADER))
    if message is None:
        raise ProtocolError(f"message of unknown kind {kind}; known are {sorted(KINDS)}")
    if len(data) != layout.size:
        raise ProtocolError(f"{message.__name__} of {len(data)} bytes; version {VERSION} has {layout.size}")
    fields = layout.unpack(data)[len(Header._fields) :]
    if message is Instructions:
        step, base_ns, count, *flat = fields
        if not 0 <= count <= INSTRUCTIONS_PER_MESSAGE:
            raise ProtocolError(f"Instructions with {count} items; allowed: 0 to {INSTRUCTIONS_PER_MESSAGE}")
        items = tuple(tuple(flat[4 * i : 4 * i + 4]) for i in range(count))
        for item in items:
            _check_known(item[0], InstructionKind)
        return Envelope(seq, t_ns, Instructions(step, base_ns, items))
    if message in (BubbleStart, BubbleEnd):
        _check_known(fields[3], WaitKind)
    return Envelope(seq, t_ns, message(*fields))


_KNOWN: dict[type[IntEnum], frozenset[int]] = {
    kinds: frozenset(map(int, kinds)) for kinds in (WaitKind, InstructionKind)
}


def _check_known(value: int, kinds: type[IntEnum]) -> None:
    if value not in _KNOWN[kinds]:
        raise ProtocolError(f"{value} is no {kinds.__name__}; known are {', '.join(map(str, sorted(_KNOWN[kinds])))}")
