"""The identity of a study's directory."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from trials.search.storage.directory_identity import identity, is_same


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_there_are_no_hard_links_it_has_one_too(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", refuse)
    first = identity(tmp_path / "study")
    assert is_same(first, identity(tmp_path / "study")) and not is_same(first, identity(tmp_path / "other"))
    assert [path.name for path in (tmp_path / "study").iterdir()] == ["directory.id"]


def test_the_first_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host makes one meanwhile."""
    link = os.link

    def late(source: Path, target: Path) -> None:
        target.write_text("theirs")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert identity(tmp_path).startswith("theirs ")
    assert [path.name for path in tmp_path.iterdir()] == ["directory.id"]
