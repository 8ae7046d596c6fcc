"""What the tests of the gates share: a page, and a main job and a daemon that act on it as told."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import Page, page_path
from tests.support import cpu_world, cuda_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[cuda_world.World]:
    """A device with streams, made up, its page, and a main job that has not begun."""
    made = cuda_world.World(Page.open(page_path(tmp_path / "pages", 0)))
    yield made
    made.leave()


@pytest.fixture(name="cpu_world")
def a_cpu_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[cpu_world.World]:
    """The page of a core, and a clock that is given."""
    page = Page.open(page_path(tmp_path / "pages", 0))
    made = cpu_world.World(page, monkeypatch)
    yield made
    page.close()
    assert not made.while_asleep, "it slept less often than the test lets something happen"
