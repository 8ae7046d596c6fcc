"""Hooks that come and go while a side task starts, which no gate holds yet: a real process, real signals."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hooks.connection import connect
from ds_hooks.shared.page.file import Page, make_private_dir, page_path
from squeezer.daemon.side_task_supervisor import announce
from tests.support.sandbox import stat, wait_for


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_private_dir(tmp_path / "run")


@pytest.fixture
def starting(directory: Path) -> Iterator[int]:
    """A process that the page names as a side task."""
    page = Page.open(page_path(directory, 0))
    with subprocess.Popen(["sleep", "60"], process_group=0) as made:
        announce(page.words, made.pid)
        yield made.pid
        made.kill()
    page.close()


def becomes(pid: int, state: str) -> None:
    wait_for(lambda: stat(pid)[0] == state, f"state {state}", patience_s=30)


@pytest.mark.parametrize("fault", [0, 1])
def test_it_runs_in_bubbles_alone_and_not_after_the_hooks(directory: Path, starting: int, fault: int) -> None:
    connection = connect(directory, 0, "cpu", 0)
    becomes(starting, "T")
    connection.side.wake()  # in a bubble, in which they leave
    becomes(starting, "S")
    connection.leave(fault)
    becomes(starting, "T")
