"""What of the search worker may run while the main job wants its core."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from trials.search.worker_process import leave_the_core


@pytest.mark.parametrize(
    ("storage", "is_idle"),
    [
        ("/tmp/study.journal", True),
        ("sqlite:////tmp/study.db", True),
        ("postgresql+psycopg://one@db/study", False),
        ("mysql+pymysql://one@db/study", False),
    ],
)
def test_only_a_lock_that_other_hosts_wait_for_is_held_outside_idle_time(storage: str, is_idle: bool) -> None:
    usual = os.sched_getscheduler(0)
    with ThreadPoolExecutor(1) as asking, ThreadPoolExecutor(1) as holder:
        holder.submit(int).result()
        asking.submit(leave_the_core, holder, storage).result()
        assert asking.submit(os.sched_getscheduler, 0).result() == os.SCHED_IDLE
        assert holder.submit(os.sched_getscheduler, 0).result() == (os.SCHED_IDLE if is_idle else usual)
    assert os.sched_getscheduler(0) == usual
