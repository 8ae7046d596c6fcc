"""A bound on every wait of a test: one that hangs fails, says where, and the run goes on.

This is a plugin of pytest, too, whose hooks `tests/conftest.py` has. Whatever the main thread waits for is interrupted:
a lock, a thread, a process, a pipe.
"""

import faulthandler
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tests.support.paths import ROOT

LIMIT_S, SLOW_LIMIT_S = 400.0, 3600.0
"""Of a test's setup, its call and its teardown each; generous, for the machine may be busy."""
AGAIN_S = 30.0
"""What still hangs so long after the bound, such as what clears up, is interrupted again."""
STANDARD_ERROR = 2


@contextmanager
def within(limit_s: float, what: str) -> Iterator[None]:
    """Fail unless the body ends in time. In the main thread; until the end of the body, an outer bound rests."""

    def give_up(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(STANDARD_ERROR)  # of all threads, for one of them may be to blame
        pytest.fail(f"{what} has not ended after {limit_s:g} s; it waits in {_place(frame)}")

    began_s = time.monotonic()
    former = signal.signal(signal.SIGALRM, give_up)
    left_s, again_s = signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - began_s), 1e-3), again_s)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    with _bound(item, "the setup of "):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with _bound(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    with _bound(item, "the teardown of "):
        return (yield)


def _bound(item: pytest.Item, part: str = "") -> AbstractContextManager[None]:
    return within(LIMIT_S if item.get_closest_marker("slow") is None else SLOW_LIMIT_S, f"{part}{item.name}")


def _place(frame: FrameType | None) -> str:
    """The innermost line that is a test's own, or else the innermost."""
    innermost = frame
    while frame is not None and not _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    found = frame or innermost
    return "an unknown place" if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"


def _is_ours(file: str) -> bool:
    return Path(file).is_relative_to(ROOT / "tests") and file != __file__
