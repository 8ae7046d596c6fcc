"""Events: all that the policy learns of the main job and of the side task's process."""

from dataclasses import dataclass
from enum import Enum


class Side(Enum):
    """The side task's process, as far as the gate cares."""

    NONE = "no process"
    DUE = "no process; another one starts once a main job is heard"
    STARTING = "imports and builds; does not ask the gate yet, so the main job halts it at every bubble's end"
    READY = "asks the gate"


@dataclass(frozen=True, slots=True)
class JobAttached:
    """Hooks said hello.

    Attributes:
        late_ns: they open and close a bubble up to this long after its true bounds.
        seed: of the draw of alone steps; the same for all ranks of the job.
        least_bubble_ns: shorter bubbles are not worth opening on this device, whatever the configuration says.
    """

    late_ns: int = 0
    seed: int = 0
    least_bubble_ns: int = 0


@dataclass(frozen=True, slots=True)
class JobLost:
    """The main job's process is gone."""


@dataclass(frozen=True, slots=True)
class JobLeft:
    """The hooks have left; their process lives and computes."""


@dataclass(frozen=True, slots=True)
class JobSilent:
    """A living main job has not been heard for `GateMachine.patience_ns`, and again for every second after that.

    Attributes:
        stopped: whether the side task is stopped, or left to idle time outside of a bubble, maybe with a lock that the
            main job waits for.
        asleep: whether it sleeps at its gate.
    """

    stopped: bool
    asleep: bool


@dataclass(frozen=True, slots=True)
class StepStarted:
    """The main job has begun `step` (counted from 1), `gap_ns` after the end of the one before; None: unknown."""

    step: int
    gap_ns: int | None = None


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The step that began last has ended, after `duration_ns`."""

    step: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class Overran:
    """The side task used `overrun_ns` of CPU time between the end of an opened bubble of `slot` and the next bubble."""

    slot: int
    overrun_ns: int


@dataclass(frozen=True, slots=True)
class BubbleEnded:
    """A bubble of `slot` was `length_ns` long. It began `gap_ns` after the end of the one before; None: unknown.

    Attributes:
        may_be_late: the side task could run in it, on a device on which that can delay the end.
    """

    slot: int
    wait: str
    length_ns: int
    gap_ns: int | None = None
    may_be_late: bool = False


@dataclass(frozen=True, slots=True)
class SideChanged:
    """The side task's process started, became ready, or ended."""

    side: Side


@dataclass(frozen=True, slots=True)
class SideBarred:
    """The device has no room for a side task, for `reason`; empty: it has again."""

    reason: str


Event = (
    JobAttached
    | JobLeft
    | JobLost
    | JobSilent
    | StepStarted
    | StepEnded
    | Overran
    | BubbleEnded
    | SideChanged
    | SideBarred
)
