"""Paths that another user may have laid."""

from pathlib import Path

import pytest

from ds_hooks.shared.private_file import check_ours


def test_a_loop_of_links_is_an_error_and_no_endless_search(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links"):
        check_ours(tmp_path / "a" / "file")


def test_a_link_to_nothing_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("missing")
    check_ours(tmp_path / "a")
