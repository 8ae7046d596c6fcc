"""The shared page: one writer per role, private, versioned, and gone with its last holder."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hooks.shared.page import (
    PAGE_BYTES,
    PAGE_MAGIC,
    PAGE_VERSION,
    PLANNED_SLOTS,
    RENEWALS_PER_SLOT,
    Field,
    Page,
    PageError,
    Role,
    find_renewal,
    make_private_dir,
    page_path,
    runtime_dir,
)


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


def test_a_plan_counts_for_its_slots_and_steps_alone(directory: Path) -> None:
    page = Page.open(page_path(directory, 0))
    page.plan_slot(7, 1000)
    page.plan_slot(PLANNED_SLOTS - 1, 2000)
    page.plan_slot(PLANNED_SLOTS, 3000)
    shut = (0, 0)
    assert page.planned(5, 7) == shut, "for no step yet"
    page.plan_steps(5, 8)
    assert [page.planned(step, 7) for step in range(4, 9)] == [shut, *[(1000, 0)] * 3, shut]
    assert [page.planned(5, slot) for slot in (6, PLANNED_SLOTS - 1, PLANNED_SLOTS)] == [shut, (2000, 0), shut]
    page.forget_plan()
    page.plan_steps(5, 8)
    assert [page.planned(5, slot) for slot in (7, PLANNED_SLOTS - 1)] == [shut, shut]
    page.close()


def test_a_plan_keeps_microseconds_and_the_longest_that_there_are(directory: Path) -> None:
    page = Page.open(page_path(directory, 0))
    page.plan_steps(1, 2)
    for permit_ns, opens_before_ns in ((60 * 10**9, 0), (60 * 10**9, 50 * 10**9), (3_000, 2_000_000)):
        page.plan_slot(4, permit_ns, (), opens_before_ns)
        assert page.planned(1, 4) == (permit_ns, opens_before_ns)
    page.plan_slot(4, 1)
    assert page.planned(1, 4) == (1000, 0), "the shortest permit is one"
    page.plan_slot(4, 2**70, (), 2**70)
    assert page.planned(1, 4) == ((2**31 - 1) * 1000,) * 2
    page.close()


class Words:
    """A plan's words, and a look at them after every write."""

    def __init__(self) -> None:
        self.values: dict[int, int] = {Field.PLAN_FROM_STEP: 0, Field.PLAN_UNTIL_STEP: 0}
        self.held: list[set[int]] = []

    def __getitem__(self, field: int) -> int:
        return self.values[field]

    def __setitem__(self, field: int, value: int) -> None:
        self.values[field] = value
        self.held.append(set(range(self.values[Field.PLAN_FROM_STEP], self.values[Field.PLAN_UNTIL_STEP])))


def test_a_renewal_is_found_by_what_is_left_of_it(directory: Path) -> None:
    page = Page.open(page_path(directory, 0))
    page.plan_slot(5, 2_000_000, ((3_000_000, 4_000_000), (6_000_000, 2**70)))
    first, last = (3_000_000, 4_000_000), (6_000_000, (2**31 - 1) * 1000)
    for elapsed_ms, needs_ms, found in (
        (0, 0.9, first),
        (3.0, 1, first),
        (3.2, 0.8, first),
        (3.2, 0.9, last),
        (0, 1.1, last),
        (60_000, 1000, last),
    ):
        assert find_renewal(page.words, 5, int(elapsed_ms * 1e6), needs_ms * 1e6) == found
    assert find_renewal(page.words, 5, 0, 2**60) is None, "nothing is so long"
    assert find_renewal(page.words, 4, 0, 1) is find_renewal(page.words, 6, 0, 1) is None, "of other slots"
    assert find_renewal(page.words, PLANNED_SLOTS, 0, 1) is None
    page.plan_slot(5, 2_000_000)
    assert find_renewal(page.words, 5, 0, 1) is None
    page.plan_slot(PLANNED_SLOTS - 1, 1, ((1000, 2000),) * RENEWALS_PER_SLOT)
    page.plan_slot(PLANNED_SLOTS, 1, ((1000, 2000),))
    assert find_renewal(page.words, PLANNED_SLOTS - 1, 0, 1000) == (1000, 2000)
    page.close()


@pytest.mark.parametrize("before", [(0, 0), (4, 8), (20, 24)])
@pytest.mark.parametrize("after", [(0, 0), (4, 8), (5, 9), (20, 24)])
def test_no_step_is_planned_while_a_plan_changes_that_neither_has(
    directory: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    page = Page.open(page_path(directory, 0))
    real, words = page.words, Words()
    page.words = words  # type: ignore[assignment]
    page.plan_steps(*before)
    words.held.clear()
    page.plan_steps(*after)
    page.words = real
    page.close()
    assert words.held[-1] == set(range(*after))
    assert all(held <= set(range(*before)) | set(range(*after)) for held in words.held)


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
    [(99, PAGE_MAGIC, "version 99 and is in use; this side speaks version 3"), (1, 1234, "not a page of this project")],
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
    with pytest.raises(PageError, match="mode 0666; allowed is a file with 0600"):
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
    with pytest.raises(PageError, match=r"mode 0755; allowed is 0700: chmod 700"):
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
