"""How much of a device's memory a side task may hold, so that the main job always finds what it asks for."""

from ds_hooks.shared.page import Field

PEAK_SHARE = 0.05
"""The main job may grow by this share of its peak before the side task has moved out of its way."""


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
    return max(1, free + side - max(reserve, int(PEAK_SHARE * main_peak)))
