"""The storages that a configuration can name."""

import fcntl
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage, RDBStorage
from optuna.study import StudyDirection

from tests.support.fused_and_solo import AtOnce
from tests.support.simulated import Pretended
from trials.search.storage import optuna_storage
from trials.search.storage.database import SQLITE_PATIENCE_S, StorageError, connect, engine_options, is_shared
from trials.search.storage.optuna_storage import open_storage
from trials.search.worker import SearchWorker, WorkerConfig


def test_a_url_is_a_database_and_a_path_a_journal(tmp_path: Path) -> None:
    database = open_storage(f"sqlite:///{tmp_path}/study.db")
    assert isinstance(database, RDBStorage)
    assert database.engine_kwargs["connect_args"]["timeout"] == SQLITE_PATIENCE_S
    database.engine.dispose()
    assert isinstance(open_storage(f"{tmp_path}/study.journal"), JournalStorage)


@pytest.mark.parametrize("name", ["my study", "my%20study", "what?", "a#b"])
def test_files_lie_where_the_study_is_called_so(name: str, tmp_path: Path) -> None:
    directory = tmp_path / name
    engine = connect("", directory)
    with engine.begin():
        assert (directory / "claims.db").exists()
    engine.dispose()
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "torn", [lambda line: line[: len(line) // 2], lambda line: b"\0" * len(line), lambda line: b"{}"]
)
def test_a_line_that_was_damaged_is_named(torn: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    study = optuna.create_study(storage=open_storage(str(path)))
    for _ in range(3):
        study.ask()
    lines = path.read_bytes().split(b"\n")
    lines[2] = torn(lines[2])
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(StorageError, match=rf"study\.journal is damaged in line 3 of {len(lines) - 1}; allowed: an ea"):
        open_storage(str(path))
    assert path.read_bytes() == b"\n".join(lines), "nothing of it is lost"


def test_another_optunas_database_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, **_: object) -> None:
        raise RuntimeError("upgrade it")

    monkeypatch.setattr(optuna_storage, "RDBStorage", refuse)
    with pytest.raises(StorageError, match=r"me:\*\*\*@host/db is another version of Optuna's: upgrade it"):
        open_storage("postgresql://me:s3cret@host/db")


CUT_OFF = ["q?x/study.db", "study?", "a?b=c&d", "q?a=b/study.db", "q?timeout=5/study.db", "q?a=b"]


@pytest.mark.parametrize("path", CUT_OFF)
def test_a_path_that_would_be_cut_off_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"has a \?; allowed: %3F in its place"):
        open_storage(f"sqlite:///{tmp_path}/{path}")
    assert not list(tmp_path.iterdir())
    database = open_storage(f"sqlite:///{tmp_path}/q%3Fx.db?timeout=7")
    assert isinstance(database, RDBStorage)
    database.engine.dispose()
    assert [file.name for file in tmp_path.iterdir()] == ["q?x.db"]


def test_a_driver_changes_nothing_about_where_a_database_is(tmp_path: Path) -> None:
    named = f"sqlite+pysqlite:///{tmp_path}/study.db"
    assert not is_shared(named) and engine_options(named) == engine_options("sqlite:///study.db")
    engine = connect(named, tmp_path / "study")
    with engine.begin():
        assert (tmp_path / "study" / "claims.db").exists()
    engine.dispose()


@pytest.mark.parametrize("kind", ["{}", "sqlite:///{}"])
def test_what_is_no_ordinary_file_is_refused(kind: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listens:
        listens.bind(f"{tmp_path}/socket")
        for path in (tmp_path, f"{tmp_path}/socket", "/dev/null", "/dev/zero"):
            with pytest.raises(StorageError, match="is no ordinary file; allowed: one, or a path without any"):
                open_storage(kind.format(path))


@pytest.mark.parametrize(
    "storage", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:///file::memory:?uri=true"]
)
def test_a_study_in_memory_is_refused_where_others_would_not_see_it(storage: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is in the memory of one process"):
        connect(storage, tmp_path)
    connect(storage, None).dispose()


def test_who_is_killed_in_the_middle_of_a_write_holds_nobody_up(tmp_path: Path) -> None:
    path = str(tmp_path / "study.journal")
    storage = open_storage(path)
    assert isinstance(storage, JournalStorage)
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        storage._backend._lock.acquire()
        os.write(write_fd, b"!")
        signal.pause()
    os.read(read_fd, 1)
    with open(path) as journal:
        with pytest.raises(BlockingIOError):
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    study_id = storage.create_new_study([StudyDirection.MAXIMIZE], "after it")
    assert open_storage(path).get_study_name_from_id(study_id) == "after it"
    for fd in (read_fd, write_fd):
        os.close(fd)


def test_a_process_that_is_forked_in_the_middle_of_a_write_holds_nobody_up(tmp_path: Path) -> None:
    """As by a callback, while another thread writes. It has the same file open."""
    path = str(tmp_path / "study.journal")
    storage = open_storage(path)
    assert isinstance(storage, JournalStorage)
    storage._backend._lock.acquire()
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        storage._backend._lock.release()
        with open(path) as journal:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_half_a_line_that_a_crash_has_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    for number, torn in enumerate(["", '{"op_co', '{"op_code": 8, "history": [' + "0.5, " * 500_000]):
        path.open("a").write(torn)
        open_storage(str(path)).create_new_study([StudyDirection.MAXIMIZE], f"after {number}")
    assert [study.study_name for study in open_storage(str(path)).get_all_studies()] == [f"after {n}" for n in range(3)]
    for torn in ('{"op_', '{"op_code":0,"study', "\0\0\0"):
        path.write_text(torn)
        assert open_storage(str(path)).create_new_study([StudyDirection.MAXIMIZE], "after it") == 0


@pytest.mark.parametrize("text", ["a line", "a line\n", '{"lr": 0.1}', '{"lr": 0.1}\n', "\n", "\n\n"])
def test_what_is_no_journal_is_refused_and_stays_as_it_is(text: str, tmp_path: Path) -> None:
    """Of a single line Optuna thinks that it has been cut off."""
    path = tmp_path / "params.json"
    path.write_text(text)
    with pytest.raises(StorageError, match=r"params\.json is not Optuna's journal; allowed: a journal, a path where"):
        open_storage(str(path)).create_new_study([StudyDirection.MAXIMIZE], "mine")
    assert path.read_text() == text


def test_a_database_whose_making_was_cut_off_has_one_study_of_a_name(tmp_path: Path) -> None:
    """As where the disk was full between the table of studies and the index of their names."""
    url, directory = f"sqlite:///{tmp_path}/study.db", tmp_path / "study"
    storage = open_storage(url)
    assert isinstance(storage, RDBStorage)
    with storage.engine.begin() as c:
        c.exec_driver_sql("DROP INDEX ix_studies_study_name")
    for name in ("one", "another"):
        config = WorkerConfig(storage=url, study_name="s", worker=name, directory=directory)
        SearchWorker(Pretended(2), config, AtOnce()).ask(1)
    assert [study.study_name for study in storage.get_all_studies()] == ["s"]
    assert len(storage.get_all_trials(storage.get_study_id_from_name("s"))) == 2
