"""Limits on processes are found, for whom they count."""

import os
import resource
import subprocess
import sys
import threading

from launch.room_for_processes import Room, room_for_processes
from tests.support.control_groups import a_pids_group
from tests.support.paths import ROOT
from tests.support.stranger import STRANGER, as_user, needs_second_user


def before_and_beside_three_threads() -> list[Room | None]:
    resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))
    found, over = [room_for_processes()], threading.Event()
    threads = [threading.Thread(target=over.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    found.append(room_for_processes())
    over.set()
    return found


@needs_second_user
def test_threads_of_this_user_count() -> None:
    (before, limit), (beside, _) = as_user(STRANGER, before_and_beside_three_threads)
    assert 0 < before < 1000 and beside == before - 3 and limit == "ulimit -u"


@needs_second_user
def test_root_has_no_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (1000, before[1]))
    try:
        found = room_for_processes()
        assert found is None or found.limit != "ulimit -u"
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, before)


def test_the_tightest_limit_of_the_control_groups_above_counts() -> None:
    program = "from launch.room_for_processes import room_for_processes as room\nprint(*room())"
    with a_pids_group() as group:
        inner = group / "inner"
        inner.mkdir()
        (inner / "pids.max").write_text("90")
        (group / "pids.max").write_text("40")
        enter = f'echo $$ > {inner}/cgroup.procs && exec "$@"'
        command = ["bash", "-c", enter, "bash", sys.executable, "-c", program]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"39 {group}/pids.max\n", done.stderr
        inner.rmdir()
