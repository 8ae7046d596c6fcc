"""How many trials fit into a share of a device's memory."""

FRAGMENTED = 0.1
"""What an allocator cannot use of what it holds."""


def most_trials(one: int, two: int, limit: int) -> int:
    """The largest K whose training fits, by a straight line through two measurements.

    Args:
        one: the most bytes that were in use while one trial was trained.
        two: the same for two trials, fused.
        limit: the bytes that may be held.

    Returns:
        K; 0 if not even one trial fits.
    """
    usable = limit * (1 - FRAGMENTED)
    if one > usable:
        return 0
    slope = max(two - one, one // 16, 1)  # what two trials share cannot be all of it: a line must rise
    return 1 + int((usable - one) // slope)
