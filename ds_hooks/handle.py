"""attach(engine): find the bubbles of a running pipeline engine and publish them.

Only attributes of this one engine object are set, and one of DeepSpeed's communication object, and removed again by
`detach`; nothing in DeepSpeed is changed. A fault in here switches the hooks off, once and loudly, and the training
goes on.
"""

import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_hooks.clock.cpu import CpuClock
from ds_hooks.clock.cuda import CudaClock, cuda_clock
from ds_hooks.engine import WRAPPED_METHODS, AttachError, check_engine, waits_of
from ds_hooks.publisher import Publisher
from ds_hooks.schedule import Slot, find_slots
from ds_hooks.shared.driver import DriverError
from ds_hooks.shared.page import Field, Role
from ds_hooks.shared.page_file import Page, PageError, page_path, runtime_dir, socket_path
from ds_hooks.shared.plan import planned_permit
from ds_hooks.shared.wire import (
    INSTRUCTIONS_PER_MESSAGE,
    BubbleEnd,
    BubbleStart,
    Bye,
    Hello,
    InstructionKind,
    Instructions,
    StepEnd,
    StepStart,
    WaitKind,
)
from ds_hooks.side_process import SideTask


def attach(engine: Any, *, directory: Path | str | None = None, local_rank: int | None = None) -> "Handle":
    """Publish the bubbles of `engine` to this device's daemon, whether one runs yet or not.

    Never raises and never blocks: if the hooks cannot work, they say so on stderr and the returned handle is off.

    Args:
        engine: what `deepspeed.initialize` returned for a `PipelineModule` or `DualPipeVModule`.
        directory: where pages and sockets are; by default `$SQUEEZER_DIR`, else the user's own runtime directory.
        local_rank: this process's number on its machine; by default `$LOCAL_RANK`, else the engine's.
    """
    handle = Handle(engine)
    try:
        handle.start(Path(directory) if directory is not None else runtime_dir(), local_rank)
    except Exception as error:
        handle.switch_off(error)
    return handle


class Handle:
    """The hooks of one engine. `enabled` tells whether they work; `fault` why they do not."""

    def __init__(self, engine: Any) -> None:
        self.enabled = False
        self.fault: str | None = None
        self._engine = engine
        self._clock_ns = time.monotonic_ns
        self._page: Page | None = None
        self._publisher: Publisher | None = None
        self._replaced: list[tuple[Any, str, Any]] = []
        self._plans: dict[tuple[Any, ...], list[Slot]] = {}
        self._rank = 0
        self._step = 0
        self._in_step = False
        self._in_schedule = False
        self._index = 0
        self._plan: list[Slot] = []
        self._open_slot = 0
        self._open_wait = 0
        self._told_step = 0
        self._is_open = False
        self._side_may_run_on = False
        self._stopped_late = False
        self._base_ns = 0
        self._loss_begin_ns = 0
        self._in_optimizer = False
        self._collectives = 0
        self._items: list[tuple[int, int, int, int]] = []
        self._unread: deque[tuple[int, Any]] | None = None
        """Messages whose time the device has not told yet, with their stamps; None where stamps are times."""

    def start(self, directory: Path, local_rank: int | None) -> None:
        """Connect and wrap. Called by `attach`; raises what `attach` reports."""
        engine = self._engine
        check_engine(engine)
        if local_rank is None:
            local_rank = int(os.environ.get("LOCAL_RANK", max(int(getattr(engine, "local_rank", 0) or 0), 0)))
        self._rank = int(engine.global_rank)
        self._waits = waits_of(engine)
        page = Page.open(page_path(directory, local_rank))
        try:
            page.claim(Role.MAIN)
        except PageError:
            page.close()  # its words are another job's: leave them alone
            raise
        try:
            self._clock = self._clock_of(page)
        except Exception:
            page.close()
            raise
        self._page = page
        self._side = SideTask(page.words)
        if self._unread is None:
            self._side.halt()
        self._publisher = Publisher(f"ipc://{socket_path(directory, local_rank)}")
        self._wrap()
        self.enabled = True
        hello = Hello(
            os.getpid(), self._rank, engine.grid.world_size, engine.stage_id, engine.num_stages, engine.micro_batches
        )
        self._publisher.hello(self._clock_ns(), hello)

    def _clock_of(self, page: Page) -> CpuClock | CudaClock:
        if self._engine.device.type == "cpu":
            return CpuClock(page, self._clock_ns)
        self._unread = deque()
        return cuda_clock(page, self._clock_ns)

    def detach(self) -> None:
        """Leave the engine as it was, tell the daemon, and give the page back. A second call does nothing."""
        self._leave(fault=0)

    def switch_off(self, error: BaseException) -> None:
        """Stop for good after a fault, once and loudly."""
        if self.fault is not None:
            return
        self.fault = f"{type(error).__name__}: {error}"
        print(
            f"[ds_hooks] rank {self._rank}: switched off, the training goes on without squeezing: {error}",
            file=sys.stderr,
        )
        if not isinstance(error, (AttachError, DriverError, PageError)):
            traceback.print_exception(error, file=sys.stderr)
        try:
            self._leave(fault=1)
        except Exception as second:
            print(f"[ds_hooks] rank {self._rank}: and could not tidy up: {second}", file=sys.stderr)

    def _leave(self, fault: int) -> None:
        self.enabled = False
        self._unwrap()
        page, publisher, self._page, self._publisher = self._page, self._publisher, None, None
        if page is not None:
            self._side.leave()
            words = page.words
            words[Field.HOOK_FAULTS] += fault
            words[Field.MAIN_PID] = 0
            if self._clock.leave(wait=not fault):
                words[Field.BUBBLE] &= ~1
            page.close()
        if publisher is not None:
            self._read_times(publisher)
            publisher.send(self._clock_ns(), Bye(self._rank, fault))
            publisher.close()

    def _wrap(self) -> None:
        engine = self._engine
        self._replaced = [(engine, name, vars(engine).get(name)) for name in ("_INSTRUCTION_MAP", *WRAPPED_METHODS)]
        wrapped_map = {kind: self._wrap_instruction(kind, run) for kind, run in engine._INSTRUCTION_MAP.items()}
        train_batch, exec_schedule = engine.train_batch, engine._exec_schedule
        aggregate_total_loss = engine._aggregate_total_loss
        engine._INSTRUCTION_MAP = wrapped_map
        engine.train_batch = self._around(train_batch, self._begin_step, self._end_step)
        engine._exec_schedule = self._around(exec_schedule, self._begin_schedule, self._end_schedule)
        engine._aggregate_total_loss = self._around(aggregate_total_loss, self._begin_loss, self._end_loss)
        backend = getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None)
        if backend is not None:
            self._replaced.append((backend, "all_reduce", vars(backend).get("all_reduce")))
            backend.all_reduce = self._wrap_collective(backend.all_reduce)

    def _unwrap(self) -> None:
        for owner, name, before in self._replaced:
            if before is not None:
                setattr(owner, name, before)
            else:
                vars(owner).pop(name, None)
        self._replaced = []

    def _around(self, run: Callable[..., Any], before: Callable[..., None], after: Callable[[], None]) -> Any:
        """`run` between two hooks whose own faults never reach the training."""

        def method(*args: Any, **kwargs: Any) -> Any:
            if self.enabled:
                try:
                    before(*args)
                except Exception as error:
                    self.switch_off(error)
            try:
                return run(*args, **kwargs)
            finally:
                if self.enabled:
                    try:
                        after()
                    except Exception as error:
                        self.switch_off(error)

        return method

    def _wrap_instruction(self, kind: type, run: Callable[..., Any]) -> Callable[..., Any]:
        name = kind.__name__

        def instruction(engine: Any, **kwargs: Any) -> Any:
            if not self._in_schedule:
                return run(engine, **kwargs)
            begin_ns = 0
            try:
                begin_ns = self._before_instruction(name)
            except Exception as error:
                self.switch_off(error)
            try:
                return run(engine, **kwargs)
            finally:
                if self.enabled:
                    try:
                        self._after_instruction(begin_ns)
                    except Exception as error:
                        self.switch_off(error)

        return instruction

    def _wrap_collective(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A blocking collective inside the optimizer's step is a wait, too: hooks around the instruction miss it."""

        def collective(*args: Any, **kwargs: Any) -> Any:
            if not self._in_optimizer:
                return run(*args, **kwargs)
            opened = False
            try:
                opened = self._begin_collective(*args, **kwargs)
            except Exception as error:
                self.switch_off(error)
            try:
                return run(*args, **kwargs)
            finally:
                if opened and self.enabled:
                    try:
                        self._close()
                    except Exception as error:
                        self.switch_off(error)

        return collective

    # The hooks themselves: what they do must stay within microseconds.

    def _begin_step(self, *_: Any) -> None:
        self._step += 1
        self._collectives = 0
        self._in_step = True
        self._base_ns = self._clock.begin_step()
        assert self._publisher is not None
        self._publisher.greet_again()
        self._say(self._base_ns, StepStart(self._step))

    def _end_step(self) -> None:
        self._in_step = False
        if self._is_open:
            self._close()
        assert self._publisher is not None and self._page is not None
        items, self._items = self._items, []
        for first in range(0, len(items), INSTRUCTIONS_PER_MESSAGE):
            part = tuple(items[first : first + INSTRUCTIONS_PER_MESSAGE])
            self._say(self._base_ns, Instructions(self._step, self._base_ns, part))
        dropped = self._publisher.dropped
        self._page.words[Field.DROPPED] = dropped
        self._say(self._clock.stamp(), StepEnd(self._step, dropped, self._page.words[Field.WORK]))
        self._clock.end_step(self._step)

    def _begin_schedule(self, schedule: Any) -> None:
        if not self._in_step:
            return  # an evaluation: its waits are left alone
        key = (type(schedule), schedule.micro_batches, schedule.stages, schedule.stage_id)
        plan = self._plans.get(key)
        if plan is None:
            names = (type(command).__name__ for commands in schedule.steps() for command in commands)
            plan = self._plans[key] = list(find_slots(names, self._waits))
        self._plan = plan
        self._index = 0
        self._in_schedule = True

    def _end_schedule(self) -> None:
        self._in_schedule = self._in_optimizer = False
        if self._is_open:
            self._close()

    def _before_instruction(self, name: str) -> int:
        slot = self._plan[self._index]
        if slot.name != name:
            raise AttachError(f"instruction {self._index} is {name}, but the schedule announced {slot.name}")
        if slot.opens is not None:
            return self._open(self._index, slot.opens)
        self._in_optimizer = slot.kind is InstructionKind.OPTIMIZER_STEP
        return self._clock_ns()

    def _after_instruction(self, begin_ns: int) -> None:
        index = self._index
        slot = self._plan[index]
        self._in_optimizer = False
        if slot.closes:
            end_ns = self._close()
        else:
            end_ns = self._clock_ns()
            if self._side_may_run_on and not self._is_open:
                self._stopped_late |= self._side.halt()
        self._index = index + 1
        if self._unread is None:
            self._items.append((slot.kind, index, begin_ns - self._base_ns, end_ns - self._base_ns))

    def _begin_collective(self, _tensor: Any, _op: Any = None, group: Any = None, async_op: bool = False) -> bool:
        """Open a bubble, if this waits for anybody. Its slots come after the loss's."""
        if async_op or (group is not None and group.size() < 2) or self._is_open:
            return False
        self._open(len(self._plan) + 1 + self._collectives, WaitKind.OPTIMIZER_STEP)
        self._collectives += 1
        return True

    def _begin_loss(self) -> None:
        engine = self._engine
        waits = engine.is_data_parallel or (engine.is_pipe_parallel and not engine.is_last_stage())
        self._loss_begin_ns = self._open(len(self._plan), WaitKind.LOSS) if waits else self._clock_ns()

    def _end_loss(self) -> None:
        end_ns = self._close() if self._is_open else self._clock_ns()
        if self._unread is None:
            begin_ns = self._loss_begin_ns
            item = (InstructionKind.LOSS, len(self._plan), begin_ns - self._base_ns, end_ns - self._base_ns)
            self._items.append(item)

    def _open(self, slot: int, wait: int) -> int:
        assert self._page is not None and self._publisher is not None
        clock = self._clock
        begin_ns = clock.open(self._step, slot, *planned_permit(self._page.words, self._step, slot))
        permit_ns = clock.permit_ns
        self._is_open = True
        self._side_may_run_on = False
        self._open_slot, self._open_wait = slot, wait
        start = BubbleStart(self._step, clock.epoch, slot, wait, clock.side_cpu_ns(), permit_ns)
        if permit_ns:
            self._side.wake()
        self._say(begin_ns, start)
        if self._is_time_to_tell(slot):
            self._told_step = self._step
            self._publisher.flush()
        return begin_ns

    def _is_time_to_tell(self, slot: int) -> bool:
        """Whether to wake the daemon now: once a step, in the bubble that it chose, or else in the next step's first.

        It wakes on the main job's core and in its caches.
        """
        assert self._page is not None
        silent_steps = self._step - self._told_step
        return silent_steps > 0 and (slot == self._page.words[Field.FLUSH_SLOT] or silent_steps > 1)

    def _close(self) -> int:
        clock = self._clock
        end_ns = clock.close()
        self._is_open = False
        assert self._page is not None
        stopped = False
        if self._unread is None:  # signals do not reach what a device runs
            preemptive = bool(self._page.words[Field.PREEMPTIVE])
            stopped = self._side.halt(let_end=not preemptive) or self._stopped_late
            self._stopped_late = False
            self._side_may_run_on = not preemptive
        end = BubbleEnd(self._step, clock.epoch, self._open_slot, self._open_wait, clock.side_cpu_ns(), stopped)
        self._say(end_ns, end)
        return end_ns

    def _say(self, stamp: int, message: Any) -> None:
        """Let `message` leave with the next flush; if its time is not known yet, with the first one after that."""
        assert self._publisher is not None
        unread = self._unread
        if unread is None:
            self._publisher.send_later(stamp, message)
            return
        unread.append((stamp, message))
        self._read_times(self._publisher)

    def _read_times(self, publisher: Publisher) -> None:
        unread = self._unread
        while unread and (t_ns := self._clock.time_ns(unread[0][0])) is not None:
            publisher.send_later(t_ns, unread.popleft()[1])
