"""The data loader of `unruly_digits`: for each byte read it waits, copies data for a while, and sends a byte back."""

import os
import sys
import time

LOAD_BYTES = 8 << 20
"""Together with its copy, more than the caches hold."""
PARTS, WAIT_S, COPY_NS = 16, 0.008, 4_000_000
"""A third of a core for a fifth of a second."""


def main() -> None:
    """Serve until the side task has ended."""
    source, target = bytearray(LOAD_BYTES), bytearray(LOAD_BYTES)
    while os.read(sys.stdin.fileno(), 1):
        for _ in range(PARTS):
            time.sleep(WAIT_S)
            until_ns = time.thread_time_ns() + COPY_NS
            while time.thread_time_ns() < until_ns:
                target[:] = source
                source, target = target, source
        os.write(sys.stdout.fileno(), b".")


if __name__ == "__main__":
    main()
