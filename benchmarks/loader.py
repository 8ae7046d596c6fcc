"""Loads ahead for `unruly`: for each byte that comes, a few milliseconds of copying, and a byte back."""

import os
import sys

LOAD_BYTES = 8 << 20
"""More than the caches hold, with its copy."""
LOADS = 3


def main() -> None:
    """Serve until the side task is gone."""
    source, target = bytearray(LOAD_BYTES), bytearray(LOAD_BYTES)
    while os.read(sys.stdin.fileno(), 1):
        for _ in range(LOADS):
            target[:] = source
        os.write(sys.stdout.fileno(), b".")


if __name__ == "__main__":
    main()
