"""The daemon of one device: waits for whatever happens first, has it handled, and carries out what the policy decides.

`main_job` handles the main job's messages and its process, `side_task_supervisor` those of the side task. Both turn
what they hear into events. `squeezer.policy.state` answers with actions, which become page words and signals here.
"""

import gc
import logging
import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ds_hooks.shared.page.file import Page, make_private_dir, page_path, runtime_dir, socket_path
from ds_hooks.shared.page.layout import Field, Role
from ds_hooks.shared.page.plan import clear_plan, plan_slot, plan_steps
from squeezer.config import Config
from squeezer.daemon.correlator import Correlator
from squeezer.daemon.device_watch import DeviceWatch
from squeezer.daemon.former_daemon import await_former
from squeezer.daemon.main_job import MainJob
from squeezer.daemon.mapped_page import MappedPage
from squeezer.daemon.memory_limit import MemoryLimit
from squeezer.daemon.preemption import is_held_up, preemption_of, uses_idle_time
from squeezer.daemon.progress_line import ProgressLine
from squeezer.daemon.receiver import Receiver, has_signal, wakeup_on_signals
from squeezer.daemon.side_processes.parent_group import cpu_group
from squeezer.daemon.side_processes.spawner import SideFiles, Spawner
from squeezer.daemon.side_task_supervisor import SideTaskSupervisor
from squeezer.daemon.silence import Silence
from squeezer.device import DEVICES, kind_of, place_of
from squeezer.policy.actions import Action, Continue, FlushAt, ForgetPlan, Kill, Note, PlanSlot, PlanSteps, Start, Stop
from squeezer.policy.events import Event, JobSilent, Overran, Side, SideChanged
from squeezer.policy.plain import as_record
from squeezer.policy.state import GateMachine, State
from squeezer.records.layout import RECORD_VERSION, SHARES
from squeezer.records.writer import Recorder

RANK_ENDS_WITHIN_S = 2.0
FOLLOW_EVERY_NS = 1_000_000_000
"""How often the daemon looks whether its job has gone to other cores."""

log = logging.getLogger(__name__)


class Daemon:
    """Serves one device.

    Args:
        config: the squeezer file.
        run: where records go.
        local_rank: the device's number on this machine.
        job_pid: the rank that this daemon belongs to: it serves no other, ends with it, and then measures the
            dedicated rate. None: it serves any job.
        earlier_ended: how the daemon crashed that this one replaces.

    Attributes:
        rank: under which it records.
    """

    def __init__(
        self,
        config: Config,
        run: Path,
        local_rank: int,
        *,
        job_pid: int | None = None,
        earlier_ended: str | None = None,
    ) -> None:
        self._job_pid = job_pid
        self._earlier_ended = earlier_ended
        self._run = run
        self._local_rank = local_rank
        self.rank = int(os.environ.get("RANK", local_rank)) if job_pid is not None else local_rank
        directory = make_private_dir(runtime_dir())
        self._page = Page.open(page_path(directory, local_rank))
        try:
            if job_pid is not None:
                await_former(self._page, job_pid)
            self._page.claim(Role.DAEMON)
            self._recorder = Recorder(run, self.rank, config.run.keep_bytes)
            self._receiver = Receiver(socket_path(directory, local_rank), self._fault)
        except Exception:
            self._page.close()
            raise
        self._device = DEVICES[kind_of(config.device)](self._page.words, config.device, local_rank)
        if not self._device.stops:
            config = config.without_stops()
        self._config = config
        self._machine = GateMachine(config.squeeze.policy(config.guard))
        self._clear_page()
        self._correlator = Correlator(self._machine.forecast.of, host_measures=self._device.stops)
        self._watched: dict[int, Callable[[], None]] = {}
        reserve_bytes = int(config.device.reserve_mb * 2**20)
        self._memory_limit = MemoryLimit(self._page.words, reserve_bytes)
        self._main_job = self._make_main_job()
        self._watch = self._make_watch(reserve_bytes)
        self._side_task = self._make_side_task()
        self._watched[self._receiver.fd] = self._hear
        self._silence = Silence()
        self._progress = ProgressLine()
        self._main_pid = 0  # the job's that has said hello last
        self._choose_preemption()
        self._place: tuple[set[int], str] | None = None  # where it ran when it was last looked for
        self._follow_ns = 0  # when it is looked for again
        self._ended = False

    def run(self) -> None:
        """Serve until a signal asks to end, or the rank that this daemon belongs to is gone."""
        gc.freeze()  # a collection in a bubble looks at what came since then
        self._wakeup = wakeup_on_signals()
        self._watched[self._wakeup.fileno()] = self._end
        self._recorder.add(
            "run",
            version=RECORD_VERSION,
            rank=self.rank,
            config=self._config.as_record(),
            wall_s=time.time(),
            t_ns=time.monotonic_ns(),
        )
        if self._earlier_ended is not None:
            self._fault(f"the daemon before this one ended with {self._earlier_ended}")
        self._recorder.write()  # a daemon that is killed soon has been here, too
        served = f"process {os.getpid()} serves device {self._local_rank}; records go to {self._run}"
        log.log(logging.INFO if self._job_pid is None else logging.DEBUG, "%s", served)
        if self._job_pid is not None:
            self._main_job.watch(self._job_pid)
            self._start_first_side_task()
        try:
            while not self._ended:
                self._turn()
        finally:
            self._finish()

    def _make_main_job(self) -> MainJob:
        return MainJob(
            config=self._config,
            words=self._page.words,
            mapped_page=MappedPage(self._page.path),
            memory_limit=self._memory_limit,
            device=self._device,
            join=self._join,
            receiver=self._receiver,
            correlator=self._correlator,
            machine=self._machine,
            watched=self._watched,
            recorder=self._recorder,
            feed=self._feed,
            fault=self._fault,
            first_attached=self._first_attached,
            step_started=self._step_started,
            owner_ended=self._end,
            owner_pid=self._job_pid,
        )

    def _make_watch(self, reserve_bytes: int) -> DeviceWatch:
        return DeviceWatch(
            device=self._device,
            words=self._page.words,
            reserve_bytes=reserve_bytes,
            memory_limit=self._memory_limit,
            has_side=self._config.side is not None,
            has_job=self._main_job.lives,
            recorder=self._recorder,
            feed=self._feed,
            fault=self._fault,
        )

    def _make_side_task(self) -> SideTaskSupervisor | None:
        config = self._config
        if config.side is None:
            return None
        files = SideFiles(
            page=self._page.path,
            run=self._run,
            rank=self.rank,
            storage=config.storage(self._run),
            studies=config.studies(self._run),
            units_bytes=config.run.keep_bytes // SHARES,
        )
        return SideTaskSupervisor(
            Spawner(config.side, self._device, files),
            config.side.max_restarts,
            config.side.queue is not None,
            self._page.words,
            self._watched,
            self._recorder,
            self._correlator,
            self._feed,
            self._fault,
        )

    def _clear_page(self) -> None:
        words = self._page.words
        clear_plan(words)
        words[Field.SIDE_PROCESS] = 0
        words[Field.SIDE_LIMIT_BYTES] = 0
        words[Field.SERVES_ANY_JOB] = self._job_pid is None
        words[Field.NEXT_DAEMON] = 0

    def _choose_preemption(self) -> None:
        side = None if self._side_task is None else self._side_task.ready_process
        self._page.words[Field.PREEMPTIVE] = preemption_of(self._config, self._main_pid, side)

    # The loop

    def _turn(self) -> None:
        if self._receiver.has_more():  # the socket's descriptor becomes readable only once
            self._hear()
        timeout_s = 0.0 if self._receiver.has_more() else self._idle_s()
        ready = select.select(list(self._watched), [], [], timeout_s)[0]
        if not ready:
            self._watch.look_if_due()
        for fd in ready:
            if fd in self._watched:  # not closed by the one before
                self._watched[fd]()
        self._look_if_silent()
        if self._side_task is not None:
            self._side_task.look_after_family()
        if self._machine.state is State.ABSENT:
            self._recorder.write()

    def _hear(self) -> None:
        self._silence.broken(time.monotonic_ns())
        self._main_job.receive()

    def _idle_s(self) -> float | None:
        """How long to wait for whatever happens; None: for ever."""
        waits = (self._until_silent_s(), self._watch.left_s())
        return min((wait for wait in waits if wait is not None), default=None)

    def _until_silent_s(self) -> float | None:
        """How long to wait for a message; None: for ever, since nothing of ours could be in the main job's way."""
        if self._side_task is None or self._side_task.process is None or not self._main_job.lives():
            return None
        return self._silence.left_s(self._machine.patience_ns, time.monotonic_ns())

    def _look_if_silent(self) -> None:
        if self._until_silent_s() == 0.0:
            assert self._side_task is not None
            self._silence.noticed(time.monotonic_ns())
            self._main_job.look()
            process = self._side_task.process
            if process is not None:
                self._feed(JobSilent(is_held_up(process, self._page.words), self._side_task.is_asleep))

    def _end(self) -> None:
        self._ended = True

    def _first_attached(self) -> None:
        if self._job_pid is None:
            self._start_first_side_task()  # not before: only now are the rank's cores known

    def _join(self, main_pid: int) -> None:
        """Run where this job does, the side task too, which may have served another job before."""
        self._silence = Silence()
        self._main_pid = main_pid
        self._run_beside(main_pid)
        groups = cpu_group(), cpu_group(main_pid)
        if groups[0] != groups[1] and self._side_task is not None:
            log.warning(
                "the side task gives way within control group %s only, and the main job is in %s: start the daemon in "
                "the job's group, or give its own the least weight (cpu.idle = 1; cgroup v1: cpu.shares = 2)",
                *groups,
            )
        if self._side_task is None:
            return
        self._side_task.give_way()
        if self._side_task.waits_for_job:
            self._feed(SideChanged(Side.DUE))

    def _run_beside(self, main_pid: int) -> None:
        self._place = place_of(main_pid)
        side = None if self._side_task is None else self._side_task.process
        if not self._device.join(main_pid, side) and self._side_task is not None:
            self._side_task.kill("it cannot follow the job to its device or session; a new side task starts there")
        self._choose_preemption()
        self._watch.job_attached()

    def _follow(self) -> None:
        """Go where the main job has gone: the cores that it left may be another rank's. Its class may be new, too."""
        now_ns = time.monotonic_ns()
        if now_ns < self._follow_ns:
            return
        self._follow_ns = now_ns + FOLLOW_EVERY_NS
        if place_of(self._main_pid) not in (None, self._place):
            self._run_beside(self._main_pid)
        self._choose_preemption()

    def _start_first_side_task(self) -> None:
        if self._device.needs_job:
            return  # `_join` has it started
        if self._earlier_ended is not None and not self._page.holder(Role.MAIN) and self._side_task is not None:
            self._side_task.waits_for_job = True  # the hooks may have left, or have a page that somebody has removed
            return
        self._start_side_task()

    def _start_side_task(self) -> None:
        if self._side_task is None:
            return
        if self._machine.is_barred:
            self._feed(SideChanged(Side.DUE))
            return
        self._side_task.start()
        side = self._side_task.process
        if side is not None and self._machine.state is State.ABSENT and self._page.holder(Role.MAIN):
            self._device.stop(side)  # hooks that have not said hello yet let it run in their bubbles

    # Decisions

    def _feed(self, event: Event) -> None:
        if isinstance(event, SideChanged):
            self._choose_preemption()
        elif isinstance(event, Overran) and uses_idle_time(self._page.words):
            return
        actions = self._machine.handle(event)
        if self._config.run.record_events:
            self._recorder.add("event", **as_record(event, actions))
        for action in actions:
            self._do(action, type(event).__name__)

    def _do(self, action: Action, cause: str) -> None:
        words = self._page.words
        match action:
            case ForgetPlan():
                clear_plan(words)
            case PlanSlot():
                plan_slot(words, action.slot, action.permit_ns, action.renewals, action.opens_before_ns)
            case PlanSteps():
                plan_steps(words, action.from_step, action.until_step)
            case FlushAt():
                words[Field.FLUSH_SLOT] = action.slot
            case Note(decision):
                self._recorder.add("guard", t_ns=time.monotonic_ns(), **asdict(decision))
            case Kill(reason) if self._side_task is not None:
                self._side_task.kill(reason)
            case Start():
                self._start_side_task()
            case Stop() | Continue() if self._device.stops:
                side = None if self._side_task is None else self._side_task.process
                if side is not None:
                    (self._device.stop if isinstance(action, Stop) else self._device.resume)(side)
                self._recorder.add("action", t_ns=time.monotonic_ns(), action=type(action).__name__, cause=cause)

    def _fault(self, what: str) -> None:
        log.debug("fault: %s", what)
        self._recorder.add("fault", t_ns=time.monotonic_ns(), what=what)

    def _step_started(self, step: int) -> None:
        self._follow()
        self._show_progress(step)

    def _show_progress(self, step: int) -> None:
        if self._job_pid is None:
            return
        progress = None if self._side_task is None else self._side_task.progress
        busy_ns = self._page.words[Field.BUSY_NS]
        line = self._progress.line(step, self._correlator.bubble_ns, busy_ns, progress, time.monotonic_ns())
        if line is not None:
            log.log(logging.INFO if self.rank == 0 else logging.DEBUG, "%s", line)

    # The end

    def _why_stop(self) -> str:
        """Why nothing more may be measured. An elastic launcher starts a job that has ended again at once."""
        if self._page.words[Field.NEXT_DAEMON] or self._page.holder(Role.MAIN) not in (0, self._job_pid):
            return "the main job has begun again"
        return "this daemon was asked to end" if has_signal(self._wakeup) else ""

    def _finish(self) -> None:
        clear_plan(self._page.words)
        has_signal(self._wakeup)  # what has ended the loop
        dedicated = None
        if self._side_task is not None:
            self._side_task.end(beside_main=self._main_job.lives())
            # the signal that ends this daemon may have ended the rank, too
            if self._job_pid is not None and not self._main_job.lives(within_s=RANK_ENDS_WITHIN_S):
                dedicated = self._side_task.measure_dedicated(self._config.run.calibrate_s, self._why_stop)
        now_ns = time.monotonic_ns()
        self._recorder.add("bubble_time", t_ns=now_ns, **self._correlator.counter.take())
        self._recorder.add(
            "end",
            t_ns=now_ns,
            lost_messages=self._receiver.lost,
            dropped_messages=self._correlator.dropped,
            foreign_messages=self._receiver.foreign,
            dedicated=dedicated,
        )
        self._recorder.close()
        self._main_job.unwatch()
        self._receiver.close()
        directory = self._page.path.parent
        self._page.close()
        with suppress(OSError):  # others still use it
            directory.rmdir()
