"""One process's view of the device: its context, a stream, kernels, and words that both processes share."""

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Self
from uuid import UUID

from ds_hooks.shared.cuda_driver import CudaDriver, address_of
from squeezer.calibration.kernels import Kernels

WORDS_BYTES = 4096
LIMIT_S = 8.0
"""The longest wait for the device, or for the other process."""


class Word(IntEnum):
    """The shared words, 64 bits each; a device uses their low 32."""

    READY = 0
    """What the main process's receives wait for."""
    GATE = 1
    """What the side process's kernels wait for."""
    RUN = 2
    """Whether the side process may compute now."""
    STOP = 3
    """Whether the side process ends what it does."""
    QUEUED = 4
    """How many gated units the side process has queued."""
    PROBE = 5


class LateError(Exception):
    """The device, or the other process, did not come in time."""


def map_words(path: Path) -> "memoryview[int]":
    """Map the words that the two processes share, made if they are not there."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, WORDS_BYTES)
    words = memoryview(mmap.mmap(fd, WORDS_BYTES)).cast("q")
    os.close(fd)
    return words


def until(true: Callable[[], bool], limit_s: float = LIMIT_S, nap_s: float = 0.0) -> None:
    """Look until it is true.

    Raises:
        LateError: it took longer than `limit_s`.
    """
    end_s = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end_s:
            raise LateError(f"the device or the other process did not come within {limit_s:g} s")
        if nap_s:
            time.sleep(nap_s)


class MeasuredDevice:
    """The first device, in this process.

    Args:
        path: the file of the shared words.
        driver: the device.
        kernels: for it.

    Raises:
        DriverError: it cannot be used.
    """

    def __init__(self, path: Path, driver: CudaDriver, kernels: Kernels) -> None:
        self.words, self.driver, self.kernels = map_words(path), driver, kernels
        self._device_words = self.driver.register(address_of(self.words), WORDS_BYTES)
        self.stream = self.driver.create_stream()
        self._free = [self.driver.create_event() for _ in range(64)]

    def address(self, word: Word) -> int:
        """The device's address of a shared word."""
        return self._device_words + 8 * word

    def wait_for(self, word: Word, value: int, stream: int | None = None) -> None:
        """Queue a wait for a shared word: the device's own, without a kernel."""
        self.driver.wait_at_least(self.stream if stream is None else stream, self.address(word), value)

    def mark(self, stream: int | None = None) -> int:
        """Queue an event. `passed` gives it back."""
        event = self._free.pop() if self._free else self.driver.create_event()
        self.driver.record(event, self.stream if stream is None else stream)
        return event

    def passed(self, event: int, *, keep: bool = False) -> bool:
        """Whether the device has come to a mark."""
        done = self.driver.is_done(event)
        if done and not keep:
            self._free.append(event)
        return done

    def finish(self, stream: int | None = None, limit_s: float = LIMIT_S) -> None:
        """Look until all that is queued has ended.

        Raises:
            LateError: it does not end.
        """
        event = self.mark(stream)
        until(lambda: self.passed(event), limit_s)

    def open_all(self) -> None:
        """Let everything through that waits for a word, in both processes."""
        self.words[Word.STOP] = 1
        for word in (Word.READY, Word.GATE):
            self.words[word] = 2**31 - 1

    def clear(self) -> None:
        """Begin anew."""
        for word in Word:
            self.words[word] = 0

    def close(self) -> None:
        """Give the memory back; nothing may be queued."""
        self.kernels.close()
        self.driver.unregister(address_of(self.words))

    def offset_ns(self, tries: int = 100) -> tuple[int, int]:
        """The device's timer minus the host's monotonic clock, and how far this can be wrong, in ns.

        A kernel spins on a word; the host writes it and waits for the kernel's stamp. The quickest exchange counts.
        """
        best = (2**62, 0)
        self.words[Word.PROBE] = 0
        for number in range(1, tries + 1):
            stamp = self.kernels.receive(self.stream, self.address(Word.PROBE), number)
            time.sleep(2e-4)  # it spins by now
            before_ns = time.monotonic_ns()
            self.words[Word.PROBE] = number
            until(lambda stamp=stamp: self.kernels.times(stamp)[1] != 0)  # type: ignore[misc]
            after_ns = time.monotonic_ns()
            seen_ns = self.kernels.times(stamp)[0]
            best = min(best, (after_ns - before_ns, seen_ns - (before_ns + after_ns) // 2))
            self.finish()
        return best[1], best[0] // 2

    @classmethod
    def open(cls, path: Path) -> Self:
        """The first device of this process."""
        driver = CudaDriver(0)
        return cls(path, driver, Kernels(driver))

    def uuid(self) -> str:
        """The device's name, as `nvidia-smi -L` has it."""
        device, number = ctypes.c_int(), ctypes.create_string_buffer(16)
        self.driver.call("cuCtxGetDevice", ctypes.byref(device))
        self.driver.call("cuDeviceGetUuid", number, device)
        return f"GPU-{UUID(bytes=number.raw)}"
