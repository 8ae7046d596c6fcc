"""The shared page: one writer per role, private, versioned, and gone with its last holder."""

import fcntl
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import Page, PageError, make_private_dir, page_path, runtime_dir
from ds_hooks.shared.page.layout import PAGE_BYTES, PAGE_MAGIC, PAGE_VERSION, Field, Role
from ds_hooks.shared.processes.identity import start_time


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    made = make_private_dir(tmp_path / "pages")
    yield made
    assert list(made.iterdir()) == [], "something was left behind"


def test_two_holders_see_the_same_words_and_the_last_removes_the_file(directory: Path) -> None:
    path = page_path(directory, 0)
    first, second = Page.open(path), Page.open(path)
    first.words[Field.STEP] = 17
    assert second.words[Field.STEP] == 17
    first.close()
    assert path.exists()
    second.close()
    second.close()
    assert not path.exists()


def test_a_role_has_one_holder_and_the_other_is_told_who(directory: Path) -> None:
    first, second = Page.open(page_path(directory, 0)), Page.open(page_path(directory, 0))
    first.claim(Role.DAEMON)
    with pytest.raises(PageError, match=rf"process {os.getpid()} is already the daemon of .*device0\.page"):
        second.claim(Role.DAEMON)
    second.claim(Role.MAIN)
    first.close()
    second.claim(Role.DAEMON)
    second.close()


def test_a_umask_takes_none_of_the_owners_rights(directory: Path) -> None:
    before = os.umask(0o277)
    try:
        page = Page.open(page_path(directory, 0))
    finally:
        os.umask(before)
    assert page.path.stat().st_mode & 0o777 == 0o600
    page.close()


def test_what_can_be_no_directory_or_page_is_refused_in_words(directory: Path) -> None:
    (directory / "file").touch()
    with pytest.raises(PageError, match=r"cannot make the directory .*: Not a directory; name another one"):
        make_private_dir(directory / "file" / "pages")
    (directory / "file").unlink()
    os.mkfifo(page_path(directory, 0), 0o600)
    with pytest.raises(PageError, match="is not a file; remove it"):
        Page.open(page_path(directory, 0))
    page_path(directory, 0).unlink()


def write_page(path: Path, version: int, magic: int = PAGE_MAGIC, size: int = PAGE_BYTES) -> None:
    path.write_bytes(struct.pack("<qq", magic, version).ljust(size, b"\0"))
    path.chmod(0o600)


def test_a_page_that_nobody_holds_is_stale_and_replaced_whatever_its_version(directory: Path) -> None:
    path = page_path(directory, 0)
    write_page(path, version=99)
    page = Page.open(path)
    assert page.words[Field.VERSION] == PAGE_VERSION
    page.close()


@pytest.mark.parametrize(
    ("version", "magic", "says"),
    [
        (99, PAGE_MAGIC, f"version 99 and is in use; this side speaks version {PAGE_VERSION}"),
        (1, 1234, "not a page of this project"),
    ],
)
def test_a_page_in_use_of_another_kind_is_refused(directory: Path, version: int, magic: int, says: str) -> None:
    import fcntl

    path = page_path(directory, 0)
    write_page(path, version, magic)
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        with pytest.raises(PageError, match=says):
            Page.open(path)
        assert path.exists(), "another's page is left alone"
    path.unlink()


def test_a_page_that_others_may_write_is_refused(directory: Path) -> None:
    path = page_path(directory, 0)
    write_page(path, 1)
    path.chmod(0o666)
    with pytest.raises(PageError, match="mode 0666; allowed: a file with 0600"):
        Page.open(path)
    path.unlink()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_another_users_page_or_directory_is_refused(directory: Path, tmp_path: Path) -> None:
    path = page_path(directory, 0)
    write_page(path, 1)
    os.chown(path, 12345, 12345)
    with pytest.raises(PageError, match="belongs to user 12345"):
        Page.open(path)
    path.unlink()
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, 12345)
    with pytest.raises(PageError, match="belongs to user 12345"):
        make_private_dir(theirs)


def test_a_link_in_place_of_a_page_is_refused(directory: Path, tmp_path: Path) -> None:
    path = page_path(directory, 0)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PageError, match="cannot open the page"):
        Page.open(path)
    path.unlink()


def test_a_directory_open_to_others_is_refused_with_the_way_out(tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    loose.mkdir(mode=0o755)
    with pytest.raises(PageError, match=r"mode 0755; allowed: 0700 .chmod 700"):
        make_private_dir(loose)
    (tmp_path / "file").touch()
    with pytest.raises(PageError, match="is not a directory"):
        make_private_dir(tmp_path / "file")


def test_without_create_a_missing_page_is_an_error(directory: Path) -> None:
    with pytest.raises(PageError, match="no page at"):
        Page.open(page_path(directory, 3), create=False)


def test_the_environment_names_the_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SQUEEZER_DIR", str(tmp_path))
    assert runtime_dir() == tmp_path
    monkeypatch.delenv("SQUEEZER_DIR")
    assert runtime_dir().name == f"squeezer-{os.getuid()}"


def test_a_role_belongs_to_its_process_and_not_to_a_child_that_outlives_it(directory: Path) -> None:
    says, hears = os.pipe()
    lives, ends = os.pipe()
    holder = os.fork()
    if holder == 0:
        page = Page.open(page_path(directory, 0))
        page.claim(Role.MAIN)
        if os.fork() == 0:  # a data-loading worker, with all that its parent has open
            os.close(ends)
            os.write(hears, b".")
            os.read(lives, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(holder, 0)
    os.read(says, 1)
    page = Page.open(page_path(directory, 0))
    page.claim(Role.MAIN)
    assert page.words[Role.MAIN] == os.getpid()
    page.close()
    assert not page.path.exists(), "the worker does not hold the page either"
    for fd in (says, hears, lives, ends):
        os.close(fd)


def test_a_role_whose_holder_was_killed_unreaped_is_free(directory: Path) -> None:
    page = Page.open(page_path(directory, 0))
    holder = os.fork()
    if holder == 0:
        Page.open(page_path(directory, 0)).claim(Role.DAEMON)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, holder, os.WEXITED | os.WNOWAIT)
    assert page.words[Role.DAEMON] == holder
    page.claim(Role.DAEMON)
    os.waitpid(holder, 0)
    page.close()


def test_a_number_that_another_process_has_now_holds_no_role(directory: Path) -> None:
    page = Page.open(page_path(directory, 0))
    page.words[Role.MAIN], page.words[Role.MAIN.start] = os.getppid(), 1
    page.claim(Role.MAIN)
    assert page.words[Role.MAIN] == os.getpid()
    page.close()


def test_a_process_that_replaced_itself_takes_its_role_again(directory: Path) -> None:
    page = Page.open(page_path(directory, 0))
    page.words[Role.MAIN], page.words[Role.MAIN.start] = os.getpid(), start_time(os.getpid())  # before an exec
    page.claim(Role.MAIN)
    assert page.words[Role.MAIN] == os.getpid()
    page.close()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        (Field.BOOT_ID, "made on another machine, or before this one restarted"),
        (Field.BOOT_ID + 1, "made on another machine, or before this one restarted"),
        (Field.PID_NAMESPACE, "belongs to PID namespace .* shareProcessNamespace"),
        (Field.TIME_NAMESPACE, "belongs to time namespace .* CLOCK_MONOTONIC may differ"),
    ],
)
def test_a_page_from_elsewhere_is_refused_in_words(directory: Path, word: int, says: str) -> None:
    page = Page.open(page_path(directory, 0))
    page.words[word] += 1
    with pytest.raises(PageError, match=says):
        Page.open(page_path(directory, 0))
    page.close()


def test_a_page_that_another_process_keeps_locked_is_refused(directory: Path) -> None:
    """A process that is stopped just while it closes the page, say."""
    path = page_path(directory, 0)
    write_page(path, PAGE_VERSION)
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(PageError, match="another process locks"):
            Page.open(path)
    path.unlink()
