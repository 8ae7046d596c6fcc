"""One host at a time has a study whose claims are in a file."""

import fcntl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trials.search.storage import host_lock
from trials.search.storage.database import StorageError
from trials.search.storage.host_lock import hold


def held(directory: Path, workers: int) -> list[bool]:
    """Whether so many workers of this host, which begin at once, get it."""
    with ThreadPoolExecutor(workers) as pool:
        files = list(pool.map(lambda _: hold("study.journal", directory), range(workers)))
    found = [file is not None for file in files]
    for file in files:
        if file is not None:
            file.close()
    return found


@pytest.mark.parametrize("left", ["", "0-0 an ended host", "0-", "\x00\xff"])
def test_what_one_that_died_has_left_holds_nobody_up(left: str, tmp_path: Path) -> None:
    """Also where it died, or the disk was full, before it had written whose it is, and others come at once."""
    (tmp_path / host_lock.NAME).write_text(left, encoding="latin-1")
    for _ in range(10):
        assert held(tmp_path, 1) == [True]
        (tmp_path / host_lock.NAME).write_text(left, encoding="latin-1")


def test_those_that_wait_for_one_that_dies_before_it_has_written_do_not_wait_for_each_other(tmp_path: Path) -> None:
    (tmp_path / host_lock.NAME).touch()
    with open(tmp_path / host_lock.NAME, "rb") as file, ThreadPoolExecutor(4) as pool:
        fcntl.flock(file, fcntl.LOCK_SH)
        files = [pool.submit(hold, "study.journal", tmp_path) for _ in range(4)]
        time.sleep(0.2)  # until all wait
        fcntl.flock(file, fcntl.LOCK_UN)
        assert all(each.result() is not None for each in files)


def test_another_hosts_workers_keep_it(tmp_path: Path) -> None:
    (tmp_path / host_lock.NAME).write_text("0-0 another")
    with open(tmp_path / host_lock.NAME, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(StorageError, match="workers of another host, another, have the study"):
            hold("study.journal", tmp_path)
    assert (tmp_path / host_lock.NAME).read_text() == "0-0 another"


def test_it_is_for_its_user_alone(tmp_path: Path) -> None:
    """Whoever may open it may lock it, and hold all others up."""
    assert held(tmp_path, 1) == [True]
    assert (tmp_path / host_lock.NAME).stat().st_mode & 0o077 == 0
