"""Writes to its status pipe what is no status, and trains all the same."""

import os
import random
import sys

from tiny import Tiny

if "--status-fd" in sys.argv:
    pipe = int(sys.argv[sys.argv.index("--status-fd") + 1])
    noise = random.Random(0)
    for line in (
        b"Traceback (most recent call last):",
        noise.randbytes(300).replace(b"\n", b""),
        b'{"event":"sleeping"}',
        b'{"event":"overran","slot":1,"overrun_ns":1e999}',
        b'{"event":"error"}',
        b"[" * 100_000,
        b"x" * 300_000,
    ):
        rest = line + b"\n"
        while rest:  # being stopped cuts a long write short
            rest = rest[os.write(pipe, rest) :]


class Garbled(Tiny):
    """Six small trials."""
