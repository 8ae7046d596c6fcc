"""A plugin's fixture for a folder's `conftest.py`: the temporary folders of its tests lie in memory.

What they keep need not survive the machine, and a disk takes milliseconds for each file that must. Side by side only:
whoever runs a few tests finds their folders where pytest leaves them.
"""

import os
import shutil
import time
from collections.abc import Iterator
from copy import copy
from pathlib import Path

import pytest

MEMORY, ROOM_BYTES = Path("/dev/shm"), 2 << 30


@pytest.fixture(scope="session")
def tmp_path_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.TempPathFactory]:
    """As pytest's own, but in memory if that has room."""
    if "PYTEST_XDIST_WORKER" not in os.environ or _free_bytes(MEMORY) < ROOM_BYTES:
        yield tmp_path_factory
        return
    made = copy(tmp_path_factory)
    folder = MEMORY / f"tests-{os.getpid()}-{time.time_ns()}"  # random letters might be those that a test looks for
    folder.mkdir(mode=0o700)
    made._basetemp = folder
    try:
        yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _free_bytes(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
