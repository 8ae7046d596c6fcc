"""How much of a device's memory a side task may hold, so that the main job always finds what it asks for."""

from ds_hooks.shared.cuda_driver import CONTEXT_BYTES
from ds_hooks.shared.page.layout import Field

PEAK_SHARE = 0.05
"""The main job may grow by this share of its peak before the side task has moved out of its way."""
END_BELOW = 0.25
"""Of the reserve. Below the reserve a side task moves its state to the host's memory by itself, for which it needs
bubbles. It is ended only where that has not helped, but before the main job finds nothing: at the default reserve
256 MiB are left, as much as a dozen of the 20 MiB blocks that PyTorch's allocator asks for."""
LOOKS_IN_A_ROW = 3
"""One look may fall between an allocation and the move that answers it."""


class MemoryLimit:
    """Keeps the page's limit for the side task up to date.

    Args:
        words: the page's.
        reserve_bytes: how much is to stay free at least.
    """

    def __init__(self, words: "memoryview[int]", reserve_bytes: int) -> None:
        self._words = words
        self._reserve_bytes = reserve_bytes
        self._free_bytes = -1

    def update(self) -> None:
        """Set the limit, if the main job has measured the free memory again."""
        words = self._words
        free, side, main_peak = (words[field] for field in (Field.FREE_BYTES, Field.SIDE_BYTES, Field.MAIN_PEAK_BYTES))
        if free == self._free_bytes:
            return  # what the side task has taken since then is not free any more
        self._free_bytes = free
        words[Field.SIDE_LIMIT_BYTES] = side_limit_bytes(free, side, main_peak, self._reserve_bytes)

    def measured(self, free: int) -> None:
        """Set the limit by what this process has measured; until the first step the main job has not."""
        words = self._words
        side, main_peak = words[Field.SIDE_BYTES], words[Field.MAIN_PEAK_BYTES]
        words[Field.SIDE_LIMIT_BYTES] = side_limit_bytes(free, side, main_peak, self._reserve_bytes)


class LowMemory:
    """Says when so little memory is free for the main job that the side task must end, and when it may come back.

    It may when as much is free as it held, and the reserve besides: by the rule by which it takes back what it has
    moved to the host's memory.

    Args:
        words: the page's.
        reserve_bytes: how much is to stay free at least.

    Attributes:
        reason: why it must end; empty: it may run.
    """

    def __init__(self, words: "memoryview[int]", reserve_bytes: int) -> None:
        self._words, self._reserve_bytes = words, reserve_bytes
        self.reason = ""
        self._in_a_row = 0
        self._needs = 0

    def look(self, free: int) -> None:
        """So many bytes are free now."""
        reserve = reserve_of(self._words[Field.MAIN_PEAK_BYTES], self._reserve_bytes)
        end_below = int(END_BELOW * reserve)
        counts = free >= reserve + self._needs if self.reason else free < end_below
        self._in_a_row = self._in_a_row + 1 if counts else 0
        if self._in_a_row < LOOKS_IN_A_ROW:
            return
        self._in_a_row = 0
        if self.reason:
            self.reason = ""
            return
        self._needs = self._words[Field.SIDE_BYTES] + CONTEXT_BYTES
        self.reason = (
            f"{_mib(free)} MiB of the device are free for the main job, less than {_mib(end_below)} "
            f"({LOOKS_IN_A_ROW} looks in a row); {_mib(reserve + self._needs)} must be free before a side task starts"
        )


def _mib(count: int) -> int:
    return count >> 20


def reserve_of(main_peak: int, reserve: int) -> int:
    """Bytes that are to stay free for a main job that has reserved `main_peak` at most, `reserve` at least."""
    return max(reserve, int(PEAK_SHARE * main_peak))


def side_limit_bytes(free: int, side: int, main_peak: int, reserve: int) -> int:
    """The most that the side task may hold of the device's memory, without its context.

    Args:
        free: bytes free on the device.
        side: bytes that the side task holds; they could be free, too.
        main_peak: the most bytes that the main job has reserved so far.
        reserve: bytes that are to stay free at least.

    Returns:
        Bytes, at least 1; 0 if the free memory is not known.
    """
    if not free and not main_peak:
        return 0
    return max(1, free + side - reserve_of(main_peak, reserve))
