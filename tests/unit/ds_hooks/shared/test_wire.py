"""The protocol: what is encoded comes back, and anything else is refused with a reason."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hooks.shared import wire

MESSAGES: list[wire.Message] = [
    wire.Hello(pid=4711, rank=3, world_size=8, stage=1, stages=4, micro_batches=16, master_port=29500),
    wire.StepStart(7),
    wire.StepEnd(7, dropped=2, work=5),
    wire.BubbleStart(step=7, epoch=99, slot=12, wait=wire.WaitKind.RECV_GRAD, side_cpu_ns=10**12, permit_ns=5),
    wire.BubbleEnd(
        step=7, epoch=99, slot=12, wait=wire.WaitKind.RECV_GRAD, side_cpu_ns=10**12, main_cpu_ns=10**6, stopped=1
    ),
    wire.Instructions(7, 1000, ((wire.InstructionKind.FORWARD_PASS, 0, 5, 10**10), (8, 40, 10**10, 2 * 10**10))),
    wire.Bye(rank=3, fault=1),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was_sent(message: wire.Message) -> None:
    envelope = wire.decode(wire.encode(5, 123, message))
    assert envelope == wire.Envelope(5, 123, message)
    assert type(envelope.message) is type(message)  # tuples of different types may be equal


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_kind_has_one_size(message: wire.Message) -> None:
    assert len({len(wire.encode(seq, t_ns, message)) for seq, t_ns in ((0, 0), (2**63, 2**62))}) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:10], "10 bytes"),
        (lambda data: b"HTTP" + data[4:], "begins with b'HTTP'"),
        (lambda data: data[:4] + b"\x09" + data[5:], "version 9; this side speaks version 5"),
        (lambda data: data[:5] + b"\xee" + data[6:], "unknown kind 238"),
        (lambda data: data + b"\0", "BubbleStart of"),
        (lambda data: data[:-1], "BubbleStart of"),
    ],
)
def test_what_is_refused_says_why(change: Callable[[bytes], bytes], says: str) -> None:
    with pytest.raises(wire.ProtocolError, match=says):
        wire.decode(change(wire.encode(5, 123, MESSAGES[3])))


def test_a_count_of_instructions_beyond_the_message_is_refused() -> None:
    data = bytearray(wire.encode(5, 123, wire.Instructions(7, 1000, ())))
    at = len(data) - 20 * wire.INSTRUCTIONS_PER_MESSAGE - 4
    data[at : at + 4] = (33).to_bytes(4, "little")
    with pytest.raises(wire.ProtocolError, match="33 items; allowed: 0 to 32"):
        wire.decode(bytes(data))


@given(st.binary(max_size=800), st.sampled_from(sorted(wire.KINDS)))
def test_no_bytes_raise_anything_else(data: bytes, kind: int) -> None:
    begin = wire.MAGIC + bytes([wire.VERSION, kind])
    _, layout = wire.KINDS[kind]
    for candidate in (data, begin + data, (begin + data).ljust(layout.size, b"\0")[: layout.size]):
        try:
            wire.decode(candidate)
        except wire.ProtocolError as error:
            assert str(error)
