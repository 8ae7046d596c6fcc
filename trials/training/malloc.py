"""How the process of a side task keeps its memory."""

import ctypes
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_LARGEST = 1 << 30
_LARGEST_ONCE = 32 << 20
"""What earlier releases of the library allow at most."""


@cache
def keep_freed_memory() -> None:
    """Have the C library keep what is freed for the next step, which wants the same again.

    A step of many trials allocates tensors of some hundred KiB. By default these come fresh from the kernel each time,
    and the page faults take longer than the arithmetic. The peak stays what it is; only after it less is given back.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc; others do without
    if mallopt is not None:
        if not mallopt(_M_MMAP_THRESHOLD, _LARGEST):
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_ONCE)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
