"""How long a side task has to end, by whether it asks its gate yet. The process is made up."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_hooks.shared import statuses
from ds_hooks.shared.page.layout import PAGE_BYTES
from squeezer.daemon.correlator import Correlator
from squeezer.daemon.side_task_supervisor import END_TIMEOUT_S, SideTaskSupervisor
from squeezer.device import SideProcess
from squeezer.records.writer import Recorder


class Spawned:
    """In place of `Spawner`: the side task is this process, which nobody ends."""

    needs_job = recovers = False
    group = serves = given_up = None
    no_group = "it is made up"

    def __init__(self) -> None:
        self.side: SideProcess | None = None
        self.status_fd, self._says_fd = -1, -1
        self.ended: list[tuple[float, bool]] = []

    def prepare(self, main_pid: int) -> None: ...

    def start(self) -> None:
        self.status_fd, self._says_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.side = SideProcess(pid=os.getpid(), pidfd=os.pidfd_open(os.getpid()))

    def says(self, status: statuses.Status) -> None:
        os.write(self._says_fd, statuses.encode(status))

    def end(self, timeout_s: float, *, beside_main: bool) -> None:
        self.ended.append((timeout_s, beside_main))
        self.says(statuses.Left())

    def reap(self) -> int:
        assert self.side is not None
        for fd in (self.side.pidfd, self.status_fd, self._says_fd):
            os.close(fd)
        self.side = None
        return 0


@pytest.mark.parametrize("is_ready", [True, False])
@pytest.mark.parametrize("beside_main", [True, False])
def test_one_that_still_starts_is_ended_at_once(is_ready: bool, beside_main: bool, tmp_path: Path) -> None:
    words = memoryview(bytearray(PAGE_BYTES)).cast("q")
    spawned: Any = Spawned()
    watched: dict[int, Callable[[], None]] = {}
    recorder = Recorder(tmp_path / "run", 0)
    correlator = Correlator(lambda slot, gap_ns: None, host_measures=True)
    made = SideTaskSupervisor(
        spawned, 0, False, words, watched, recorder, correlator, feed=lambda event: None, fault=pytest.fail
    )
    made.start()
    if is_ready:
        spawned.says(statuses.Ready(trials=4, busy_ms=1.0, rows=2, gain=0.0))
        watched[spawned.status_fd]()
    assert made.ready_process == (spawned.side if is_ready else None)
    made.end(beside_main=beside_main)
    recorder.close()
    assert spawned.ended == [(END_TIMEOUT_S if is_ready else 0.0, beside_main)]
