"""Paths that another user may have laid, and what file systems refuse."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from ds_hooks.shared.private_file import check_ours, sync, write_text


def test_a_loop_of_links_is_an_error_and_no_endless_search(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links"):
        check_ours(tmp_path / "a" / "file")


def test_a_link_to_nothing_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("missing")
    check_ours(tmp_path / "a")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_only_a_directory_that_cannot_be_synced_is_no_matter(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems refuse it for directories. An error of the disk is never passed over."""

    def refuse(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError):
        sync(tmp_path / "file")
    with pytest.raises(OSError) if code == errno.EIO else nullcontext():
        sync(tmp_path)


def test_a_file_that_is_written_is_for_its_user_alone(tmp_path: Path) -> None:
    write_text(tmp_path / "report", "ours\n")
    assert (tmp_path / "report").stat().st_mode & 0o077 == 0
