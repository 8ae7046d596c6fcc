"""Turns the main job's messages into the records of its steps and bubbles."""

from typing import Any

from ds_hooks.shared import wire
from squeezer.policy.forecast import Forecast
from squeezer.records.writer import Recorder


class Bookkeeper:
    """Notes jobs, steps, bubbles and instructions, each when all that belongs to it is known.

    Args:
        recorder: takes the records.
        knows_gaps: whether the main job knows at a bubble's begin when the one before has ended: not if it runs ahead
            of its device.
    """

    def __init__(self, recorder: Recorder, *, knows_gaps: bool) -> None:
        self._knows_gaps = knows_gaps
        self.gap_ns: int | None = None
        """How long after the end of the bubble before it the last one began; None: that is not known."""
        self._recorder = recorder
        self.job = -1
        """The index of the job that is recorded; -1 before the first."""
        self.bubble_ns = 0
        """All bubbles so far."""
        self.dropped = 0
        """What the hooks say they could not send."""
        self._bubble: dict[str, Any] | None = None
        self._ended_bubble: dict[str, Any] | None = None
        self._last_end = (-1, 0)
        """The epoch and the end of the last bubble."""
        self._side_cpu_ns = 0
        self._step: tuple[int, int, bool | None] | None = None

    def job_attached(self, t_ns: int, message: wire.Hello) -> None:
        """A job begins."""
        self.job += 1
        self._step = None
        self._last_end = (-1, 0)
        self._recorder.add("job", job=self.job, t_ns=t_ns, **message._asdict())

    def job_lost(self) -> None:
        """The job is over: no next bubble will tell what its last one overran."""
        self._note_bubble(None)
        self._bubble = None

    def step_started(self, t_ns: int, message: wire.StepStart, *, squeezed: bool | None) -> None:
        """A step begins; `squeezed` is None if the side task only starts in its bubbles."""
        self._step = (message.step, t_ns, squeezed)

    def step_ended(self, t_ns: int, message: wire.StepEnd) -> int | None:
        """A step has ended.

        Returns:
            How long it took in ns, or None if its start was lost.
        """
        self.dropped = message.dropped
        if self._step is None or self._step[0] != message.step:
            return None
        step, start_ns, squeezed = self._step
        times = {"start_ns": start_ns, "end_ns": t_ns}
        self._recorder.add("step", job=self.job, step=step, **times, squeezed=squeezed, work=message.work)
        return t_ns - start_ns

    def bubble_began(self, t_ns: int, epoch: int) -> int | None:
        """The bubble of `epoch` begins. Returns its `gap_ns`, which is not known if the end before it was lost."""
        last_epoch, last_end_ns = self._last_end
        self.gap_ns = t_ns - last_end_ns if self._knows_gaps and epoch == last_epoch + 1 else None
        return self.gap_ns

    def bubble_started(self, t_ns: int, message: wire.BubbleStart, forecast: Forecast | None) -> tuple[int, int] | None:
        """A bubble began, of which `forecast` was made.

        Returns:
            (slot, overrun in ns) of the bubble before it, if that was opened.
        """
        overran = self._note_bubble(message.side_cpu_ns if message.side_cpu_ns >= 0 else None)
        self._side_cpu_ns = message.side_cpu_ns
        self._bubble = {
            "step": message.step,
            "epoch": message.epoch,
            "slot": message.slot,
            "wait": wire.WaitKind(message.wait).name,
            "start_ns": t_ns,
            "forecast_ns": None if forecast is None else [forecast.length_ns, forecast.low_ns, forecast.high_ns],
            "permit_until_ns": t_ns + message.permit_ns if message.permit_ns else None,
        }
        return overran

    def bubble_ended(self, t_ns: int, message: wire.BubbleEnd) -> int | None:
        """A bubble has ended. Returns its length in ns, or None if its start was lost."""
        bubble, self._bubble = self._bubble, None
        if bubble is None or bubble["epoch"] != message.epoch:
            return None
        self._last_end = (message.epoch, t_ns)
        length_ns: int = t_ns - bubble["start_ns"]
        self.bubble_ns += length_ns
        squeezed = self._step[2] if self._step is not None else False
        told = message.side_cpu_ns >= 0
        side_ns = max(0, message.side_cpu_ns - self._side_cpu_ns) if told else None
        stopped = bool(message.stopped)
        self._ended_bubble = {**bubble, "end_ns": t_ns, "squeezed": squeezed, "side_ns": side_ns, "stopped": stopped}
        self._side_cpu_ns = message.side_cpu_ns
        return length_ns

    def instructions(self, message: wire.Instructions) -> None:
        """When a part of a step's instructions ran."""
        items = [
            [wire.InstructionKind(kind).name, slot, message.base_ns + begin_ns, message.base_ns + end_ns]
            for kind, slot, begin_ns, end_ns in message.items
        ]
        self._recorder.add("instructions", step=message.step, items=items)

    def _note_bubble(self, side_cpu_ns: int | None) -> tuple[int, int] | None:
        bubble, self._ended_bubble = self._ended_bubble, None
        if bubble is None:
            return None
        overrun_ns = None if side_cpu_ns is None else max(0, side_cpu_ns - self._side_cpu_ns)
        self._recorder.add("bubble", **bubble, overrun_ns=overrun_ns)
        if overrun_ns is None or bubble["permit_until_ns"] is None:
            return None
        return bubble["slot"], overrun_ns
