"""The folder of a side task's temporary files."""

import tempfile
from pathlib import Path

import pytest

from squeezer.daemon.side_processes.temporary_folder import make_folder, remove_folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def folders(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "tmp").iterdir())


def test_it_goes_with_all_that_it_holds(tmp_path: Path) -> None:
    record = tmp_path / "record"
    made = make_folder(record)
    assert made is not None and Path(made).stat().st_mode & 0o077 == 0
    (Path(made) / "pymp-1").mkdir()
    remove_folder(record)
    assert folders(tmp_path) == [] and not record.exists()
    remove_folder(record)


def test_it_goes_though_the_whole_run_was_removed_meanwhile(tmp_path: Path) -> None:
    record = tmp_path / "record"
    made = make_folder(record)
    record.unlink()
    remove_folder(record, made)
    assert folders(tmp_path) == []


def test_there_is_none_where_its_path_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "tmp" / "\udcff"
    odd.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    assert make_folder(tmp_path / "record") is None
    assert list(odd.iterdir()) == []


def test_the_next_one_removes_what_a_killed_daemon_has_left(tmp_path: Path) -> None:
    record = tmp_path / "record"
    make_folder(record)
    made = make_folder(record)
    assert folders(tmp_path) == [Path(str(made))]


@pytest.mark.parametrize("named", ["", "tmp/mine", "tmp/squeezer-side-link", "no/such"])
def test_nothing_else_is_removed(tmp_path: Path, named: str) -> None:
    mine = tmp_path / "tmp" / "mine"
    mine.mkdir()
    (tmp_path / "tmp" / "squeezer-side-link").symlink_to(mine)
    record = tmp_path / "record"
    record.write_text(str(tmp_path / named) if named else "")
    remove_folder(record)
    assert mine.is_dir()


def test_without_a_place_for_its_name_there_is_none(tmp_path: Path) -> None:
    assert make_folder(tmp_path / "no" / "record") is None
    assert folders(tmp_path) == []
