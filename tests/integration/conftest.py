"""What the tests of real processes share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.place import Place, new_place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A place of its own for a device."""
    with new_place(tmp_path) as made:
        yield made


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """While this file is there, no trial of `studies/tiny.py` gets past its second epoch."""
    path = tmp_path / "hold"
    path.touch()
    return path
