"""Keeps freed memory in the side task's process, or gives it back."""

import ctypes
import gc
import resource
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_LARGEST = 1 << 30
_LARGEST_ONCE = 32 << 20
"""Earlier releases of the library allow at most this."""


@cache
def keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next step, which needs the same again.

    A step of many trials allocates tensors of some hundred KiB. By default these come fresh from the kernel each time,
    and the page faults take longer than the arithmetic. The peak stays the same; only less is given back after it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it; other libraries do without
    # where the heap is limited, a large block that is kept but fits no other request would use the limit up
    is_limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    if mallopt is not None:
        if is_limited or not mallopt(_M_MMAP_THRESHOLD, _LARGEST):
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_ONCE)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


def give_back_freed_memory() -> None:
    """Give the kernel back what is free: what follows may need far less. A trial group refers to itself."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
