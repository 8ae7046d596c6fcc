"""The gate protocol: what a side task asks before every unit of device work.

A *unit* is the smallest piece of work that runs without asking again: the forward or backward of one fused layer, the
loss, or a piece of the optimizer's step. Units have numbers, which `Gate.use` names.
"""

import mmap
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ds_hooks.shared.processes.signals import END_SIGNAL, WAKE_SIGNAL

GATE_SIGNALS = frozenset({WAKE_SIGNAL, END_SIGNAL})

HOST_UNIT = -1
"""The unit number of host work between layers, such as building models. It asks the gate like any other unit, but its
length is not forecast."""

GRAPH_UNITS = "graph of "
"""How the names of units begin that stand for many others, which are there instead if bubbles are too short."""

AUDIT_UNITS = "audit "
"""How the names of units begin that are an audit's, and train nothing."""

SPARED_UNITS = AUDIT_UNITS, GRAPH_UNITS
"""No group is split because one of these is too long for every bubble."""


EXCLUSIVE_FINISHES_S = 20.0
"""How long a side task without a main job may take to finish its work when it is asked to end."""


class StopRequested(BaseException):
    """The side task must end now: its supervisor asked for that, or is gone.

    Not an `Exception`, so that a study's own `except Exception` cannot swallow it.
    """


class GateError(BaseException):
    """The device refused a call, so the gate is shut for good. The message names the call and the reason.

    Not an `Exception`, because no study can continue without its gate.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Starved:
    """A unit that ran longer than every bubble that came while it waited.

    Attributes:
        unit: its name.
        trials: K.
        needs_ns: the device time that it took.
        longest_ns: the time that the longest of those bubbles left it.
    """

    unit: str
    trials: int
    needs_ns: int
    longest_ns: int


class Gate(Protocol):
    """The side task's only view of the main job.

    Attributes:
        finishes: whether the work in progress would be lost if it were left in the middle. If the side task is asked to
            end then, `StopRequested` waits for a moment; the gate says whether anything may run meanwhile.
    """

    finishes: bool

    def use(self, units: Sequence[str], trials: int) -> None:
        """Declare the units that later `enter` calls number. Call it after a group was built or changed its K.

        Args:
            units: a name per unit, such as ``"0.Linear forward"``; the index in this list is the unit's number.
            trials: K, how many trials the group fuses. The same unit costs more with more trials.
        """

    def enter(self, unit: int) -> None:
        """Wait until `unit` may start on the device. The unit that was entered before has ended, or has been queued.

        Raises:
            StopRequested: the side task must end.
        """

    def settle(self) -> None:
        """Wait until everything entered has ended, because the host is about to read a number from the device.

        Raises:
            StopRequested: the side task must end.
        """

    def expect(self, unit: int, cost_ns: float) -> None:
        """Forecast that `unit` takes `cost_ns` on the device, whatever it took before."""

    def fits(self, needs_ns: float) -> bool:
        """Whether pieces of work of `needs_ns` each could use most of the time of the last bubbles."""

    def rest(self) -> None:
        """End the last unit. No device work follows before the next `enter`."""

    def take_starved(self) -> list[Starved]:
        """Return the units found too long for every bubble since the last call or the last `use`."""

    def add_work(self, trial_samples: int) -> None:
        """Count finished work for the daemon, in trials × examples."""

    def busy_ns(self) -> int:
        """Return the device time that this process has used, up to the last unit that has ended at least."""

    def is_alone(self) -> bool:
        """Return whether no main job needs the device: a side task that must end may still save its trials then."""

    def close(self) -> bool:
        """Write what is buffered.

        Returns:
            Whether the device no longer needs the page, so that it may be unmapped.
        """


class OpenGate:
    """A gate that never closes, for training outside a pipeline and as the reference in tests."""

    finishes = False

    def use(self, units: Sequence[str], trials: int) -> None:
        """Accept any units."""

    def enter(self, unit: int) -> None:
        """Return at once."""

    def settle(self) -> None:
        """Return at once."""

    def expect(self, unit: int, cost_ns: float) -> None:
        """Accept any cost."""

    def fits(self, needs_ns: float) -> bool:
        """Return True: there is no end of a bubble."""
        return True

    def rest(self) -> None:
        """Return at once."""

    def take_starved(self) -> list[Starved]:
        """Return none: no bubble is too short."""
        return []

    def add_work(self, trial_samples: int) -> None:
        """Count nothing."""

    def busy_ns(self) -> int:
        """Return the CPU time of this process."""
        return time.process_time_ns()

    def is_alone(self) -> bool:
        """Return True: there is no main job."""
        return True

    def close(self) -> bool:
        """Return True: there is no page."""
        return True


class ExclusiveGate(OpenGate):
    """The gate of a device without a main job: always open, but a side task that is asked to end stops there."""

    def __init__(self) -> None:
        self._until_s: float | None = None
        self._entered = memoryview(mmap.mmap(-1, 8)).cast("q")

    def entered(self) -> int:
        """Return how many units have begun, also in a process that was forked before."""
        return self._entered[0]

    def enter(self, unit: int) -> None:
        """See `Gate.enter`."""
        self._entered[0] += 1
        if END_SIGNAL in signal.sigpending():
            now_s = time.monotonic()
            if self._until_s is None:
                self._until_s = now_s + EXCLUSIVE_FINISHES_S
            if not self.finishes or now_s > self._until_s:
                raise StopRequested


def block_signals() -> None:
    """Block the gate's signals in this thread and in all that it starts later. Call it before importing torch."""
    signal.pthread_sigmask(signal.SIG_BLOCK, GATE_SIGNALS)
