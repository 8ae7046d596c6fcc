"""A device with streams, made up, for the tests of the gate on one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import Page, page_path
from tests.support.cuda_world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A device, its page, and a main job that has not begun."""
    made = World(Page.open(page_path(tmp_path / "pages", 0)))
    yield made
    made.leave()
