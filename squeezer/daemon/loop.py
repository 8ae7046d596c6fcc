"""The daemon of one device: with `receiver`, the only module with sockets and the clock. Events in, actions out.

What it decides is in `state`; here messages become events, actions become page words and signals, and both are noted.
"""

import gc
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ds_hooks.shared import wire
from ds_hooks.shared.endings import JOB_ENDED_FIRST
from ds_hooks.shared.page import ClockKind, Field, Role, SideActivity
from ds_hooks.shared.page_file import Page, make_private_dir, page_path, runtime_dir, socket_path
from ds_hooks.shared.plan import clear_plan, plan_slot, plan_steps
from squeezer.config import Config
from squeezer.daemon.correlator import Bookkeeper
from squeezer.daemon.memory_limit import side_limit_bytes
from squeezer.daemon.notices import too_large, too_long
from squeezer.daemon.progress_line import ProgressLine
from squeezer.daemon.receiver import Receiver, wakeup_on_signals
from squeezer.daemon.supervisor import SidePlace, Supervisor, wait_or_kill
from squeezer.device import DEVICES, kind_of
from squeezer.policy.state import (
    Action,
    BubbleEnded,
    Continue,
    Event,
    ForgetPlan,
    GateMachine,
    JobAttached,
    JobLost,
    Note,
    Overran,
    PlanSlot,
    PlanSteps,
    Side,
    SideChanged,
    State,
    StepEnded,
    StepStarted,
    Stop,
    TellAt,
)
from squeezer.records.layout import DETAILS, RECORD_VERSION, SHARES
from squeezer.records.writer import Recorder
from squeezer.replay import as_record

SIDE_END_TIMEOUT_S = 15.0
RECORDS_AT_ONCE = 256
POLLED_LATE_NS = 1_000_000
"""By how much margins are wider where a thread of the main job must find time to see that a bubble is over."""


class Daemon:
    """Serves one device.

    Args:
        config: the squeezer file.
        run: where records go.
        local_rank: the device's number on this machine.
        job_pid: the rank that we belong to: end with it, and measure the dedicated rate then. None: serve any job.
    """

    def __init__(self, config: Config, run: Path, local_rank: int, *, job_pid: int | None = None) -> None:
        self._job_pid = job_pid
        self._rank = int(os.environ.get("RANK", local_rank)) if job_pid is not None else local_rank
        directory = make_private_dir(runtime_dir())
        self._page = Page.open(page_path(directory, local_rank))
        try:
            self._page.claim(Role.DAEMON)
            self._recorder = Recorder(run, self._rank, config.run.keep_bytes)
            self._receiver = Receiver(socket_path(directory, local_rank), self._fault)
        except Exception:
            self._page.close()
            raise
        self._device = DEVICES[kind_of(config.device)](self._page.words, config.device, local_rank)
        if not self._device.stops:
            config = config.without_stops()
        self._config = config
        self._machine = GateMachine(config.squeeze.policy(config.guard))
        clear_plan(self._page.words)
        self._page.words[Field.SIDE_PROCESS] = 0
        self._page.words[Field.SIDE_LIMIT_BYTES] = 0
        self._page.words[Field.PREEMPTIVE] = config.squeeze.preemptive
        place = SidePlace(
            page=self._page.path,
            run=run,
            rank=self._rank,
            storage=config.storage(run),
            units_bytes=config.run.keep_bytes // SHARES,
        )
        self._supervisor = Supervisor(config.side, self._device, place) if config.side else None
        self._watched: dict[int, Callable[[], None]] = {self._receiver.fd: self._receive}
        self._main_pid = 0
        self._main_pidfd = -1
        self._side_has_worked = False
        self._side_was_ready = False
        self._left_trials = False
        self._free_bytes = -1
        self._opened_slot: int | None = None
        self._overruns_ns: Counter[int] = Counter()
        self._named_units: set[tuple[str, str]] = set()
        self._closer: subprocess.Popen[bytes] | None = None
        self._books = Bookkeeper(self._recorder, knows_gaps=self._device.stops)
        self._progress = ProgressLine()
        self._ended = False

    def run(self) -> None:
        """Serve until a signal asks to end, or the rank that we belong to is gone."""
        gc.freeze()  # a collection in a bubble looks at what came since then
        wakeup = wakeup_on_signals()
        self._watched[wakeup.fileno()] = self._end
        self._recorder.add(
            "run",
            version=RECORD_VERSION,
            rank=self._rank,
            config=self._config.model_dump(mode="json"),
            wall_s=time.time(),
            t_ns=time.monotonic_ns(),
        )
        if self._job_pid is not None:
            self._watch_main(self._job_pid)
            self._start_side()
        try:
            while not self._ended:
                self._turn()
        finally:
            self._finish()

    def _turn(self) -> None:
        if self._receiver.has_more():  # the socket's descriptor tells of news only once
            self._receive()
        ready = select.select(list(self._watched), [], [], 0.0 if self._receiver.has_more() else None)[0]
        for fd in ready:
            if fd in self._watched:  # not closed by the one before
                self._watched[fd]()
        if self._machine.state is State.ABSENT:
            self._recorder.write()

    def _end(self) -> None:
        self._ended = True

    # The main job

    def _receive(self) -> None:
        for part in self._receiver.parts():
            envelope = self._receiver.decode(part)
            if envelope is not None:
                self._take(envelope.t_ns, envelope.message)
        self._recorder.write(at_least=RECORDS_AT_ONCE)

    def _take(self, t_ns: int, message: wire.Message) -> None:
        if isinstance(message, wire.Hello):
            self._hello(t_ns, message)
            return
        if self._books.job < 0 or self._main_pid == 0:
            return  # of a job that we have not been told of, or whose process is gone
        books, machine = self._books, self._machine
        match message:
            case wire.BubbleStart():
                gap_ns = books.bubble_began(t_ns, message.epoch)
                overran = books.bubble_started(t_ns, message, machine.forecast.of(message.slot, gap_ns))
                if overran is not None:
                    self._feed(Overran(*overran))
                if not self._device.stops:
                    self._feed_told_overrun(message)
            case wire.BubbleEnd():
                length_ns = books.bubble_ended(t_ns, message)
                if length_ns is not None:
                    self._feed(BubbleEnded(message.slot, wire.WaitKind(message.wait).name, length_ns, books.gap_ns))
            case wire.StepStart():
                self._feed(StepStarted(message.step))
                books.step_started(t_ns, message, squeezed=machine.squeezed)
                self._show_progress(message.step)
            case wire.StepEnd():
                duration_ns = books.step_ended(t_ns, message)
                if duration_ns is not None:
                    self._feed(StepEnded(message.step, duration_ns))
                self._limit_memory()
            case wire.Instructions():
                books.instructions(message)
            case wire.Bye():
                if message.fault:
                    self._fault("the hooks of the main job switched themselves off; its stderr says why")
                self._feed(JobLost())
                if self._job_pid is None:
                    self._unwatch_main()

    def _feed_told_overrun(self, message: wire.BubbleStart) -> None:
        """The opened bubble before this one is over: what the side task has told of its slot counts now."""
        if self._opened_slot is not None:
            self._feed(Overran(self._opened_slot, self._overruns_ns.pop(self._opened_slot, 0)))
        self._opened_slot = message.slot if message.permit_ns else None

    def _limit_memory(self) -> None:
        words, reserve = self._page.words, int(self._config.device.reserve_mb * 2**20)
        free, side, main_peak = (words[field] for field in (Field.FREE_BYTES, Field.SIDE_BYTES, Field.MAIN_PEAK_BYTES))
        if free == self._free_bytes:
            return  # what the side task has taken since then is not free any more
        self._free_bytes = free
        words[Field.SIDE_LIMIT_BYTES] = side_limit_bytes(free, side, main_peak, reserve)

    def _hello(self, t_ns: int, message: wire.Hello) -> None:
        attached = self._machine.state is not State.ABSENT
        if self._books.job >= 0 and self._main_pid == message.pid and attached:
            return  # it says so in every step
        if message.pid != self._page.words[Field.MAIN_PID]:
            self._receiver.refuse(f"hello from process {message.pid}, which is not the page's main job")
            return
        self._watch_main(message.pid)
        if self._main_pid != message.pid:
            return  # its last words
        self._receiver.new_job()
        self._opened_slot = None
        if self._device.stops != (self._page.words[Field.CLOCK_KIND] == ClockKind.CPU):
            mismatch = f"the main job's device is not of kind {self._device.name}, so nothing runs in its bubbles"
            self._fault(mismatch)
            print(f"[squeezer] rank {self._rank}: {mismatch}: set kind in [device]", file=sys.stderr)
        self._device.join(message.pid)
        if self._config.side is not None:  # what it does can wait as long as what the side task does
            os.setpriority(os.PRIO_PROCESS, 0, max(self._config.side.nice, os.nice(0)))
        self._books.job_attached(t_ns, message)
        polled = self._page.words[Field.CLOCK_KIND] == ClockKind.CUDA_POLLED
        self._feed(JobAttached(POLLED_LATE_NS if polled else 0))
        if self._books.job == 0 and self._job_pid is None:
            self._start_side()  # not before: only now are the rank's cores known

    def _watch_main(self, pid: int) -> None:
        if pid == self._main_pid:
            return
        self._unwatch_main()
        try:
            self._main_pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended = pid == self._job_pid
            return
        self._main_pid = pid
        self._watched[self._main_pidfd] = self._main_gone

    def _unwatch_main(self) -> None:
        if self._main_pidfd >= 0:
            del self._watched[self._main_pidfd]
            os.close(self._main_pidfd)
        self._main_pidfd, self._main_pid = -1, 0

    def _main_gone(self) -> None:
        self._receive()  # its last words
        pid = self._main_pid
        self._unwatch_main()
        if self._machine.state is not State.ABSENT:
            self._fault("the main job ended without saying goodbye")
            self._feed(JobLost())
        if self._page.words[Field.MAIN_PID] in (0, pid):
            self._device.main_ended()
        if self._job_pid is not None:
            self._ended = True

    # The side task

    def _start_side(self) -> None:
        supervisor = self._supervisor
        if supervisor is None:
            return
        supervisor.start()
        assert supervisor.side is not None
        self._watched[supervisor.status_fd] = self._hear_side
        self._watched[supervisor.side.pidfd] = self._side_exited
        self._recorder.add("side", t_ns=time.monotonic_ns(), event="started", pid=supervisor.side.pid)
        self._page.words[Field.SIDE_ACTIVITY] = SideActivity.HOST  # in its place, until it can say so itself
        self._page.words[Field.SIDE_PROCESS] = supervisor.side.pid
        self._feed(SideChanged(Side.STARTING))

    def _hear_side(self) -> None:
        assert self._supervisor is not None
        for status in self._supervisor.read_status():
            kind = status["event"] if status["event"] in DETAILS else "side"
            self._recorder.add(kind, t_ns=time.monotonic_ns(), **status)
            match status["event"]:
                case "ready":
                    self._side_was_ready = True
                    self._feed(SideChanged(Side.READY))
                case "progress":
                    self._side_has_worked = True
                    self._progress.side = status
                case "overran":
                    self._overruns_ns[status["slot"]] += status["overrun_ns"]
                case "out_of_memory":
                    print(f"[squeezer] rank {self._rank}: side task: {too_large(status)}", file=sys.stderr)
                case "starved" if (named := (status["unit"], status["did"])) not in self._named_units:
                    self._named_units.add(named)
                    print(f"[squeezer] rank {self._rank}: side task: {too_long(status)}", file=sys.stderr)
                case "error":
                    print(f"[squeezer] rank {self._rank}: side task: {status['message']}", file=sys.stderr)

    def _side_exited(self) -> None:
        supervisor = self._supervisor
        assert supervisor is not None and supervisor.side is not None
        self._hear_side()
        del self._watched[supervisor.side.pidfd], self._watched[supervisor.status_fd]
        self._page.words[Field.SIDE_PROCESS] = 0  # while its number is still its own
        status = supervisor.reap()
        self._left_trials = self._side_was_ready and status != 0
        self._page.words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP
        self._page.words[Field.SIDE_BYTES] = 0
        self._feed(SideChanged(Side.NONE))
        again = supervisor.may_restart(status)
        self._recorder.add("side", t_ns=time.monotonic_ns(), event="exited", status=status, restarted=again)
        if again:
            print(f"[squeezer] rank {self._rank}: side task ended with status {status}; restarting", file=sys.stderr)
            self._start_side()
        elif status != 0:
            print(
                f"[squeezer] rank {self._rank}: side task ended with status {status} and is given up; the main job "
                f"goes on alone",
                file=sys.stderr,
            )
            self._recorder.add("side", t_ns=time.monotonic_ns(), event="given_up", status=status)
            if self._left_trials:
                self._close_trials(f"the side task ended with status {status} and was given up", idle=True)

    def _close_trials(self, reason: str, *, idle: bool) -> None:
        assert self._supervisor is not None
        self._closer = self._supervisor.close_trials(reason, idle=idle)
        self._left_trials = False

    # Carrying out, and noting

    def _feed(self, event: Event) -> None:
        if isinstance(event, JobLost):
            self._books.job_lost()
        actions = self._machine.handle(event)
        if self._config.run.record_events:
            self._recorder.add("event", **as_record(event, actions))
        for action in actions:
            self._do(action, type(event).__name__)

    def _do(self, action: Action, cause: str) -> None:
        page = self._page
        side = self._supervisor.side if self._supervisor is not None else None
        match action:
            case ForgetPlan():
                clear_plan(page.words)
            case PlanSlot():
                plan_slot(page.words, action.slot, action.permit_ns, action.renewals, action.opens_before_ns)
            case PlanSteps():
                plan_steps(page.words, action.from_step, action.until_step)
            case TellAt():
                page.words[Field.FLUSH_SLOT] = action.slot
            case Note(decision):
                self._recorder.add("guard", t_ns=time.monotonic_ns(), **asdict(decision))
            case Stop() | Continue() if self._device.stops:
                if side is not None:
                    (self._device.stop if isinstance(action, Stop) else self._device.resume)(side)
                self._recorder.add("action", t_ns=time.monotonic_ns(), action=type(action).__name__, cause=cause)

    def _fault(self, what: str) -> None:
        self._recorder.add("fault", t_ns=time.monotonic_ns(), what=what)

    def _show_progress(self, step: int) -> None:
        line = self._progress.line(step, self._books.bubble_ns, self._page.words[Field.BUSY_NS], time.monotonic_ns())
        if line is not None and self._job_pid is not None and self._rank == 0:
            print(line, flush=True)

    def _finish(self) -> None:
        clear_plan(self._page.words)
        self._page.words[Field.SIDE_PROCESS] = 0
        dedicated = None
        supervisor = self._supervisor
        if supervisor is not None:
            if supervisor.end(SIDE_END_TIMEOUT_S):
                self._hear_side()  # its last words
                status = supervisor.reap()
                self._recorder.add("side", t_ns=time.monotonic_ns(), event="exited", status=status, restarted=False)
                self._left_trials = self._side_was_ready and (self._left_trials or status != 0)
            if self._left_trials:
                self._close_trials(JOB_ENDED_FIRST, idle=False)
            if self._closer is not None:
                wait_or_kill(self._closer, SIDE_END_TIMEOUT_S)
            if self._job_pid is not None and self._side_has_worked and self._config.run.calibrate_s > 0:
                dedicated = supervisor.measure_dedicated(self._config.run.calibrate_s, trials=0)
        self._recorder.add(
            "end",
            t_ns=time.monotonic_ns(),
            lost_messages=self._receiver.lost,
            dropped_messages=self._books.dropped,
            foreign_messages=self._receiver.foreign,
            dedicated=dedicated,
        )
        self._recorder.close()
        self._unwatch_main()
        self._receiver.close()
        directory = self._page.path.parent
        self._page.close()
        with suppress(OSError):  # others still use it
            directory.rmdir()
