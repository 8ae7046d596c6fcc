"""How many trials fit into a share of a device's memory, and how to tell that some did not."""

import errno

import torch

FRAGMENTED = 0.1
"""The share of its memory that an allocator cannot use."""


_HOST_SIGNS = ("can't allocate memory", "not enough memory", "std::bad_alloc")
"""In the text of PyTorch's errors; for the host's memory it has no class of its own."""


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


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error` comes from an allocation that failed, on the device or on a host with `side.memory_mb`."""
    if error is None:
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    of_torch = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _HOST_SIGNS)
    return of_system or of_torch or is_out_of_memory(error.__cause__ or error.__context__)
