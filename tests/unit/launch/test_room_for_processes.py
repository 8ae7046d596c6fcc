"""Limits on processes are found, for whom they count."""

import resource
import threading

from launch.room_for_processes import processes_left
from tests.support.stranger import STRANGER, as_user, needs_second_user


def before_and_beside_three_threads() -> list[int | None]:
    resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))
    found, over = [processes_left()], threading.Event()
    threads = [threading.Thread(target=over.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    found.append(processes_left())
    over.set()
    return found


@needs_second_user
def test_threads_of_this_user_count() -> None:
    before, beside = as_user(STRANGER, before_and_beside_three_threads)
    assert 0 < before < 1000 and beside == before - 3


@needs_second_user
def test_root_has_no_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (1000, before[1]))
    try:
        assert processes_left() is None
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, before)
