"""The daemon's end of the status pipe: statuses in any pieces, garbage between them, and its end."""

import os
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hooks.shared.status_reader import REFUSALS_RECORDED, StatusReader
from ds_hooks.shared.statuses import MAXIMUM_LINE_BYTES, Finished, Overran, Progress, Ready, Status, encode

SENT: list[Status] = [Ready(16, 2.5, 8, 3.0), Overran(3, 40), Progress(5, 2, 1, 2.5, 8.0, 9.0, 0), Finished(5)]


class Pipe:
    """A status pipe, and what its reader finds wrong."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.faults: list[str] = []
        self.reader = StatusReader(self.read_fd, self.faults.append)

    def send(self, data: bytes) -> list[Status]:
        """Write all of it, reading meanwhile."""
        found: list[Status] = []
        for at in range(0, len(data), 32768):
            os.write(self.write_fd, data[at : at + 32768])
            found += self.reader.read()
        return found + self.reader.read()

    def close(self) -> None:
        for fd in (self.read_fd, self.write_fd):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 200)))
def test_statuses_arrive_in_any_pieces(cuts: list[int]) -> None:
    pipe = Pipe()
    data = b"".join(map(encode, SENT))
    found: list[Status] = []
    bounds = [0, *sorted(cuts), len(data)]
    for begin, end in pairwise(bounds):
        found += pipe.send(data[begin:end]) if begin < end else []
    pipe.close()
    assert (found, pipe.faults, pipe.reader.is_over) == (SENT, [], False)


@settings(deadline=None)
@given(garbage=st.lists(st.binary(max_size=60).filter(lambda line: b"\n" not in line), min_size=4, max_size=4))
def test_garbage_between_statuses_is_a_fault_and_the_statuses_are_read(garbage: list[bytes]) -> None:
    pipe = Pipe()
    found = pipe.send(b"".join(line + b"\n" + encode(status) for line, status in zip(garbage, SENT, strict=True)))
    pipe.close()
    assert found == SENT
    assert pipe.reader.refused == len(pipe.faults) == 4
    assert all(fault.startswith("the side task sent no status: ") for fault in pipe.faults)


def test_only_the_first_refusals_are_recorded(pipe: Pipe) -> None:
    assert pipe.send(b"?\n" * 1000 + encode(Ready(16, 2.5, 8, 3.0))) == [Ready(16, 2.5, 8, 3.0)]
    assert (pipe.reader.refused, len(pipe.faults)) == (1000, REFUSALS_RECORDED)


def test_a_line_without_an_end_is_not_kept(pipe: Pipe) -> None:
    assert pipe.send(b"x" * (5 * MAXIMUM_LINE_BYTES)) == []
    assert len(pipe.reader._unfinished) == 0
    assert pipe.send(b"x\n" + encode(Ready(16, 2.5, 8, 3.0))) == [Ready(16, 2.5, 8, 3.0)]
    assert pipe.faults == [f"the side task sent no status: a line of more than {MAXIMUM_LINE_BYTES} bytes"]


def test_the_end_of_the_pipe_is_noticed(pipe: Pipe) -> None:
    os.write(pipe.write_fd, encode(Ready(16, 2.5, 8, 3.0)))
    os.close(pipe.write_fd)
    pipe.write_fd = -1
    assert (pipe.reader.read(), pipe.reader.is_over) == ([Ready(16, 2.5, 8, 3.0)], False)
    assert (pipe.reader.read(), pipe.reader.is_over) == ([], True)
