"""How many trials fit into a share of a device's memory."""

FRAGMENTED = 0.1
"""The share of its memory that an allocator cannot use."""


def most_trials(one: int, two: int, limit: int) -> int:
    """Return the largest number of trials whose training fits, by a straight line through two measurements.

    Args:
        one: the peak of bytes in use while one trial trained.
        two: the same for two trials, fused.
        limit: the bytes that may be held.

    Returns:
        K; 0 if not even one trial fits.
    """
    usable = limit * (1 - FRAGMENTED)
    if one > usable:
        return 0
    slope = max(two - one, one // 16, 1)  # two trials cannot share everything, so the line must rise
    return 1 + int((usable - one) // slope)
