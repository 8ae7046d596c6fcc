"""What a side task asks before every unit of device work, and what it may be told.

A *unit* is the smallest piece of work that is never interrupted: one fused layer's forward or backward, the loss,
or a piece of the optimizer's step. Units are numbered; `Gate.use` names them.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ds_hooks.shared.signals import END_SIGNAL, WAKE_SIGNAL

GATE_SIGNALS = frozenset({WAKE_SIGNAL, END_SIGNAL})

HOST_UNIT = -1
"""The unit number of host work between layers: building models, bookkeeping. It asks the gate like any other, but its
length is not forecast, since the device can stop it anywhere."""


class StopRequested(BaseException):
    """The side task must end now: its supervisor asked, or is gone.

    Not an `Exception`, so that a study's own `except Exception` cannot swallow it.
    """


class GateError(BaseException):
    """The device refused a call, so the gate is shut for good; the message names the call and the reason.

    Not an `Exception`: no study can go on without its gate.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Starved:
    """A unit that is longer than all bubbles were while it waited; found by trying it.

    Attributes:
        unit: its name.
        trials: K.
        needs_ns: what it took of the device.
        longest_ns: what the longest of those bubbles gave it.
    """

    unit: str
    trials: int
    needs_ns: int
    longest_ns: int


class Gate(Protocol):
    """The side task's only view of the main job."""

    def use(self, units: Sequence[str], trials: int) -> None:
        """Declare the units that later `enter` calls number. Call it after a group was built or changed its K.

        Args:
            units: a name per unit, such as ``"0.Linear forward"``; the index in this list is the unit's number.
            trials: K, how many trials the group fuses. The same unit costs more with more trials.
        """

    def enter(self, unit: int) -> None:
        """Return when `unit` may start on the device; the unit that ran until now has ended.

        Raises:
            StopRequested: the side task must end.
        """

    def settle(self) -> None:
        """Return when what was entered has ended: the host is about to read a number from the device.

        Raises:
            StopRequested: the side task must end.
        """

    def rest(self) -> None:
        """The unit that ran until now has ended, and no device work follows before the next `enter`."""

    def take_starved(self) -> list[Starved]:
        """Units found too long for every bubble since the last call or the last change of units."""

    def add_work(self, trial_samples: int) -> None:
        """Count finished work where the daemon reads it."""

    def close(self) -> bool:
        """Write what is buffered.

        Returns:
            Whether the device no longer needs the page, so that it may be unmapped.
        """


class OpenGate:
    """A gate that never closes: training outside a pipeline, and the reference in tests."""

    def use(self, units: Sequence[str], trials: int) -> None:
        """Accept any units."""

    def enter(self, unit: int) -> None:
        """Return at once."""

    def settle(self) -> None:
        """Return at once."""

    def rest(self) -> None:
        """Return at once."""

    def take_starved(self) -> list[Starved]:
        """Return none: no bubble is too short."""
        return []

    def add_work(self, trial_samples: int) -> None:
        """Count nothing: nobody reads it."""

    def close(self) -> bool:
        """Return True: there is no page."""
        return True


def block_signals() -> None:
    """Block the gate's signals in this thread and all that it will start. Call it before importing torch."""
    signal.pthread_sigmask(signal.SIG_BLOCK, GATE_SIGNALS)
