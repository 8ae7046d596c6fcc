"""Processes outside of the side task's group: real ones, stopped and continued one by one."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import STRAY_WORDS, Field
from ds_hooks.shared.processes.identity import start_time
from ds_hooks.shared.processes.strays import Strays, name_strays
from tests.support import reused_pid
from tests.support.sandbox import stat, wait_for

Sleepers = list["subprocess.Popen[bytes]"]


@pytest.fixture
def words(tmp_path: Path) -> Iterator["memoryview[int]"]:
    page = Page.open(page_path(tmp_path / "pages", 0))
    yield page.words
    page.close()


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    made = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2)]
    yield made
    for each in made:
        each.kill()
        each.wait()


def starts(*processes: "subprocess.Popen[bytes]") -> dict[int, int]:
    return {process.pid: start_time(process.pid) for process in processes}


def become(processes: Sleepers, state: str) -> None:
    wait_for(lambda: {stat(process.pid)[0] for process in processes} == {state}, f"state {state}")


def test_all_that_are_named_stop_and_go_on(words: "memoryview[int]", sleepers: Sleepers) -> None:
    strays = Strays(words)
    strays.stop()
    become(sleepers, "S")
    name_strays(words, starts(*sleepers))
    strays.stop()
    become(sleepers, "T")
    strays.resume()
    become(sleepers, "S")
    strays.close()


def test_one_that_was_stopped_and_is_named_no_more_goes_on(words: "memoryview[int]", sleepers: Sleepers) -> None:
    strays = Strays(words)
    name_strays(words, starts(*sleepers))
    strays.stop()
    become(sleepers, "T")
    name_strays(words, {})
    strays.resume()
    become(sleepers, "S")
    strays.close()


def test_what_one_process_has_stopped_another_continues(words: "memoryview[int]", sleepers: Sleepers) -> None:
    name_strays(words, starts(*sleepers))
    hooks, daemon = Strays(words), Strays(words)
    hooks.stop()
    hooks.close()  # the main job leaves
    become(sleepers, "T")
    daemon.resume()
    become(sleepers, "S")
    daemon.close()


def test_a_number_that_means_another_process_by_now_is_never_signalled(
    words: "memoryview[int]", sleepers: Sleepers
) -> None:
    one, other = sleepers
    name_strays(words, {one.pid: start_time(one.pid) - 1, **starts(other)})
    strays = Strays(words)
    strays.stop()
    become([other], "T")
    assert stat(one.pid)[0] == "S"
    strays.resume()
    become(sleepers, "S")
    strays.close()


def test_one_that_has_ended_harms_nothing(words: "memoryview[int]", sleepers: Sleepers) -> None:
    name_strays(words, starts(*sleepers))
    strays = Strays(words)
    strays.stop()
    sleepers[0].kill()
    sleepers[0].wait()
    strays.resume()
    strays.stop()
    become(sleepers[1:], "T")
    strays.close()


def test_who_is_named_stays_and_none_is_named_beyond_the_room(words: "memoryview[int]") -> None:
    named = lambda: [words[Field.STRAYS + index] for index in range(STRAY_WORDS)]  # noqa: E731
    name_strays(words, dict.fromkeys(range(100, 103), 7))
    before = named()
    name_strays(words, dict.fromkeys(range(80, 102), 7))
    assert named()[:2] == before[:2] and all(named()) and len(set(named())) == STRAY_WORDS
    assert words[Field.STRAYS + STRAY_WORDS] == 0, "the next word is another's"
    name_strays(words, {})
    assert not any(named())


def test_a_number_that_another_process_has_by_now_gets_no_signal(words: "memoryview[int]", sleepers: Sleepers) -> None:
    first, strays = sleepers[0], Strays(words)
    name_strays(words, starts(first))
    strays.stop()
    first.kill()
    first.wait()
    stranger = reused_pid.start_with(first.pid)
    strays.stop()
    assert reused_pid.end(stranger) == 0
    strays.close()
