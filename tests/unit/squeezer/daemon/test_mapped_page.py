"""Whether a process has the page in its memory."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import Page, page_path
from squeezer.daemon.mapped_page import MappedPage

MAPS_THEN_BECOMES_ANOTHER = """
import os, sys
from pathlib import Path
from ds_hooks.shared.page.file import Page
page = Page.open(Path(sys.argv[1]), create=False)
print(flush=True)
os.read(0, 1)
os.execv("/bin/cat", ["cat"])
"""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    made = Page.open(page_path(tmp_path / "pages", 0))
    yield made
    made.close()


def test_a_program_that_a_process_becomes_has_not_what_that_one_had(page: Page) -> None:
    mapped = MappedPage(page.path)
    assert mapped.is_in(os.getpid())
    command = [sys.executable, "-c", MAPS_THEN_BECOMES_ANOTHER, str(page.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        assert mapped.is_in(process.pid)
        process.stdin.write(b"..")
        assert process.stdout.read(1) == b".", "the other program runs"
        assert not mapped.is_in(process.pid)


def test_where_the_kernel_does_not_say_a_process_may_have_it(page: Page, tmp_path: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert not MappedPage(page.path).is_in(process.pid)
        assert MappedPage(tmp_path / "gone").is_in(process.pid)
        assert MappedPage(tmp_path).is_in(process.pid), "a number that is not listed where it must be"
    assert MappedPage(page.path).is_in(process.pid), "it has ended, which others see"


MAPS = """
import mmap, os, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print(flush=True)
os.read(0, 1)
"""


@pytest.mark.parametrize("name", ["a\rb", "a\x0bb", "a\x0cb", "a\x1eb", "a\u2028b", "a\nb"])
def test_what_else_it_has_mapped_may_have_any_name(name: str, page: Page, tmp_path: Path) -> None:
    (tmp_path / name).write_text("data")
    command = [sys.executable, "-c", MAPS, str(tmp_path / name)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        assert not MappedPage(page.path).is_in(process.pid)
        assert MappedPage(page.path).is_in(os.getpid())
