"""Control groups for tests: real ones of this machine, or a loud word about what is not shown."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from squeezer.daemon.side_processes.control_group import make_side_group
from squeezer.daemon.side_processes.parent_group import NoGroupError, limiting_groups, parent_of_groups
from tests.support.paths import ROOT

MAKE = """
import sys
from squeezer.daemon.side_processes.control_group import make_side_group
from squeezer.daemon.side_processes.parent_group import NoGroupError
try:
    group = make_side_group()
except NoGroupError as error:
    print(error)
else:
    print("made in", group.path.parent)
    group.close()
"""
"""Prints where a side task's group is made, or why none is."""


def a_parent_group() -> Path:
    """Where groups can be made; else the test is skipped."""
    try:
        make_side_group().close()
        return parent_of_groups()
    except NoGroupError as error:
        pytest.skip(f"no control groups here, so what they give is NOT shown: {error}")


def shell(script: str, *unshare: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in which $PYTHON makes groups; skip the test by name where the machine does not allow it."""
    if unshare:
        allowed = subprocess.run([*unshare, "true"], capture_output=True, text=True)
        if allowed.returncode:
            pytest.skip(f"{' '.join(unshare)} is not allowed here, so it is NOT shown: {allowed.stderr.strip()}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "MAKE": MAKE}
    return subprocess.run(
        [*unshare, "bash", "-ec", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )


@contextmanager
def a_subtree(place: Path) -> Iterator[Path]:
    """A group for a test's own tree, removed at its end."""
    top = place / f"squeezer-test-{os.getpid()}"
    top.mkdir()
    try:
        yield top
    finally:
        (top / "cgroup.kill").write_text("1")
        for _ in range(100):
            for directory, _, _ in os.walk(top, topdown=False):
                with suppress(OSError):
                    os.rmdir(directory)
            if not top.exists():
                break
            subprocess.run(["sleep", "0.05"])
        assert not top.exists()


@contextmanager
def a_pids_group() -> Iterator[Path]:
    """An empty group that can limit processes; else the test is skipped. Whoever makes groups in it removes them."""
    for parent in limiting_groups("pids"):
        group = parent / f"squeezer-test-pids-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            if (group / "pids.max").exists():
                break
            group.rmdir()
    else:
        pytest.skip("no control group with a limit on processes can be made here, so what one does is NOT shown")
    try:
        yield group
    finally:
        group.rmdir()
