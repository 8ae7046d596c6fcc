"""A daemon whose job has begun again waits for the one before it, unless that one serves any job."""

import os
import threading
import time
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import Page, make_private_dir, page_path
from ds_hooks.shared.page.layout import Field, Role
from ds_hooks.shared.processes.identity import start_time
from squeezer.daemon import former_daemon
from squeezer.daemon.former_daemon import await_former

FORMER = os.getppid()
JOB = os.getpid()


@pytest.fixture
def page(tmp_path: Path) -> Page:
    made = Page.open(page_path(make_private_dir(tmp_path / "run"), 0))
    made.words[Role.DAEMON], made.words[Role.DAEMON.start] = FORMER, start_time(FORMER)
    return made


def test_it_lets_the_former_one_know_and_waits_until_that_has_left(page: Page) -> None:
    waits = threading.Thread(target=await_former, args=(page, JOB))
    waits.start()
    while not page.words[Field.NEXT_DAEMON]:
        assert waits.is_alive()
        time.sleep(1e-3)
    assert page.words[Field.NEXT_DAEMON] == os.getpid()
    page.words[Role.DAEMON] = 0
    waits.join()
    assert page.words[Field.NEXT_DAEMON] == 0


def test_one_that_stays_is_not_awaited_for_ever(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(former_daemon, "LEAVES_WITHIN_S", 0.2)
    await_former(page, JOB)
    assert (page.holder(Role.DAEMON), page.words[Field.NEXT_DAEMON]) == (FORMER, 0)


def test_a_standing_daemon_is_not_awaited(page: Page) -> None:
    page.words[Field.SERVES_ANY_JOB] = 1
    await_former(page, JOB)
    assert page.holder(Role.DAEMON) == FORMER


def test_one_whose_job_lives_is_not_awaited(page: Page) -> None:
    page.words[Role.MAIN], page.words[Role.MAIN.start] = FORMER, start_time(FORMER)
    await_former(page, JOB)
    assert (page.holder(Role.DAEMON), page.words[Field.NEXT_DAEMON]) == (FORMER, 0)


def test_one_whose_job_has_begun_already_is_awaited(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    page.words[Role.MAIN], page.words[Role.MAIN.start] = JOB, start_time(JOB)
    monkeypatch.setattr(former_daemon, "LEAVES_WITHIN_S", 0.2)
    began_s = time.monotonic()
    await_former(page, JOB)
    assert time.monotonic() - began_s >= 0.2
