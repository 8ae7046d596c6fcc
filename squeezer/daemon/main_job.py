"""The main job, as the daemon sees it: its hello, its messages, its process, and its end."""

import logging
import os
from collections.abc import Callable, Iterable

from ds_hooks.shared import wire
from ds_hooks.shared.page.layout import ClockKind, Field
from ds_hooks.shared.processes.identity import start_time
from ds_hooks.shared.processes.priority import MOST_NICE
from squeezer.config import Config
from squeezer.daemon.bubble_accounts import Shut
from squeezer.daemon.correlator import Correlator, Found
from squeezer.daemon.mapped_page import MappedPage
from squeezer.daemon.memory_limit import MemoryLimit
from squeezer.daemon.receiver import Receiver
from squeezer.device import Device, has_ended
from squeezer.policy.events import (
    BubbleEnded,
    Event,
    JobAttached,
    JobLeft,
    JobLost,
    Overran,
    Side,
    StepEnded,
    StepStarted,
)
from squeezer.policy.state import GateMachine, State
from squeezer.records.writer import Recorder

RECORDS_AT_ONCE = 256
COUNTED_NS = 30_000_000_000
"""After this much bubble time, where it went is recorded, in case this process is killed."""
LAST_WORDS_S = 0.5
"""How long a message of a job that has ended may still be on its way."""
POLLED_LATE_NS = 1_000_000
"""How much wider margins are where a thread of the main job must first find time to see that a bubble is over."""

log = logging.getLogger(__name__)


class MainJob:
    """The main jobs of one device, one after another.

    Args:
        config: the squeezer file.
        words: the page's.
        mapped_page: tells whether a job still has it.
        memory_limit: is kept up to date by what the main job measures.
        device: shuts the gate when the job's process is gone.
        join: called with a job's process once it is known, so that all of us run where it does.
        receiver: of the hooks' messages.
        correlator: puts the messages together.
        machine: the policy; it is asked for its state, and gets its events by `feed`.
        watched: what the daemon waits on: file descriptor -> what to call when it becomes readable.
        recorder: takes the records.
        feed: takes events for the policy.
        fault: takes a sentence about whatever is wrong.
        first_attached: called after the first hello.
        step_started: called with the number of every step.
        owner_ended: called when `owner_pid` is gone, and so is the rank that it has spawned, if any.
        owner_pid: the rank whose daemon this is, which may spawn the one that says hello. None: there is none.
    """

    def __init__(  # noqa: PLR0913 - by name, one for each part of the daemon
        self,
        *,
        config: Config,
        words: "memoryview[int]",
        mapped_page: MappedPage,
        memory_limit: MemoryLimit,
        device: Device,
        join: Callable[[int], None],
        receiver: Receiver,
        correlator: Correlator,
        machine: GateMachine,
        watched: dict[int, Callable[[], None]],
        recorder: Recorder,
        feed: Callable[[Event], None],
        fault: Callable[[str], None],
        first_attached: Callable[[], None],
        step_started: Callable[[int], None],
        owner_ended: Callable[[], None],
        owner_pid: int | None,
    ) -> None:
        self._has_side = config.side is not None
        self._margin_ns = int(config.squeeze.margin_ms * 1e6)
        self._memory_limit = memory_limit
        self._words = words
        self._mapped_page = mapped_page
        self._device = device
        self._join = join
        self._receiver = receiver
        self._correlator = correlator
        self._machine = machine
        self._watched = watched
        self._recorder = recorder
        self._feed = feed
        self._fault = fault
        self._first_attached = first_attached
        self._step_started = step_started
        self._owner_ended = owner_ended
        self._owner_pid = owner_pid
        self._owner_start = 0 if owner_pid is None else start_time(owner_pid)
        self._pid = 0
        self._pidfd = -1
        self._hello_ns = 0

    def receive(self) -> None:
        """Take the messages that have arrived."""
        for part in self._receiver.parts():
            envelope = self._receiver.decode(part)
            if envelope is not None:
                self._take(envelope.t_ns, envelope.message)
        self._recorder.write(at_least=RECORDS_AT_ONCE)

    def watch(self, pid: int) -> bool:
        """Notice when process `pid` ends. Returns whether it still runs."""
        if pid == self._pid:
            return True
        self.unwatch()
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            if pid == self._owner_pid:
                self._owner_ended()
            return False
        self._pid = pid
        self._watched[self._pidfd] = self._process_ended
        return True

    def lives(self, within_s: float = 0.0) -> bool:
        """Whether a main job's process still runs, after up to `within_s` in which it may end."""
        return self._pidfd >= 0 and not has_ended(self._pidfd, within_s)

    def look(self) -> None:
        """Notice hooks that have left the page without a word, as where their process has become another program."""
        if self._machine.state is State.ABSENT:
            return
        if self._words[Field.MAIN_PID] == self._pid and self._mapped_page.is_in(self._pid):
            return
        self._fault("the hooks left, and their goodbye was lost")
        self._lose()
        self._shut_gate(self._pid)

    def unwatch(self) -> None:
        """Forget the process."""
        if self._pidfd >= 0:
            del self._watched[self._pidfd]
            os.close(self._pidfd)
        self._pidfd, self._pid = -1, 0

    def _take(self, t_ns: int, message: wire.Message) -> None:
        if isinstance(message, wire.Hello):
            self._hello(t_ns, message)
            return
        correlator = self._correlator
        if self._machine.state is State.ABSENT:
            return  # of a job that has not said hello, or has left
        match message:
            case wire.BubbleStart():
                self._pass_on(correlator.bubble_started(t_ns, message))
            case wire.BubbleEnd():
                self._pass_on(correlator.bubble_ended(t_ns, message))
            case wire.StepStart():
                self._feed(StepStarted(message.step, correlator.since_step_before(t_ns, message.step)))
                correlator.step_started(t_ns, message, squeezed=self._machine.squeezed, shut=self._shut())
                self._step_started(message.step)
            case wire.StepEnd():
                self._pass_on(correlator.step_ended(t_ns, message))
                self._memory_limit.update()
                if correlator.counter.sums.bubble_ns > COUNTED_NS:
                    self._recorder.add("bubble_time", t_ns=t_ns, **correlator.counter.take())
            case wire.Instructions():
                self._pass_on(correlator.instructions(message))
            case wire.Bye():
                self._bye(message)

    def _shut(self) -> Shut | None:
        """Why the bubbles of the step that has begun are not for trials; None: they are."""
        machine = self._machine
        if machine.side is Side.NONE or machine.is_barred:
            return Shut.ENDED
        if machine.side is not Side.READY:
            return Shut.STARTING
        if machine.squeezed is False:
            return Shut.ALONE
        return None if machine.guard.allows else Shut.GUARD

    def _bye(self, message: wire.Bye) -> None:
        if message.fault:
            self._fault("the hooks of the main job switched themselves off; its stderr says why")
        self._lose()

    def _pass_on(self, found: Iterable[Found]) -> None:
        """Facts go to the records, events to the policy."""
        for each in found:
            if isinstance(each, StepEnded | BubbleEnded | Overran):
                self._feed(each)
            else:
                self._recorder.add_fact(each)

    def _hello(self, t_ns: int, message: wire.Hello) -> None:
        attached = self._machine.state is not State.ABSENT
        if attached and (self._pid, self._hello_ns) == (message.pid, t_ns):
            return  # repeated in every step
        if message.pid != self._words[Field.MAIN_PID] or message.pid <= 0:
            self._receiver.refuse(f"hello from process {message.pid}, which is not the page's main job")
            if message.pid == self._owner_pid and not attached:
                self._feed(JobLeft())  # it has a page of its own, since ours was removed: nothing asks its gate
            return
        if not self.watch(message.pid):
            return  # it has ended since
        self._hello_ns = t_ns
        if attached:
            self._pass_on(self._correlator.job_lost())  # the hooks serve another engine of that process from now on
        self._receiver.new_job()
        self._check_device()
        self._join(message.pid)
        if self._has_side:
            _yield_to_main_job()
        log.debug("a main job has attached: %s", message)
        least_bubble_ns = self._device.least_bubble_ns()
        self._pass_on(self._correlator.job_attached(t_ns, message, least_bubble_ns))
        polled = self._words[Field.CLOCK_KIND] == ClockKind.CUDA_POLLED
        short_ns = max(0, self._device.least_margin_ns() - self._margin_ns)
        late_ns = short_ns + (POLLED_LATE_NS if polled else 0)
        self._feed(JobAttached(late_ns, message.master_port, least_bubble_ns))
        if self._correlator.job == 0:
            self._first_attached()

    def _check_device(self) -> None:
        if self._device.stops != (self._words[Field.CLOCK_KIND] == ClockKind.CPU):
            mismatch = f"the main job's device is not of kind {self._device.name}, so nothing runs in its bubbles"
            self._fault(mismatch)
            log.error("%s: set kind in [device]", mismatch)

    def _lose(self) -> None:
        self._pass_on(self._correlator.job_lost())
        self._feed(self._farewell())

    def _farewell(self) -> JobLeft | JobLost:
        return JobLeft() if self.lives() else JobLost()

    def _process_ended(self) -> None:
        self.receive()
        # its last words: ZeroMQ's thread may need time for them, where others want the core
        while self._machine.state is not State.ABSENT and self._receiver.comes(within_s=LAST_WORDS_S):
            self.receive()
        pid = self._pid
        self.unwatch()
        owner = self._owner_pid
        if owner not in (None, pid) and start_time(owner) == self._owner_start:
            self.watch(owner)  # it has spawned the rank that has ended, and goes on
        if self._machine.state is not State.ABSENT:
            self._fault("the main job ended without saying goodbye")
            self._lose()
        else:
            self._feed(self._farewell())
        self._shut_gate(pid)
        if owner is not None and not self.lives():
            self._owner_ended()

    def _shut_gate(self, pid: int) -> None:
        """In the place of hooks that have gone, perhaps in the middle of a bubble, unless the page is another job's."""
        if self._words[Field.MAIN_PID] in (0, pid):
            self._device.main_ended()


def _yield_to_main_job() -> None:
    """Let this process, on the main job's core, never take it from the main job when a message comes (SCHED_BATCH)."""
    os.setpriority(os.PRIO_PROCESS, 0, MOST_NICE)
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
