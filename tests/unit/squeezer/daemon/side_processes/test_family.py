"""Which processes of a side task are given idle time only: real ones."""

import os
import subprocess
import sys

from ds_hooks.shared.page.layout import PAGE_BYTES, PROCESS_WORDS, Field
from squeezer.daemon.side_processes.family import SOONEST_NS, SideFamily
from squeezer.device import SideProcess

LEADS = """
import os, sys
pids = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        sys.stdin.read()
        os._exit(0)
    pids.append(pid)
print(*pids, flush=True)
sys.stdin.read()
"""


def test_nobody_becomes_idle_before_the_search_worker_is_known_which_never_does() -> None:
    """Where it may not take that back, its work under the lock of all search workers would starve."""
    command = [sys.executable, "-c", LEADS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) as leader:
        assert leader.stdout is not None
        own, search = map(int, leader.stdout.readline().split())
        side = SideProcess(pid=leader.pid, pidfd=os.pidfd_open(leader.pid))
        words = memoryview(bytearray(PAGE_BYTES)).cast("q")
        family = SideFamily(words)
        family.look(side, None, SOONEST_NS)
        assert [os.sched_getscheduler(pid) for pid in (own, search)] == [os.SCHED_OTHER] * 2
        words[Field.SEARCH_PROCESS] = search
        family.look(side, None, SOONEST_NS)
        assert [os.sched_getscheduler(pid) for pid in (own, search)] == [os.SCHED_IDLE, os.SCHED_OTHER]
        found = words[Field.FOUND_PROCESSES : Field.FOUND_PROCESSES + PROCESS_WORDS].tolist()
        assert [pid for pid in found if pid] == [own], "it counts as the side task's"
        os.close(side.pidfd)
