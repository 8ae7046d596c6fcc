"""Actions: all that the policy can have done. The daemon carries them out."""

from dataclasses import dataclass

from squeezer.policy.guard import Decision


@dataclass(frozen=True, slots=True)
class ForgetPlan:
    """Another job: its slots are others."""


@dataclass(frozen=True, slots=True)
class PlanSlot:
    """Let the side task run for `permit_ns` from the start of each bubble of `slot`; 0: not at all.

    If the bubble lasts long enough, it may run again in each of the `renewals`: (from, until) in ns after its start.
    With `opens_before_ns`, all these times count from the end of the bubble before, and only a bubble that begins
    within `opens_before_ns` of that end is opened.
    """

    slot: int
    permit_ns: int
    renewals: tuple[tuple[int, int], ...] = ()
    opens_before_ns: int = 0


ONLY_RENEWALS_NS = 1
"""The permit of a bubble in which the side task may run only later; 0 would not open it."""


@dataclass(frozen=True, slots=True)
class PlanSteps:
    """Let the plan hold from `from_step` until before `until_step`, and for no other step."""

    from_step: int
    until_step: int


@dataclass(frozen=True, slots=True)
class FlushAt:
    """Have the main job send its messages in the bubbles of `slot`."""

    slot: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the side task by the device's own means (SIGSTOP)."""


@dataclass(frozen=True, slots=True)
class Continue:
    """Let the side task run on (SIGCONT), in case it is stopped."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End the side task's process at once, for `reason`; it is `DUE` then. Another one takes its trials over."""

    reason: str


@dataclass(frozen=True, slots=True)
class Start:
    """Start the side task's process again."""


@dataclass(frozen=True, slots=True)
class Note:
    """The guard has decided something: let it be known."""

    decision: Decision


Action = ForgetPlan | PlanSlot | PlanSteps | FlushAt | Stop | Continue | Kill | Start | Note

NO_STEPS = PlanSteps(0, 0)
