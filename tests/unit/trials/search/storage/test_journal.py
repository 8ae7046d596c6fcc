"""Optuna's journal as workers write it: what counts is on the disk, in one wait for each step of a trial."""

import errno
import fcntl
import os
import signal
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa
from optuna.storages import JournalStorage

from tests.support.fused_and_solo import AtOnce
from tests.support.simulated import EPOCHS, Pretended
from trials.search.close import release_trials
from trials.search.storage import database
from trials.search.storage.database import StorageError
from trials.search.storage.journal import Journal, together
from trials.search.storage.optuna_storage import open_storage
from trials.search.worker import SearchWorker, WorkerConfig

LINE = {"op_code": 0, "worker_id": "me"}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The journal's length at each wait for the disk."""
    found: list[int] = []
    sync = os.fsync

    def fsync(fd: int) -> None:
        sync(fd)
        found.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_each_line_is_waited_for_unless_several_are_written_together(tmp_path: Path, waits: list[int]) -> None:
    path = tmp_path / "study.journal"
    journal = Journal(str(path))
    for _ in range(3):
        journal.append_logs([LINE])
    one = waits[0]
    assert waits == [one, 2 * one, 3 * one]
    waits.clear()
    with journal.together():
        journal.append_logs([LINE])
        with journal.together():
            journal.append_logs([LINE, LINE])
        journal.append_logs([LINE])
        assert list(journal.read_logs(0)) == [LINE] * 7, "others see them at once"
    with journal.together():
        pass
    assert waits == [6 * one, 7 * one] and path.stat().st_size == 7 * one


def test_what_was_written_before_an_error_is_waited_for(tmp_path: Path, waits: list[int]) -> None:
    journal = Journal(str(tmp_path / "study.journal"))
    with pytest.raises(ZeroDivisionError), journal.together():
        journal.append_logs([LINE])
        raise ZeroDivisionError
    assert len(waits) == 1


def test_what_the_disk_did_not_take_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a wait that failed, the kernel takes what it could not write for written: the next one would succeed."""
    path = tmp_path / "study.journal"
    journal, sync = Journal(str(path)), os.fsync

    def fail_once(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    journal.append_logs([LINE])
    monkeypatch.setattr(os, "fsync", fail_once)
    with pytest.raises(OSError), journal.together():
        journal.append_logs([LINE] * 2)
    os.utime(path, (0, 0))
    with journal.together():
        pass
    assert path.stat().st_mtime > 0 and list(journal.read_logs(0)) == [LINE] * 3
    os.utime(path, (0, 0))
    with journal.together():
        pass
    assert path.stat().st_mtime == 0, "once"


@pytest.mark.parametrize("lines", [None, 0, 2])
def test_one_that_has_lost_lines_is_not_written_or_read_any_more(lines: int | None, tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    journal = Journal(str(path))
    journal.append_logs([LINE] * 3)
    assert list(journal.read_logs(0)) == [LINE] * 3
    others = b"".join(path.read_bytes().splitlines(keepends=True)[:lines])
    path.unlink()
    if lines is not None:
        path.write_bytes(others)
    with pytest.raises(StorageError, match="has lost lines"):
        journal.append_logs([LINE])
    with pytest.raises(StorageError, match="has lost lines"):
        journal.read_logs(3)
    assert not path.exists() if lines is None else path.read_bytes() == others


def test_another_thread_waits_for_its_own_lines(tmp_path: Path, waits: list[int]) -> None:
    """A callback of the user's, say."""
    journal = Journal(str(tmp_path / "study.journal"))
    with journal.together():
        other = threading.Thread(target=journal.append_logs, args=([LINE],))
        other.start()
        other.join()
        assert len(waits) == 1
    assert len(waits) == 1


def test_a_thread_keeps_the_lock_that_another_has_just_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "study.journal"
    lock, flock, is_taken = Journal(str(path))._file_lock, fcntl.flock, threading.Event()

    def slow(fd: int, how: int) -> None:
        flock(fd, how)
        if how == fcntl.LOCK_UN:
            is_taken.wait(60)

    def take() -> None:
        lock.acquire()
        is_taken.set()

    monkeypatch.setattr(fcntl, "flock", slow)
    lock.acquire()
    other = threading.Thread(target=take)
    other.start()
    lock.release()
    other.join()
    with path.open("rb") as file:
        with pytest.raises(BlockingIOError):
            flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.release()
        flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_other_storages_are_as_they_were() -> None:
    storage = optuna.storages.InMemoryStorage()
    with together(storage):
        assert optuna.create_study(storage=storage).ask().number == 0


@pytest.mark.parametrize("fails_each", [None, 2])
def test_a_claim_is_committed_only_when_the_journal_has_what_belongs_to_it(
    fails_each: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that crashes between the two knows of a trial that nobody has, which the next worker takes."""
    events: list[str] = []
    sync = os.fsync

    def wait(fd: int) -> None:
        events.append("try")
        if fails_each is not None and events.count("try") % fails_each == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(fd)
        events.append("wait")

    def noting(name: str, of: Callable[..., object]) -> Callable[..., object]:
        def noted(*args: object, **named: object) -> object:
            events.append(name)
            return of(*args, **named)

        return noted

    study = Pretended(3)
    config = WorkerConfig(storage=f"{tmp_path}/study.journal", study_name="s", worker="me", directory=tmp_path)
    worker = SearchWorker(study, config, AtOnce())
    monkeypatch.setattr(Journal, "append_logs", noting("write", Journal.append_logs))
    monkeypatch.setattr(os, "fsync", wait)
    monkeypatch.setattr(database, "PAUSES_S", (0.0,))
    sa.event.listen(worker._claims._engine, "commit", lambda c: events.append("commit"))
    first, second, _ = (trial["number"] for trial in worker.ask(3)["trials"])
    worker.report(first, 1, 0.5, False, history={"loss": [1.0]})
    worker.report(first, study.epochs, 0.5, True, history={"loss": [1.0]})
    worker.fail(second, "the user's reason")
    worker.stop()
    assert isinstance(worker._study._storage, JournalStorage)
    unsaved, waits = 0, 0
    for event in events:
        unsaved = {"write": unsaved + 1, "wait": 0}.get(event, unsaved)
        waits += event == "wait"
        assert event != "commit" or not unsaved
    assert unsaved == 0 and events.count("write") > 2 * waits > 0
    trials = optuna.load_study(study_name="s", storage=open_storage(config.storage)).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE", "FAIL", "WAITING"]


def test_an_end_that_a_killed_worker_did_not_wait_for_is_on_the_disk_before_others_rely_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "study.journal"
    pid = os.fork()
    if pid == 0:
        config = WorkerConfig(storage=str(journal), study_name="s", worker="me", directory=tmp_path)
        worker = SearchWorker(Pretended(1), config, AtOnce())
        (trial,) = worker.ask(1)["trials"]
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        worker.report(trial["number"], EPOCHS, 0.5, True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    owners: list[str | None] = []
    sync = os.fsync

    def owner() -> str | None:
        with closing(sqlite3.connect(tmp_path / "claims.db")) as c:
            found: str | None = c.execute("SELECT worker FROM squeezer_claim").fetchone()[0]
            return found

    def fsync(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), journal.stat()):
            owners.append(owner())
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    assert release_trials(str(journal), "s", tmp_path, "me", died=True) == 0, "it has ended"
    assert owners == ["me"] and owner() is None


def test_a_journal_that_was_removed_is_made_anew_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    journal = Journal(str(path))
    path.unlink()
    journal.append_logs([LINE])
    assert path.stat().st_mode & 0o077 == 0
