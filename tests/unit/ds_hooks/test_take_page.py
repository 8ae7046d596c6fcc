"""Which page a main job takes where another has its local rank."""

import os
import resource
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_hooks import connection
from ds_hooks.engine import AttachError
from ds_hooks.shared.device_uuid import write_device_uuid
from ds_hooks.shared.page.file import Page, PageError, make_private_dir, page_path
from ds_hooks.shared.page.layout import PAGE_BYTES, Field, Role
from ds_hooks.shared.processes.identity import start_time
from ds_hooks.take_page import check_spare, take_page

OTHER = os.getppid()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "pages"


@pytest.fixture
def pages(directory: Path) -> Iterator[list[Page]]:
    """Three pages with standing daemons; another process is the first one's main job."""
    made = [Page.open(page_path(directory, number)) for number in (0, 2, 10)]
    for page in made:
        take(page, Role.DAEMON)
        page.words[Field.SERVES_ANY_JOB] = 1
    take(made[0], Role.MAIN)
    yield made
    for page in made:
        page.close()


def take(page: Page, role: Role) -> None:
    page.words[role], page.words[role.start] = OTHER, start_time(OTHER)


def taken(directory: Path, local_rank: int = 0) -> str:
    page = take_page(directory, local_rank)
    assert page.words[Role.MAIN] == os.getpid()
    name = page.path.name
    page.close()
    return name


def test_its_own_page_if_that_is_free_or_new(directory: Path, pages: list[Page]) -> None:
    assert taken(directory, 2) == "device2.page"
    assert taken(directory, 1) == "device1.page"


def test_the_first_spare_one_by_number(directory: Path, pages: list[Page]) -> None:
    assert taken(directory) == "device2.page"
    take(pages[1], Role.MAIN)
    assert taken(directory) == "device10.page"


@pytest.mark.parametrize("why", ["it serves one job", "it died", "its number is another process's"])
def test_none_whose_daemon_does_not_serve(directory: Path, pages: list[Page], why: str) -> None:
    for page in pages[1:]:
        match why:
            case "it serves one job":
                page.words[Field.SERVES_ANY_JOB] = 0
            case "it died":
                page.words[Role.DAEMON] = 0
            case _:
                page.words[Role.DAEMON.start] += 1
    with pytest.raises(PageError, match=rf"process {OTHER} is already the main of .*device0\.page"):
        take_page(directory, 0)
    assert [page.holder(Role.MAIN) for page in pages] == [OTHER, 0, 0]


def test_none_for_a_second_engine_of_the_same_process(directory: Path, pages: list[Page]) -> None:
    first = take_page(directory, 2)
    with pytest.raises(AttachError, match="another engine of this process is squeezed"):
        take_page(directory, 2)
    first.close()


def test_without_room_for_a_page_none_is_left_and_it_is_said_why(directory: Path) -> None:
    make_private_dir(directory)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES // 2, hard))  # a write takes a part first, as a full disk's
    try:
        with pytest.raises(PageError, match=r"cannot make the page .*device0\.page: .*; name another directory"):
            take_page(directory, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(directory.iterdir()) == []


def test_a_page_that_is_no_page_is_passed_over(directory: Path, pages: list[Page]) -> None:
    (directory / "device1.page").write_bytes(b"?")
    assert taken(directory) == "device2.page"


@pytest.mark.parametrize(
    ("follows_host", "uuid", "is_refused"), [(True, 0, False), (False, 7, False), (False, 0, True)]
)
def test_a_spare_daemon_must_find_the_jobs_device(
    directory: Path, pages: list[Page], follows_host: bool, uuid: int, is_refused: bool
) -> None:
    page = take_page(directory, 0)
    write_device_uuid(page.words, uuid)
    with pytest.raises(AttachError, match="could not find this job's device") if is_refused else nullcontext():
        check_spare(page, follows_host=follows_host)
    page.close()


def test_hooks_on_a_spare_page_leave_it_where_its_daemon_could_not_find_their_device(
    directory: Path, pages: list[Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(follows_host=False, leave=lambda *, wait: wait)
    monkeypatch.setattr(connection, "clock_for", lambda *_: clock)
    with pytest.raises(AttachError, match="could not find this job's device"):
        connection.connect(directory, 0, "cuda", 0)
    assert [page.holder(Role.MAIN) for page in pages] == [OTHER, 0, 0]
