"""Starts the second program on the device, and talks to it, with a limit on every wait."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from squeezer.calibration.measured_device import LIMIT_S, LateError, MeasuredDevice, Word, until

ROOT = Path(__file__).parents[2]
PROGRAM = "squeezer.calibration.side_process"
_START_LIMIT_S = 15.0
_END_LIMIT_S = 4.0


class Peer:
    """The second program.

    Args:
        device: this process's view of the device, whose words it shares.
        path: the words' file.
        environment: what to set for it besides this process's own.
        module: the program.

    Raises:
        LateError: it does not start.
    """

    def __init__(self, device: MeasuredDevice, path: Path, environment: Mapping[str, str], module: str) -> None:
        self._device = device
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(path)],
            env={**os.environ, "PYTHONPATH": paths, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._read = b""
        self.answer(_START_LIMIT_S)

    def tell(self, do: str, **options: Any) -> None:
        """Give a command; `answer` brings what came of it."""
        assert self.process.stdin is not None
        self._device.words[Word.STOP] = 0
        self.process.stdin.write(json.dumps({"do": do, **options}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Wait for the answer to the last command.

        Raises:
            LateError: it does not come, or the program has ended.
        """
        assert self.process.stdout is not None
        fd, end_s = self.process.stdout.fileno(), time.monotonic() + limit_s
        while b"\n" not in self._read:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
                raise LateError(f"the second process did not answer within {limit_s:g} s")
            part = os.read(fd, 1 << 20)
            if not part:
                raise LateError(f"the second process has ended: {self.process.wait()}")
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LateError(f"the second process: {answer['error']}")
        return answer

    def stop(self) -> dict[str, Any]:
        """End what it does until it is told to end, and return its answer."""
        self._device.words[Word.RUN] = 0
        self._device.words[Word.STOP] = 1
        return self.answer()

    def close(self) -> None:
        """Open all gates, and end it."""
        self._device.open_all()
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def peer(device: MeasuredDevice, path: Path, environment: Mapping[str, str], module: str = PROGRAM) -> Iterator[Peer]:
    """The second program, from fresh words on, until the block ends."""
    device.clear()
    other = Peer(device, path, environment, module)
    try:
        yield other
    finally:
        other.close()


def started(device: MeasuredDevice) -> None:
    """Wait until the second program computes."""
    until(lambda: device.words[Word.QUEUED] > 0)
