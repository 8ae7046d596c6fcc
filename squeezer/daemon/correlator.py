"""Puts the main job's messages together: a start and its end are a step or a bubble. It decides and records nothing."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from ds_hooks.shared import wire
from squeezer.daemon.bubble_accounts import BubbleCounter, Shut
from squeezer.policy.events import BubbleEnded, Overran, StepEnded
from squeezer.policy.forecast import Forecast
from squeezer.records.facts import Bubble, Fact, Instructions, Job, Step

Found = Fact | StepEnded | BubbleEnded | Overran
"""What messages amount to: facts for the records, and events for the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenBubble:
    """A bubble that has begun."""

    message: wire.BubbleStart
    start_ns: int
    gap_ns: int | None
    forecast: Forecast | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenStep:
    """A step that has begun."""

    step: int
    start_ns: int
    squeezed: bool | None
    shut: Shut | None


class Correlator:
    """Follows one device's main jobs. Each method takes one message and returns what is known by it.

    Args:
        forecast_of: the policy's forecast for a slot and the gap before its bubble.
        host_measures: whether the main job's host sees a bubble's end, and measures what the side task uses beyond it.
            Else the host runs ahead of its device, and only the side task measures its overruns.

    Attributes:
        job: the index of the job that is followed; -1 before the first.
        bubble_ns: the length of all bubbles so far.
        dropped: how many messages the hooks say they could not send.
        counter: counts where that time goes.
    """

    def __init__(self, forecast_of: Callable[[int, int | None], Forecast | None], *, host_measures: bool) -> None:
        self._forecast_of = forecast_of
        self._host_measures = host_measures
        self.job = -1
        self.bubble_ns = 0
        self.dropped = 0
        self.counter = BubbleCounter()
        self._step: _OpenStep | None = None
        self._step_end: tuple[int, int] | None = None
        """(number, end) of the last step."""
        self._open: _OpenBubble | None = None
        self._ended: tuple[Bubble, Shut | None, int] | None = None
        """With why its step's bubbles are not for trials, and the side task's CPU time at its end."""
        self._last_end = (-1, 0)
        """(epoch, end) of the last bubble."""
        self._side_cpu_ns = 0
        self.counted_ns = 0
        """The side task's CPU time, also outside of bubbles, as far as the main job has said."""
        self._counted_until_ns: int | None = None
        self._opened_slot: int | None = None
        self._side_overruns_ns: Counter[int] = Counter()

    def job_attached(self, t_ns: int, message: wire.Hello, least_bubble_ns: int = 0) -> list[Found]:
        """A job begins. Shorter bubbles than `least_bubble_ns` are not worth opening on its device."""
        self.job += 1
        self._step = self._step_end = None
        self._last_end = (-1, 0)
        self._opened_slot = self._counted_until_ns = None
        return [Job(job=self.job, t_ns=t_ns, least_bubble_ns=least_bubble_ns, **message._asdict())]

    def job_lost(self) -> list[Found]:
        """The job is over. No next bubble will show by how much its last one was overrun."""
        found = self._complete_bubble(None)
        self._open = None
        return found

    def since_step_before(self, t_ns: int, step: int) -> int | None:
        """The time from the end of the step before `step` until `t_ns`; None: that end was not heard of."""
        if self._step_end is None or self._step_end[0] != step - 1:
            return None
        return t_ns - self._step_end[1]

    def step_started(
        self, t_ns: int, message: wire.StepStart, *, squeezed: bool | None, shut: Shut | None
    ) -> list[Found]:
        """A step begins.

        Args:
            t_ns: when.
            message: the hooks'.
            squeezed: None if the side task only starts in its bubbles or is due, or the guard has the gate shut.
            shut: why its bubbles are not for trials; None: they are.
        """
        self._step = _OpenStep(step=message.step, start_ns=t_ns, squeezed=squeezed, shut=shut)
        return []

    def step_ended(self, t_ns: int, message: wire.StepEnd) -> list[Found]:
        """A step has ended. It counts only if its start was heard of."""
        self.dropped = message.dropped
        self._step_end = (message.step, t_ns)
        begun = self._step
        if begun is None or begun.step != message.step:
            return []
        step = Step(
            job=self.job,
            step=message.step,
            start_ns=begun.start_ns,
            end_ns=t_ns,
            squeezed=begun.squeezed,
            work=message.work,
        )
        return [step, StepEnded(message.step, t_ns - begun.start_ns)]

    def bubble_started(self, t_ns: int, message: wire.BubbleStart) -> list[Found]:
        """A bubble begins, so the one before it is complete, and so is its overrun."""
        last_epoch, last_end_ns = self._last_end
        gap_ns = t_ns - last_end_ns if self._host_measures and message.epoch == last_epoch + 1 else None
        forecast = self._forecast_of(message.slot, gap_ns)
        found = self._complete_bubble(message.side_cpu_ns if message.side_cpu_ns >= 0 else None)
        if not self._host_measures:
            found += self._reported_overrun(message)
        self._count(message.side_cpu_ns)
        self._side_cpu_ns = message.side_cpu_ns
        self._open = _OpenBubble(message=message, start_ns=t_ns, gap_ns=gap_ns, forecast=forecast)
        return found

    def bubble_ended(self, t_ns: int, message: wire.BubbleEnd) -> list[Found]:
        """A bubble has ended. It counts only if its start was heard of."""
        self._count(message.side_cpu_ns)
        begun, self._open = self._open, None
        if begun is None or begun.message.epoch != message.epoch:
            return []
        self._last_end = (message.epoch, t_ns)
        length_ns = t_ns - begun.start_ns
        self.bubble_ns += length_ns
        start, forecast = begun.message, begun.forecast
        is_measured = message.side_cpu_ns >= 0
        step = self._step
        ended = Bubble(
            step=start.step,
            epoch=start.epoch,
            slot=start.slot,
            wait=wire.WaitKind(start.wait).name,
            start_ns=begun.start_ns,
            forecast_ns=None if forecast is None else (forecast.length_ns, forecast.low_ns, forecast.high_ns),
            permit_until_ns=begun.start_ns + start.permit_ns if start.permit_ns else None,
            end_ns=t_ns,
            squeezed=step.squeezed if step is not None else False,
            side_ns=max(0, message.side_cpu_ns - self._side_cpu_ns) if is_measured else None,
            main_ns=message.main_cpu_ns if message.main_cpu_ns >= 0 else None,
            stopped=bool(message.stopped),
            overrun_ns=None,
        )
        shut = step.shut if step is not None else Shut.ALONE
        self._ended = ended, shut, message.side_cpu_ns
        self._side_cpu_ns = message.side_cpu_ns
        may_be_late = not self._host_measures and start.permit_ns > 0
        return [BubbleEnded(message.slot, wire.WaitKind(message.wait).name, length_ns, begun.gap_ns, may_be_late)]

    def instructions(self, message: wire.Instructions) -> list[Found]:
        """A part of a step's instructions has run."""
        items = [
            (wire.InstructionKind(kind).name, slot, message.base_ns + begin_ns, message.base_ns + end_ns)
            for kind, slot, begin_ns, end_ns in message.items
        ]
        return [Instructions(step=message.step, items=tuple(items))]

    def side_task_overran(self, slot: int, overrun_ns: int) -> None:
        """The side task has measured an overrun. It counts when the next bubble begins."""
        self._side_overruns_ns[slot] += overrun_ns
        self.counter.overran(overrun_ns)

    def _count(self, side_cpu_ns: int) -> None:
        """Another process, or another job's hooks, begin anew."""
        if side_cpu_ns >= 0:
            if self._counted_until_ns is not None:
                self.counted_ns += max(0, side_cpu_ns - self._counted_until_ns)
            self._counted_until_ns = side_cpu_ns

    def _complete_bubble(self, side_cpu_ns: int | None) -> list[Found]:
        ended, self._ended = self._ended, None
        if ended is None:
            return []
        bubble, shut, until_ns = ended
        if side_cpu_ns is None:
            self.counter.bubble(bubble, shut, until_ns)
            return [bubble]
        overrun_ns = max(0, side_cpu_ns - self._side_cpu_ns)
        bubble = replace(bubble, overrun_ns=overrun_ns)
        self.counter.bubble(bubble, shut, until_ns)
        found: list[Found] = [bubble]
        if bubble.permit_until_ns is not None:
            found.append(Overran(bubble.slot, overrun_ns))
        return found

    def _reported_overrun(self, message: wire.BubbleStart) -> list[Found]:
        """The last opened bubble is over: what the side task has reported of its slot counts now."""
        slot, self._opened_slot = self._opened_slot, message.slot if message.permit_ns else None
        return [] if slot is None else [Overran(slot, self._side_overruns_ns.pop(slot, 0))]
