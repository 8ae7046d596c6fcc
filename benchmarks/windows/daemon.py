"""The daemon of `bubble_utilization`, which squeezes in the benchmark's gated windows and no others.

It squeezes preemptively or cooperatively as the window says, and puts its forecasts on the page for the baseline
`step_grain`. Started as `python -m benchmarks.windows.daemon squeezer daemon …`.
"""

import sys
from dataclasses import replace
from unittest import mock

import squeezer.daemon.loop
from benchmarks.windows.modes import GATED, IDLE, PLACEBOS, PREEMPTIVE, Windows
from ds_hooks.shared.page.layout import Field, Preemption
from squeezer.cli import main
from squeezer.daemon.loop import Daemon
from squeezer.policy.actions import Action, PlanSlot
from squeezer.policy.events import BubbleEnded, Event, StepStarted
from squeezer.policy.state import GateMachine, Policy

FORECASTS = 2048
"""The plan's words from this slot on hold the forecasts of slots from 0 on, and whether they count from the end of the
bubble before: no step here has so many instructions."""


class WindowedMachine(GateMachine):
    """The daemon's decisions, except that the benchmark's windows decide which steps are squeezed.

    The mode changes in steps without squeezing, in which every slot is planned anew.
    """

    def __init__(self, policy: Policy) -> None:
        self._windows = Windows.of_environment()
        self._gated = PREEMPTIVE
        self._forecasts_ns: dict[int, int] = {}
        super().__init__(policy)

    @property
    def preemption(self) -> int:
        """What happens to the side task at the end of bubbles of the step that began last."""
        if not self.policy.preemptive:
            return Preemption.NONE
        is_idle = self._windows.locate(self._step_number).mode == IDLE
        return Preemption.IDLE_CLASS if is_idle else Preemption.STOP

    def is_squeezed(self, step: int) -> bool:
        """See `GateMachine.is_squeezed`."""
        return self._windows.locate(step).mode in (*GATED, *PLACEBOS)

    def handle(self, event: Event) -> list[Action]:
        """See `GateMachine.handle`."""
        if isinstance(event, StepStarted) and not self.is_squeezed(event.step):
            gated = self._windows.next_gated(event.step)
            if gated != self._gated:
                self._gated = gated
                self._plans = dict.fromkeys(self._plans)  # plan all of them again
            self.policy = replace(self.policy, preemptive=gated == PREEMPTIVE)
        actions = super().handle(event)
        if isinstance(event, BubbleEnded):
            actions = [*actions, *self._told(event.slot)]
        return actions

    def _told(self, slot: int) -> list[Action]:
        """The forecast of a slot, if it has changed."""
        end = self.forecast.end(slot)
        forecast_ns = self.forecast.length_ns(slot) if end is None else end.length_ns
        if forecast_ns is None or self._forecasts_ns.get(slot) == forecast_ns:
            return []
        self._forecasts_ns[slot] = forecast_ns
        return [PlanSlot(FORECASTS + slot, forecast_ns, (), int(end is not None))]


class WindowedDaemon(Daemon):
    """The daemon, which also passes the mode on to the main job."""

    _machine: WindowedMachine

    def _feed(self, event: Event) -> None:
        super()._feed(event)
        self._choose_preemption()

    def _choose_preemption(self) -> None:
        self._page.words[Field.PREEMPTIVE] = self._machine.preemption


if __name__ == "__main__":
    with (
        mock.patch.object(squeezer.daemon.loop, "GateMachine", WindowedMachine),
        mock.patch.object(squeezer.daemon.loop, "Daemon", WindowedDaemon),
    ):
        sys.exit(main(sys.argv[2:]))  # after "squeezer", by which the launcher recognizes its daemons
