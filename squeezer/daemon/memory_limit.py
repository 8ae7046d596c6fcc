"""How much of a device's memory a side task may hold, so that the main job always finds what it asks for."""

PEAK_SHARE = 0.05
"""The main job may grow by this much of its peak so far before the side task has moved out of its way."""


def side_limit_bytes(free: int, side: int, main_peak: int, reserve: int) -> int:
    """The most that the side task may hold of the device's memory, without its context.

    Args:
        free: what is free on the device.
        side: what the side task holds; it could be free, too.
        main_peak: the most that the main job has reserved so far.
        reserve: what is to stay free at least.

    Returns:
        Bytes, at least 1; 0 if nobody has told what is free.
    """
    if not free and not main_peak:
        return 0
    return max(1, free + side - max(reserve, int(PEAK_SHARE * main_peak)))
