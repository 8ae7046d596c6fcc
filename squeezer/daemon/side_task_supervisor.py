"""Supervises the side task: its start, its statuses, its death, its restart, and the trials that it leaves."""

import logging
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ds_hooks.shared import statuses
from ds_hooks.shared.page.layout import Field, SideActivity
from ds_hooks.shared.page.memory_order import light_fence
from ds_hooks.shared.processes.endings import USER_ERROR_STATUS, true_status
from ds_hooks.shared.processes.identity import start_time
from ds_hooks.shared.status_reader import StatusReader
from ds_hooks.shared.status_text import differs, too_large, too_long
from squeezer.daemon.correlator import Correlator
from squeezer.daemon.recovery import Recovery
from squeezer.daemon.side_processes.family import SideFamily
from squeezer.daemon.side_processes.spawner import Spawner, wait_or_kill
from squeezer.daemon.side_processes.uncounted_time import UncountedTime
from squeezer.device import CannotShareError, SideProcess, has_ended
from squeezer.policy.events import Event, Side, SideChanged
from squeezer.records.layout import DETAILS
from squeezer.records.writer import Recorder

END_TIMEOUT_S = 15.0
MEASURE_TIMEOUT_S = 60.0
"""Of measuring the dedicated rate, besides the time that the user wants it to take: imports, models, first steps."""

log = logging.getLogger(__name__)


def announce(words: "memoryview[int]", pid: int) -> None:
    """Name a new side task's process on its page. Who reads the name finds what belongs to it."""
    words[Field.SIDE_ACTIVITY] = SideActivity.HOST  # in its place, until it can say so itself
    words[Field.SIDE_PROCESS_START] = start_time(pid)
    light_fence()
    words[Field.SIDE_PROCESS] = pid


class SideTaskSupervisor:
    """The side task of one device, over all its processes.

    Args:
        spawner: starts and ends the processes.
        max_restarts: how many processes may follow ones that died in a study.
        takes_turns: whether one follows that has left a study, for another one's turn.
        words: the page's.
        watched: what the daemon waits on: file descriptor -> what to call when it becomes readable.
        recorder: takes the records.
        correlator: takes the overruns that the side task measures.
        feed: takes events for the policy.
        fault: takes a sentence about whatever is wrong.

    Attributes:
        progress: the last that was reported; None: no epoch has ended yet.
        waits_for_job: no process starts before the next main job is known: none has been, or the last one's device
            cannot be shared.
    """

    def __init__(
        self,
        spawner: Spawner,
        max_restarts: int,
        takes_turns: bool,
        words: "memoryview[int]",
        watched: dict[int, Callable[[], None]],
        recorder: Recorder,
        correlator: Correlator,
        feed: Callable[[Event], None],
        fault: Callable[[str], None],
    ) -> None:
        self._spawner = spawner
        self.waits_for_job = spawner.needs_job
        self._recovery = Recovery()
        self._asks_again = False
        self._max_restarts = max_restarts
        self._deaths: Counter[str | None] = Counter()
        self._serves_now: str | None = None  # a study that was submitted
        self._takes_turns = takes_turns
        self._words = words
        self._family = SideFamily(words)
        self._uncounted = UncountedTime(correlator)
        self._watched = watched
        self._recorder = recorder
        self._correlator = correlator
        self._feed = feed
        self._fault = fault
        self.progress: statuses.Progress | None = None
        self._reader: StatusReader | None = None
        self._was_ready = self._is_ready = self._has_left = False
        self._has_left_trials = False
        self._rows = 0
        self._has_served_others = False
        self._closer: subprocess.Popen[bytes] | None = None
        self._noticed_units: set[tuple[str, str]] = set()

    @property
    def process(self) -> SideProcess | None:
        """The process that runs now."""
        return self._spawner.side

    @property
    def ready_process(self) -> SideProcess | None:
        """The process that runs now, once it asks its gate."""
        return self.process if self._is_ready else None

    def start(self) -> None:
        """Start a process, unless the device cannot be shared with this main job, or not yet."""
        if not self._may_start():
            return
        spawner = self._spawner
        try:
            spawner.start()
        except (OSError, ValueError) as error:  # ValueError: a study's name has letters that the locale lacks
            log.error("no side task runs: %s", error)
            self._record("not_started", reason=str(error))
            self._wait_for_job()
            return
        assert spawner.side is not None
        self._serves_now, self._has_left = None, False
        self._reader = StatusReader(spawner.status_fd, self._fault)
        self._watched[spawner.status_fd] = self._read_statuses
        self._watched[spawner.side.pidfd] = self._died
        group = None if spawner.group is None else str(spawner.group.path)
        limits = spawner.group is not None and spawner.group.limits_memory
        self._record("started", pid=spawner.side.pid, group=group, no_group=spawner.no_group, limits_memory=limits)
        announce(self._words, spawner.side.pid)
        self._feed(SideChanged(Side.STARTING))

    def _may_start(self) -> bool:
        """Where the answer is "not yet", the policy asks again in the next step."""
        now_ns = time.monotonic_ns()
        if self._recovery.is_too_early(now_ns):
            return False
        main_pid = self._words[Field.MAIN_PID]
        if self._spawner.needs_job and not main_pid:
            self._wait_for_job()
            return False
        try:
            self._spawner.prepare(main_pid)
        except CannotShareError as error:
            if error.may_pass and not self._asks_again:
                self._asks_again = True
                self._recovery.begin(now_ns)
            if self._recovery.lasts(now_ns):
                self._recovery.pause(now_ns)
                return False
            log.error("no side task runs: %s", error)
            self._record("not_started", reason=str(error))
            self._wait_for_job()
            return False
        self.waits_for_job = self._asks_again = False
        return True

    def _wait_for_job(self) -> None:
        self.waits_for_job, self._asks_again = True, False
        self._feed(SideChanged(Side.NONE))

    def look_after_family(self) -> None:
        """See `SideFamily`."""
        if self.process is None:
            return
        group = self._spawner.group
        self._family.look(self.process, group, time.monotonic_ns())
        if group is not None:
            self._uncounted.look(group.cpu_ns())

    def give_way(self) -> None:
        """A main job has come: a process that starts gives way to it from now on, though it does not ask the gate yet.

        Not before it has forked its search worker, part of which is exempt; after that it looks itself.
        """
        if not self._is_ready and self._words[Field.SEARCH_PROCESS]:
            self._spawner.give_way()

    @property
    def is_asleep(self) -> bool:
        """Whether the process sleeps at its gate, by its own word."""
        return self._words[Field.SIDE_ACTIVITY] == SideActivity.ASLEEP

    def kill(self, reason: str) -> None:
        """End the process at once. Another one may take over its trials."""
        if self.process is None:
            return
        log.warning("ending the side task: %s", reason)
        self._spawner.end(0.0, beside_main=True)
        was_ready = self._is_ready
        self._record("exited", status=self._reap(), restarted=False, reason=reason, **self._uncounted.take())
        self._needs_recovery(was_ready)
        self._feed(SideChanged(Side.DUE))

    def end(self, *, beside_main: bool) -> None:
        """End the process for good, and release the trials that it leaves unfinished.

        Args:
            beside_main: a main job lives, so only its idle time is used.
        """
        if self.process is not None:
            self._record("asked_to_end", beside_main=beside_main)
            self._spawner.end(END_TIMEOUT_S if self._is_ready else 0.0, beside_main=beside_main)
            self._record("exited", status=self._reap(), restarted=False, **self._uncounted.take())
        if self._has_left_trials:
            self._release_trials(died=False, idle=beside_main)
        if self._closer is not None:
            wait_or_kill(self._closer, END_TIMEOUT_S)

    def measure_dedicated(self, seconds: float, why_stop: Callable[[], str]) -> dict[str, Any] | None:
        """The rate of the same side task on this device alone; None if it never worked, or it cannot be measured.

        Several studies have no rate in common.

        Args:
            seconds: for how long.
            why_stop: why the device is no longer free for that; empty while it is.
        """
        if self.progress is None or seconds <= 0 or self._has_served_others:
            return None
        return self._spawner.measure_dedicated(seconds, self._rows, seconds + MEASURE_TIMEOUT_S, why_stop)

    def _read_statuses(self) -> None:
        assert self._reader is not None
        for status in self._reader.read():
            fields = statuses.as_fields(status)
            kind = fields["event"] if fields["event"] in DETAILS else "side"
            self._recorder.add(kind, t_ns=time.monotonic_ns(), **fields)
            self._take(status)
        if self._reader.is_over:
            self._watched.pop(self._spawner.status_fd, None)

    def _take(self, status: statuses.Status) -> None:
        match status:
            case statuses.Serving():
                self._has_served_others |= self._spawner.serves not in (None, status)
                self._spawner.serves, self._spawner.given_up = status, None
                self._serves_now = status.name
                del self._deaths[None]
            case statuses.Ready(busy_ms=busy_ms, rows=rows):
                self._rows = rows
                self._was_ready = self._is_ready = True
                self._uncounted.begin()
                self._correlator.counter.ready(time.monotonic_ns(), busy_ms)
                self._feed(SideChanged(Side.READY))
            case statuses.Progress():
                self.progress = status
                self._correlator.counter.progress(status)
            case statuses.Overran(slot, overrun_ns):
                self._correlator.side_task_overran(slot, overrun_ns)
            case statuses.OutOfMemory():
                log.warning("side task: %s", too_large(status))
            case statuses.Starved(unit=unit, remedy=remedy) if (unit, remedy) not in self._noticed_units:
                self._noticed_units.add((unit, remedy))
                log.warning("side task: %s", too_long(status))
            case statuses.Mismatched():
                log.warning("side task: %s", differs(status))
            case statuses.Left():
                self._has_left = True
            case statuses.Error(message):
                log.error("side task: %s", message)

    def _died(self) -> None:
        """The process is gone: start another one, or give the side task up and release its trials."""
        if self.process is None or not has_ended(self.process.pidfd):
            return  # another one has the number of its pidfd by now
        was_ready = self._is_ready
        status = self._reap()
        excused = status not in (0, USER_ERROR_STATUS) and self._needs_recovery(was_ready)
        restarts = excused or self._may_restart(status)
        reason = {"reason": "the device was not usable again after the death before"} if excused else {}
        self._record("exited", status=status, restarted=restarts, **reason, **self._uncounted.take())
        if restarts:
            log.log(logging.WARNING if status else logging.DEBUG, "side task ended with status %d; restarting", status)
        self._feed(SideChanged(Side.DUE if restarts else Side.NONE))
        if status != 0 and not restarts:
            log.error("side task ended with status %d and is given up; the main job continues alone", status)
            self._record("given_up", status=status)
            if self._has_left_trials:
                self._release_trials(died=True, idle=True)

    def _reap(self) -> int:
        """Clear up after a process that has ended; returns its exit status."""
        spawner = self._spawner
        assert spawner.side is not None
        self._read_statuses()  # its last words
        self._watched.pop(spawner.status_fd, None)
        del self._watched[spawner.side.pidfd]
        self._words[Field.SIDE_PROCESS] = 0  # while its number is still its own
        status = true_status(spawner.reap(), has_said_so=self._has_left)
        self._correlator.counter.side_ended()
        self._has_left_trials = self._was_ready and status != 0
        self._is_ready = False
        self._words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP
        self._words[Field.SIDE_BYTES] = 0
        self._family.clear()
        return status

    def _needs_recovery(self, was_ready: bool) -> bool:
        """Let the device recover from a death, if it has to; whether that death is excused by the one before."""
        return self._spawner.recovers and self._recovery.died(was_ready, time.monotonic_ns())

    def _may_restart(self, status: int) -> bool:
        """Whether another process follows one that ended with `status`; counts deaths in a row, of each study apart."""
        study = self._serves_now
        if status == 0:
            del self._deaths[study]
            return self._takes_turns
        if status == USER_ERROR_STATUS:
            return False
        self._deaths[study] += 1
        if self._deaths[study] <= self._max_restarts:
            return True
        if study is None:
            return False
        log.error("study %s is given up: one process after another died in it; other studies continue", study)
        del self._deaths[study]
        self._spawner.given_up = study
        if self._has_left_trials:
            self._release_trials(died=True, idle=True)
        return True

    def _release_trials(self, *, died: bool, idle: bool) -> None:
        try:
            self._closer = self._spawner.release_trials(died=died, idle=idle)
        except (OSError, ValueError) as error:
            log.error("trials wait until their worker's lease ends: %s", error)
        self._has_left_trials = False

    def _record(self, event: str, **fields: object) -> None:
        log.debug("side task: %s %s", event, fields)
        self._recorder.add("side", t_ns=time.monotonic_ns(), event=event, **fields)
