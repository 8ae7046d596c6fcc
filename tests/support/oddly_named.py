"""A process whose name is no text; any user may start one."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PROGRAM = """
import ctypes, time
ctypes.CDLL(None).prctl(15, b"\\xff\\xfe)")
print(flush=True)
time.sleep(1000)
"""


@contextmanager
def oddly_named() -> Iterator[int]:
    """Its process id, while it lives."""
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()
