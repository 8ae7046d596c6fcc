"""A second mapping of shared pages, which outlives the first: what the fake device has of the host's memory."""

import ctypes

from ds_hooks.shared.cuda_driver import DriverError

_MREMAP_MAYMOVE = 1


def map_again(address: int, size: int) -> int:
    """Map these `size` bytes of whole shared pages once more. Returns their other address.

    Raises:
        DriverError: the pages are not shared.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    # mremap(2): an old size of 0 makes a second mapping of shared pages
    found = libc.mremap(
        ctypes.c_void_p(address), ctypes.c_size_t(0), ctypes.c_size_t(size), ctypes.c_int(_MREMAP_MAYMOVE)
    )
    if found is None or ctypes.c_ssize_t(found).value == -1:
        raise DriverError(f"register: not shared pages (errno {ctypes.get_errno()})")
    return int(found)


def unmap(address: int, size: int) -> None:
    """End a mapping of `map_again`'s."""
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
