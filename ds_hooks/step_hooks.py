"""The hooks of a step: what happens before and after each instruction, and what is written and sent then.

`instrument` calls them several hundred times a step, so each must stay within microseconds. They may raise;
`instrument` catches.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_hooks.connection import Connection
from ds_hooks.engine import AttachError
from ds_hooks.schedule import NumberedSlots, SlotNumbers, Waits
from ds_hooks.shared.page.layout import Field, Preemption, SideActivity
from ds_hooks.shared.page.plan import is_planned, planned_permit
from ds_hooks.shared.wire import (
    INSTRUCTIONS_PER_MESSAGE,
    BubbleEnd,
    BubbleStart,
    InstructionKind,
    Instructions,
    Message,
    StepEnd,
    StepStart,
    WaitKind,
)

SPARED = {
    Preemption.NONE: (SideActivity.UNIT,),
    Preemption.STOP: (),
    Preemption.IDLE_CLASS: (SideActivity.UNIT, SideActivity.HOST),
}
"""In what a side task may be to run on at a bubble's end."""
RUNS_ON_NS = 1_000_000
"""A stop takes effect within 0.1 ms. A side task that has used more than this since then was continued by others."""


@dataclass(eq=False, slots=True)
class Steps:
    """Counts the steps of one engine since `attach`, with hooks or without. It knows no engine."""

    begun: int = 0


class StepHooks:
    """Finds the bubbles of each step, opens and closes them, and reports them.

    Args:
        engine: the pipeline engine, as `engine.check_engine` accepts it.
        waits: which of its instructions wait.
        connection: to the device's page and daemon.
        steps: the engine's, which have these numbers.
    """

    def __init__(self, engine: Any, waits: Waits, connection: Connection, steps: Steps) -> None:
        self.in_schedule = False
        """Instructions run now that belong to a step."""
        self.in_optimizer = False
        """The optimizer's instruction runs now."""
        self._engine = engine
        self._words = connection.words
        self._clock = clock = connection.clock
        self._clock_ns = time.monotonic_ns
        self._side = connection.side
        self._sender = sender = connection.sender
        # a stamp that is a time need not wait
        self._send: Callable[[int, Message], None] = (
            sender.send_later if clock.follows_host else connection.pending.send
        )
        self._times_instructions = clock.follows_host
        self._numbers = SlotNumbers(waits)
        self._numbered = NumberedSlots((), 0, [])
        self._slots, self._first_slot = self._numbered.order, 0
        self._index = 0
        self._steps = steps
        self._step = steps.begun
        # in which the plan may still be of the engine before, which has steps of the same numbers
        self._unplanned_step = steps.begun + 1 if connection.has_served else 0
        self._awaits_schedule = False
        self._step_begin = 0  # a stamp
        self._loss_begin_ns = 0
        self._is_open = False
        self._open_slot = 0
        self._open_wait = 0
        self._collectives = 0
        self._flushed_step = 0
        self._side_may_run_on = False
        self._stopped_late = False
        self._side_cpu_ns = 0  # at the end of the last bubble, or when it was stopped since
        self._main_cpu_ns = 0  # at the begin of the last bubble
        self._items: list[tuple[int, int, int, int]] = []

    def begin_step(self, *_: Any) -> None:
        """Before `train_batch`."""
        self._steps.begun += 1
        self._step = self._steps.begun
        self._collectives = 0
        self._awaits_schedule = True
        self._step_begin = self._clock.begin_step()
        if self._may_be_stopped() and not self._is_planned():
            self._stop()
        self._sender.repeat_hello()
        self._send(self._step_begin, StepStart(self._step))

    def end_step(self) -> None:
        """After `train_batch`."""
        self._awaits_schedule = False
        if self._is_open:
            self.close_bubble()
        items, self._items = self._items, []
        for first in range(0, len(items), INSTRUCTIONS_PER_MESSAGE):
            part = tuple(items[first : first + INSTRUCTIONS_PER_MESSAGE])
            self._send(self._step_begin, Instructions(self._step, self._step_begin, part))
        dropped = self._sender.dropped
        self._words[Field.DROPPED] = dropped
        self._send(self._clock.stamp(), StepEnd(self._step, dropped, self._words[Field.WORK]))
        self._clock.end_step(self._step)

    def begin_schedule(self, schedule: Any) -> None:
        """Before the instructions of `schedule`. An evaluation's are left alone, its waits too."""
        self.in_schedule = self.in_optimizer = False  # what interrupts a hook, such as Ctrl-C, may have left them
        if not self._awaits_schedule:
            if self._may_be_stopped():
                self._stop()
            return
        self._awaits_schedule = False
        numbered = self._numbered = self._numbers.of(schedule)
        self._slots, self._first_slot = numbered.order, numbered.first
        self._index = 0
        self.in_schedule = True

    def end_schedule(self) -> None:
        """After the last instruction."""
        self.in_schedule = self.in_optimizer = False
        if self._is_open:
            self.close_bubble()

    def before_instruction(self, name: str) -> int:
        """Before the next instruction, of class `name`. Returns its begin's stamp.

        Raises:
            AttachError: the schedule has another instruction here.
        """
        slot = self._slots[self._index]
        if slot.name != name:
            raise AttachError(f"instruction {self._index} is {name}, but the schedule announced {slot.name}")
        if slot.opens is not None:
            return self._open_bubble(self._first_slot + self._index, slot.opens)
        self.in_optimizer = slot.kind is InstructionKind.OPTIMIZER_STEP
        return self._clock_ns()

    def after_instruction(self, begin_ns: int) -> None:
        """After that instruction."""
        index = self._index
        slot = self._slots[index]
        self.in_optimizer = False
        if slot.closes:
            end_ns = self.close_bubble()
        else:
            end_ns = self._clock_ns()
            if self._side_may_run_on and not self._is_open:
                self._stopped_late |= self._side.halt()
        self._index = index + 1
        if self._times_instructions:
            self._items.append((slot.kind, index, begin_ns - self._step_begin, end_ns - self._step_begin))

    def begin_collective(self, _tensor: Any, _op: Any = None, group: Any = None, async_op: bool = False) -> bool:
        """Before an all-reduce inside the optimizer's instruction. Returns whether a bubble opened.

        Its slots come after the loss's. It is no bubble if it has no peer to wait for.
        """
        if async_op or (group is not None and group.size() < 2) or self._is_open:
            return False
        slot = self._numbers.of_collective(self._numbered, self._collectives)
        self._open_bubble(slot, WaitKind.OPTIMIZER_STEP)
        self._collectives += 1
        return True

    def begin_loss(self) -> None:
        """Before the loss is broadcast. Its slot comes after the last instruction's."""
        engine = self._engine
        waits = engine.is_data_parallel or (engine.is_pipe_parallel and not engine.is_last_stage())
        slot = self._first_slot + len(self._slots)
        self._loss_begin_ns = self._open_bubble(slot, WaitKind.LOSS) if waits else self._clock_ns()

    def end_loss(self) -> None:
        """After the loss is there."""
        end_ns = self.close_bubble() if self._is_open else self._clock_ns()
        if self._times_instructions:
            begin_ns = self._loss_begin_ns - self._step_begin
            self._items.append((InstructionKind.LOSS, len(self._slots), begin_ns, end_ns - self._step_begin))

    def close_bubble(self) -> int:
        """The wait is over. Returns its end's stamp."""
        clock = self._clock
        end_ns = clock.close()
        main_cpu_ns = clock.main_cpu_ns()
        preemption = self._words[Field.PREEMPTIVE]
        if preemption == Preemption.IDLE_CLASS and not self._is_planned():
            preemption = Preemption.STOP
        stopped = self._side.halt(SPARED.get(preemption, ())) or self._stopped_late
        self._stopped_late = False
        self._side_may_run_on = preemption == Preemption.NONE
        self._side_cpu_ns = clock.side_cpu_ns()
        used_ns = main_cpu_ns - self._main_cpu_ns if main_cpu_ns >= 0 else -1
        end = BubbleEnd(self._step, clock.epoch, self._open_slot, self._open_wait, self._side_cpu_ns, used_ns, stopped)
        self._is_open = False  # not earlier: what interrupts this, such as Ctrl-C, leaves it to the end of the schedule
        self._send(end_ns, end)
        return end_ns

    def leave(self) -> None:
        """Another engine takes the connection, perhaps in the middle of a step."""
        if self._is_open:
            self.close_bubble()
        if self._may_be_stopped():
            self._stop()

    def _may_be_stopped(self) -> bool:
        """Whether the side task may be stopped anywhere. One no longer left to the idle class may still run."""
        return self._words[Field.PREEMPTIVE] != Preemption.NONE

    def _is_planned(self) -> bool:
        """Whether any bubble of this step may be opened."""
        return self._step != self._unplanned_step and is_planned(self._words, self._step)

    def _stop(self) -> None:
        """Stop the side task outside of a bubble."""
        self._note_running_on(side_cpu_ns := self._clock.side_cpu_ns())
        self._stopped_late |= self._side.halt()
        self._side_cpu_ns = side_cpu_ns

    def _note_running_on(self, side_cpu_ns: int) -> None:
        if side_cpu_ns - self._side_cpu_ns > RUNS_ON_NS:
            self._side.has_run_on()

    def _open_bubble(self, slot: int, wait: int) -> int:
        clock = self._clock
        self._is_open = True
        is_planned = self._step != self._unplanned_step
        begin_ns = clock.open(
            self._step, slot, *planned_permit(self._words, self._step, slot) if is_planned else (0, 0)
        )
        self._main_cpu_ns = clock.main_cpu_ns()
        permit_ns = clock.permit_ns
        self._side_may_run_on = False
        self._open_slot, self._open_wait = slot, wait
        side_cpu_ns = clock.side_cpu_ns()
        self._note_running_on(side_cpu_ns)
        start = BubbleStart(self._step, clock.epoch, slot, wait, side_cpu_ns, permit_ns)
        if permit_ns:
            self._side.wake()
        self._send(begin_ns, start)
        if self._is_time_to_flush(slot):
            self._flushed_step = self._step
            self._sender.flush()
        return begin_ns

    def _is_time_to_flush(self, slot: int) -> bool:
        """Whether to send now: once a step, at the slot that the daemon chose, else at the next step's first bubble.

        The daemon then wakes on the main job's core and takes from its caches.
        """
        silent_steps = self._step - self._flushed_step
        return silent_steps > 0 and (slot == self._words[Field.FLUSH_SLOT] or silent_steps > 1)
