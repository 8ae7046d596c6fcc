"""The daemon's decisions: a pure machine that takes events and returns actions.

It never acts during a bubble. It plans ahead how long the side task may run in the bubbles of each slot, and in which
steps; the main job opens and closes bubbles by this plan without asking. `squeezer.daemon.loop` feeds the events and
carries out the actions. The table at the end lists what each event does in each state. Anything else is an error with
the machine's story. `python -m squeezer.policy.state` prints the table as the diagram in docs/architecture.md.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from squeezer.policy.actions import (
    NO_STEPS,
    ONLY_RENEWALS_NS,
    Action,
    Continue,
    FlushAt,
    ForgetPlan,
    Kill,
    Note,
    PlanSlot,
    PlanSteps,
    Start,
    Stop,
)
from squeezer.policy.alone_steps import Draw
from squeezer.policy.events import (
    BubbleEnded,
    Event,
    JobAttached,
    JobLeft,
    JobLost,
    JobSilent,
    Overran,
    Side,
    SideBarred,
    SideChanged,
    StepEnded,
    StepStarted,
)
from squeezer.policy.forecast import LONGEST_NS, Forecast, SlotForecast
from squeezer.policy.guard import Decision, Guard
from squeezer.policy.margins import LEAST_MARGIN_NS

STORY_LENGTH = 64
AHEAD_STEPS = 3
"""A plan holds for the latest step and this many more, so that squeezing ends soon after the daemon falls silent."""
PATIENCE_NS = 5_000_000_000
PATIENCE_STEPS = 10
"""A main job that is silent for longer than both may wait for a lock that a stopped side task holds."""
FIRST_PATIENCE_NS = 60_000_000_000
"""The same before the end of a job's first step, whose length nobody knows."""
RECENT_STEPS = 8
FLUSH_ELSEWHERE = 1.25
"""The daemon wakes in the longest bubble; another slot's must be longer by this factor to take its place."""


class State(Enum):
    """Where the gate of one device stands."""

    ABSENT = "no main job: no bubble, so nothing to plan"
    SHUT = "a main job, and no plan for its next steps: it opens no bubble"
    PLANNED = "the main job opens the bubbles of its next steps by the plan"


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What the machine decides by. See `config` for the meaning of each."""

    draw: Draw
    margin_ns: int
    min_bubble_ns: int
    forecast_quantile: float
    preemptive: bool
    kinds: frozenset[str]
    slowdown_budget: float
    retry_steps: int


class TransitionError(Exception):
    """An event in a state that does not expect it, or a state that it must not lead to: a fault of this program."""


class GateMachine:
    """The gate of one device."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.forecast = SlotForecast(policy.forecast_quantile)
        self.guard = Guard(policy.slowdown_budget, policy.retry_steps, policy.margin_ns)
        self._seed = 0
        self._drawn: dict[int, bool] = {}
        """Of each block near the latest step: whether it is left alone."""
        self.squeezed: bool | None = False
        """Of the step that began last: squeezed, left alone, or neither (the side task starts or is due, or the guard
        has the gate shut)."""
        self._step_number = 0
        self._duration_ns = 0  # of the step that began last; 0: it has not ended, or that was not heard
        self._recent_steps_ns: deque[int] = deque(maxlen=RECENT_STEPS)
        self._releasing = False
        """A silent main job's side task was let run to its gate."""
        self._waits_for_main = False
        """No process starts until the main job is heard again."""
        self.is_barred = False
        """No process runs or starts: see `SideBarred`."""
        self._late_ns, self._least_bubble_ns = 0, policy.min_bubble_ns
        self.state = State.ABSENT
        self.side = Side.NONE
        self._story: deque[tuple[State, Event, State, list[Action]]] = deque(maxlen=STORY_LENGTH)
        self.steps = NO_STEPS
        self._plans: dict[int, PlanSlot | None] = {}
        self._flush_slot = -1

    def handle(self, event: Event) -> list[Action]:
        """Take one event.

        Raises:
            TransitionError: the table has no entry for it, or the entry does not name the state that it led to. The
                message ends with the story.
        """
        entry = TABLE.get((self.state, type(event)))
        if entry is None:
            raise TransitionError(f"{type(event).__name__} in state {self.state.name}{self.story()}")
        before = self.state
        actions = entry.run(self, event)
        self._story.append((before, event, self.state, actions))
        if self.state not in entry.leads_to:
            allowed = ", ".join(state.name for state in entry.leads_to)
            raise TransitionError(
                f"{type(event).__name__} in state {before.name} led to {self.state.name}; allowed: {allowed}"
                f"{self.story()}"
            )
        return actions

    @property
    def patience_ns(self) -> int:
        """How long a main job may be silent before `JobSilent`."""
        if not self._recent_steps_ns:
            return FIRST_PATIENCE_NS
        return max(PATIENCE_NS, PATIENCE_STEPS * max(self._recent_steps_ns))

    def story(self) -> str:
        """The latest events and the answers to them, for errors."""
        lines = [f"{before.name} {event} -> {after.name} {actions}" for before, event, after, actions in self._story]
        return "; the story so far:\n  " + "\n  ".join(lines)

    def validate(self) -> None:
        """Check what must hold between events; called in the teardown of every test.

        Raises:
            TransitionError: an invariant is broken.
        """
        wrong = []
        if (self.state is State.PLANNED) != (self.steps != NO_STEPS):
            wrong.append("steps are planned if and only if the state says so")
        if not self._has_side and self.state is State.PLANNED:
            wrong.append("no process: nothing to plan for")
        if not self.guard.allows and self.state is State.PLANNED:
            wrong.append("the guard has the gate shut")
        if self.steps.until_step - self.steps.from_step > AHEAD_STEPS + 1:
            wrong.append("a plan is short, so that a silent daemon ends the squeezing")
        if wrong:
            raise TransitionError("; ".join(wrong) + self.story())

    # What happens at each entry of the table.

    def _attach(self, event: Event) -> list[Action]:
        assert isinstance(event, JobAttached)
        self._late_ns = event.late_ns
        self._least_bubble_ns = max(self.policy.min_bubble_ns, event.least_bubble_ns)
        self.forecast.forget()
        self._plans.clear()
        self._flush_slot = -1
        self.guard.forget()
        self._seed = event.seed
        self._drawn.clear()
        self._duration_ns = 0
        self._recent_steps_ns.clear()
        self._releasing = self._waits_for_main = False
        self.squeezed = False
        self.steps = NO_STEPS
        self.state = State.SHUT
        return [ForgetPlan(), *self._start_if_due()]

    def _lose(self, _event: Event) -> list[Action]:
        actions = self._forget_job()
        self._waits_for_main = False
        # no bubble will end any more: a side task stopped at the end of one would stay stopped
        return [*actions, Continue()] if self._has_side else actions

    def _leave(self, _event: Event) -> list[Action]:
        """Let nothing run beside that job which does not ask the gate. What asks it may wait for the next job."""
        actions = self._forget_job()
        self._waits_for_main = True
        return [*actions, Kill("the hooks left while it was starting")] if self.side is Side.STARTING else actions

    def _forget_job(self) -> list[Action]:
        actions = self._plan(NO_STEPS)
        self.state = State.ABSENT
        self._recent_steps_ns.clear()
        self._releasing = False
        return actions

    def _silent(self, event: Event) -> list[Action]:
        """Let a stopped side task run to its gate, so that it releases its locks; kill one that cannot get there."""
        assert isinstance(event, JobSilent)
        if self.side is Side.READY and not self._releasing:
            self._releasing = event.stopped
            return [Continue()] if event.stopped else []
        if self._has_side and (event.stopped or (self._releasing and not event.asleep)):
            self._waits_for_main = True
            return [Kill("the main job may wait for a lock that it holds")]
        self._releasing = False
        return []

    def _step(self, event: Event) -> list[Action]:
        assert isinstance(event, StepStarted)
        decisions: list[Decision] = []
        if event.gap_ns is not None and self._duration_ns and event.step == self._step_number + 1:
            decisions = self.guard.next_began(self._step_number, event.gap_ns, self.squeezed)
        self._step_number, self._duration_ns = event.step, 0
        self._releasing = self._waits_for_main = False
        self.squeezed = False
        if self.is_squeezed(event.step) and self.side is not Side.NONE:
            self.squeezed = True if self.side is Side.READY and self.guard.allows else None
        elif self.steps.from_step <= event.step < self.steps.until_step:
            self.squeezed = None  # planned for a side task that has become ready since
        return [*map(Note, decisions), *self._plan(self._steps_from(event.step)), *self._start_if_due()]

    def is_squeezed(self, step: int) -> bool:
        """Whether `step` (counted from 1) may be squeezed: the draw decides, once per block and before it is planned.

        With `preemptive`, all steps may be while a side task starts: there is nothing to compare yet.
        """
        if self.side is Side.STARTING and self.policy.preemptive:
            return True
        block = self.policy.draw.block_of(step)
        if block not in self._drawn:
            if len(self._drawn) > AHEAD_STEPS + 1:
                del self._drawn[next(iter(self._drawn))]  # the oldest
            dense = self.side is Side.READY and self.guard.wants_more
            halvings = self.guard.halvings if self.side is Side.READY else 0
            self._drawn[block] = self.policy.draw.is_alone(block, self._seed, dense=dense, halvings=halvings)
        return not self._drawn[block]

    def _steps_from(self, step: int) -> PlanSteps:
        """Of `step` and the steps that may be planned ahead, the first ones in a row that are to be squeezed."""
        ahead = range(step, step + AHEAD_STEPS + 1)
        from_step = next(filter(self.is_squeezed, ahead), None)
        if from_step is None or not self._has_side or not self.guard.allows:
            return NO_STEPS
        until_step = from_step
        while until_step in ahead and self.is_squeezed(until_step):
            until_step += 1
        return PlanSteps(from_step, until_step)

    def _step_end(self, event: Event) -> list[Action]:
        assert isinstance(event, StepEnded)
        if event.step != self._step_number:
            return []  # its start was lost
        self._duration_ns = event.duration_ns
        self._recent_steps_ns.append(event.duration_ns)
        decisions = self.guard.step_ended(event.step, event.duration_ns, self.squeezed)
        return [*map(Note, decisions), *([] if self.guard.allows else self._plan(NO_STEPS))]  # shut at once

    def _overrun(self, event: Event) -> list[Action]:
        assert isinstance(event, Overran)
        return [Note(decision) for decision in self.guard.overran(self._step_number, event.slot, event.overrun_ns)]

    def _learn(self, event: Event) -> list[Action]:
        assert isinstance(event, BubbleEnded)
        self.forecast.observe(event.slot, event.length_ns, event.gap_ns, may_be_late=event.may_be_late)
        forecast = self.forecast.of(event.slot)
        if forecast is None:
            return []
        plan = self._plan_of(event.slot, event.wait, forecast)
        shut = self._has_side and not plan.permit_ns  # else what it overran by counts
        actions: list[Action] = [*map(Note, self.guard.kept_shut(self._step_number, event.slot))] if shut else []
        if plan != self._plans.get(event.slot, PlanSlot(event.slot, 0)):
            self._plans[event.slot] = plan
            actions.append(plan)
        longest_ns = self.forecast.length_ns(self._flush_slot) or 0
        if event.slot != self._flush_slot and forecast.length_ns > longest_ns * FLUSH_ELSEWHERE:
            self._flush_slot = event.slot
            actions.append(FlushAt(event.slot))
        return actions

    def _plan_of(self, slot: int, wait: str, forecast: Forecast) -> PlanSlot:
        """By the mean, not the forecast: where most bubbles are short, the others may be worth most of the slot."""
        policy = self.policy
        end = self.forecast.end(slot)
        mean_ns = forecast.mean_ns if end is None else end.mean_ns
        if wait not in policy.kinds or mean_ns < self._least_bubble_ns:
            return PlanSlot(slot, 0)
        opens_before_ns = 0 if end is None else max(1, mean_ns - self._least_bubble_ns)  # 0 is another clock
        if policy.preemptive:
            return PlanSlot(slot, LONGEST_NS, (), opens_before_ns)
        margin_ns = self.guard.margin_ns(slot)
        if end is not None and margin_ns == policy.margin_ns:  # it is known well, and the guard has not widened it
            margin_ns = min(margin_ns, max(LEAST_MARGIN_NS, end.high_ns - end.low_ns))
        intervals_ns = self.forecast.intervals_ns(slot, margin_ns + self._late_ns)
        if not intervals_ns or intervals_ns[0][0]:
            return PlanSlot(slot, ONLY_RENEWALS_NS if intervals_ns else 0, tuple(intervals_ns), opens_before_ns)
        (_, permit_ns), *renewals = intervals_ns
        return PlanSlot(slot, permit_ns, tuple(renewals), opens_before_ns)

    def _side_changed(self, event: Event) -> list[Action]:
        assert isinstance(event, SideChanged)
        self.side = event.side
        self._releasing = False
        if self.side is Side.READY:
            self.guard.side_became_ready()
        if not self._has_side:
            return [*self._plan(NO_STEPS), *([] if self._waits_for_main else self._start_if_due())]
        # until a bubble begins, it has no time to start in
        return [Stop()] if event.side is Side.STARTING and self.state is not State.ABSENT else []

    def _bar(self, event: Event) -> list[Action]:
        """End a side task that has no room; start one that waits for it."""
        assert isinstance(event, SideBarred)
        self.is_barred = bool(event.reason)
        if self.is_barred:
            return [Kill(event.reason)] if self._has_side else []
        return [] if self._waits_for_main else self._start_if_due()

    @property
    def _has_side(self) -> bool:
        return self.side in (Side.STARTING, Side.READY)

    def _start_if_due(self) -> list[Action]:
        return [Start()] if self.side is Side.DUE and not self.is_barred else []

    def _ignore(self, _event: Event) -> list[Action]:
        return []

    def _plan(self, steps: PlanSteps) -> list[Action]:
        if self.state is not State.ABSENT:
            self.state = State.SHUT if steps == NO_STEPS else State.PLANNED
        if steps == self.steps:
            return []
        self.steps = steps
        return [steps]


@dataclass(frozen=True, slots=True)
class Entry:
    """What an event does in a state, and where it may lead."""

    run: Callable[[GateMachine, Event], list[Action]]
    leads_to: tuple[State, ...]


def _table() -> dict[tuple[State, type], Entry]:
    absent, shut, planned = State.ABSENT, State.SHUT, State.PLANNED
    machine = GateMachine
    table: dict[tuple[State, type], Entry] = {
        (absent, JobAttached): Entry(machine._attach, (shut,)),
        (absent, JobLost): Entry(machine._lose, (absent,)),
        (absent, JobLeft): Entry(machine._leave, (absent,)),
        (absent, JobSilent): Entry(machine._silent, (absent,)),
        (absent, StepStarted): Entry(machine._ignore, (absent,)),
        (absent, StepEnded): Entry(machine._ignore, (absent,)),
        (absent, Overran): Entry(machine._ignore, (absent,)),
        (absent, BubbleEnded): Entry(machine._ignore, (absent,)),
        (absent, SideBarred): Entry(machine._bar, (absent,)),
        (absent, SideChanged): Entry(machine._side_changed, (absent,)),
        (shut, SideChanged): Entry(machine._side_changed, (shut,)),
        (planned, SideChanged): Entry(machine._side_changed, (planned, shut)),
    }
    for state in (shut, planned):
        table[state, JobAttached] = Entry(machine._attach, (shut,))
        table[state, JobLost] = Entry(machine._lose, (absent,))
        table[state, JobLeft] = Entry(machine._leave, (absent,))
        table[state, JobSilent] = Entry(machine._silent, (state,))
        table[state, StepStarted] = Entry(machine._step, (shut, planned))
        table[state, StepEnded] = Entry(machine._step_end, tuple(dict.fromkeys((shut, state))))
        table[state, SideBarred] = Entry(machine._bar, (state,))
        table[state, Overran] = Entry(machine._overrun, (state,))
        table[state, BubbleEnded] = Entry(machine._learn, (state,))
    return table


TABLE = _table()


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    edges: dict[tuple[str, str], list[str]] = {}
    for (state, event), entry in TABLE.items():
        for target in entry.leads_to:
            edges.setdefault((state.name, target.name), []).append(event.__name__)
    lines = ["stateDiagram-v2", "    [*] --> ABSENT"]
    lines += [f"    {start} --> {end}: {', '.join(sorted(events))}" for (start, end), events in sorted(edges.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    print(diagram())
