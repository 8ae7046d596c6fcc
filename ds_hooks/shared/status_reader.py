"""Reads a side task's statuses from its pipe. Nothing that arrives there ends the daemon."""

import os
from collections.abc import Callable

from ds_hooks.shared.statuses import MAXIMUM_LINE_BYTES, Status, StatusError, decode

READ_BYTES = 65536
"""At once, so that a flood does not keep the daemon from its other duties."""
REFUSALS_RECORDED = 10


class StatusReader:
    """The daemon's end of one side task's status pipe.

    Args:
        fd: the pipe's end for reading, non-blocking. Its owner closes it.
        fault: takes a sentence about each of the first ten lines that are refused.

    Attributes:
        refused: how many lines were no statuses.
        is_over: whether the other end is closed; the descriptor stays readable then, and needs no more watching.
    """

    def __init__(self, fd: int, fault: Callable[[str], None]) -> None:
        self._fd = fd
        self._fault = fault
        self._unfinished = b""
        self._is_skipping = False
        self.refused = 0
        self.is_over = False

    def read(self) -> list[Status]:
        """What has arrived since the last call, up to a bound. Never blocks, never raises for what the lines hold."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return []
        self.is_over = not data
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if lines and self._is_skipping:
            del lines[0]
            self._is_skipping = False
        if len(self._unfinished) > MAXIMUM_LINE_BYTES:
            if not self._is_skipping:
                self._refuse(f"a line of more than {MAXIMUM_LINE_BYTES} bytes")
            self._is_skipping = True
        if self._is_skipping:
            self._unfinished = b""
        return [status for line in lines if (status := self._decode(line)) is not None]

    def _decode(self, line: bytes) -> Status | None:
        try:
            return decode(line)
        except StatusError as error:
            self._refuse(str(error))
            return None

    def _refuse(self, why: str) -> None:
        self.refused += 1
        if self.refused <= REFUSALS_RECORDED:
            self._fault(f"the side task sent no status: {why}")
