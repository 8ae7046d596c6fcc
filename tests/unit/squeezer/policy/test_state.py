"""The gate's state machine: what it plans, what it never does, and that the documents show it as it is."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squeezer.policy.actions import (
    NO_STEPS,
    Action,
    Continue,
    FlushAt,
    ForgetPlan,
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
from squeezer.policy.forecast import LONGEST_NS
from squeezer.policy.margins import LEAST_MARGIN_NS
from squeezer.policy.state import AHEAD_STEPS, TABLE, GateMachine, Policy, State, TransitionError, diagram
from tests.support.paths import ROOT

MS = 1_000_000
STALLED_10 = (20 * MS, LONGEST_NS)
"""After bubbles of 10 ms: one that lasts twice as long may last for ever."""


SEED = 5
"""With it the steps from 18 to 22 are left alone, and no others up to 32 but the first two."""


def policy(
    *, preemptive: bool = False, round_blocks: int = 5, quantile: float = 0.1, budget: float = math.inf
) -> Policy:
    return Policy(
        draw=Draw(observe_steps=2, alone_block_steps=5, round_blocks=round_blocks),
        margin_ns=1 * MS,
        min_bubble_ns=2 * MS,
        forecast_quantile=quantile,
        preemptive=preemptive,
        kinds=frozenset({"RECV_GRAD"}),
        slowdown_budget=budget,  # if infinite, the draw is never dense
        retry_steps=50,
    )


@pytest.fixture
def machine() -> Iterator[GateMachine]:
    made = GateMachine(policy())
    yield made
    made.validate()


def ended(machine: GateMachine, *lengths_ms: float, slot: int = 4, wait: str = "RECV_GRAD") -> list[Action]:
    """What the machine does about bubbles of one slot."""
    return [a for ms in lengths_ms for a in machine.handle(BubbleEnded(slot, wait, int(ms * MS)))]


def attached(machine: GateMachine, side: Side = Side.READY) -> None:
    machine.handle(JobAttached(0, SEED))
    machine.handle(SideChanged(side))


def test_a_slots_permit_is_its_forecast_less_the_margin_and_follows_it(machine: GateMachine) -> None:
    attached(machine)
    assert ended(machine, 10) == [], "once is not known"
    assert ended(machine, 10) == [PlanSlot(4, 9 * MS, (STALLED_10,)), FlushAt(4)]
    assert ended(machine, 10) == []
    assert ended(machine, 5) == [PlanSlot(4, 4 * MS, (STALLED_10,))], "a low quantile"


def test_a_bubble_that_outlives_where_many_end_is_used_again() -> None:
    machine = GateMachine(policy(quantile=0.4))
    attached(machine)
    stalled = (40 * MS, LONGEST_NS)
    assert ended(machine, *[20, 5] * 4)[-1] == PlanSlot(4, 4 * MS, ((5 * MS, 19 * MS), stalled))
    machine.handle(JobAttached(2 * MS))
    assert ended(machine, *[20, 5] * 4)[-1] == PlanSlot(4, 2 * MS, ((5 * MS, 17 * MS), stalled)), "opened late"


def test_where_few_bubbles_end_the_permit_goes_on() -> None:
    machine = GateMachine(policy(quantile=0.4))
    attached(machine)
    few = ended(machine, *[5, 20, 20, 20, 20, 20, 20, 20])
    assert few[-1] == PlanSlot(4, 19 * MS, ((40 * MS, LONGEST_NS),)), "one of eight"


def test_a_slot_is_opened_for_its_longer_bubbles_too() -> None:
    machine = GateMachine(policy(quantile=0.4))
    attached(machine)
    plan = ended(machine, *[20, 0.5] * 4)[-1]
    windows = ((MS // 2, 19 * MS), (40 * MS, LONGEST_NS))
    assert plan == PlanSlot(4, 1, windows), "its permit is as good as nothing"
    assert ended(machine, *[0.5, 2.4] * 4, slot=5) == [], "by its mean it is too short"


def test_a_permit_is_shorter_where_bubbles_are_opened_and_closed_late(machine: GateMachine) -> None:
    machine.handle(JobAttached(2 * MS))
    machine.handle(SideChanged(Side.READY))
    assert ended(machine, 10, 10)[0] == PlanSlot(4, 7 * MS, (STALLED_10,))
    attached(machine)
    assert ended(machine, 10, 10)[0] == PlanSlot(4, 9 * MS, (STALLED_10,)), "another job, another device"


def test_a_device_on_which_the_first_kernel_starts_late_opens_longer_bubbles_only(machine: GateMachine) -> None:
    machine.handle(JobAttached(0, SEED, 6 * MS))
    machine.handle(SideChanged(Side.READY))
    assert ended(machine, 5.9, 5.9) == [FlushAt(4)], "too short for this device"
    assert ended(machine, 10, 10, slot=5)[0] == PlanSlot(5, 9 * MS, (STALLED_10,))
    machine.handle(JobAttached(0, SEED, 1 * MS))
    machine.handle(SideChanged(Side.READY))
    assert isinstance(ended(machine, 5.9, 5.9)[0], PlanSlot), "another job, another device"
    assert ended(machine, 1.9, 1.9, slot=5) == [], "the configuration says no less than before"


def test_a_preemptive_permit_lasts_to_the_bubbles_true_end() -> None:
    machine = GateMachine(policy(preemptive=True))
    attached(machine)
    assert ended(machine, 10, 10)[0] == PlanSlot(4, LONGEST_NS)
    assert ended(machine, 1.9, 1.9, slot=5) == [], "too short all the same"


def paced(machine: GateMachine, *, pace_ms: float, spread_ms: float = 0.0) -> PlanSlot:
    """The plan of a slot whose bubbles begin 4 to 7.5 ms after the end of the one before, and end at `pace_ms`."""
    plans = []
    for at in range(64):
        gap_ms, late_ms = 4 + at * 5 % 8 / 2, spread_ms * (at * 7 % 16) / 16
        length_ms = pace_ms + late_ms - gap_ms
        event = BubbleEnded(4, "RECV_GRAD", int(length_ms * MS), int(gap_ms * MS))
        plans += [action for action in machine.handle(event) if isinstance(action, PlanSlot)]
    return plans[-1]


@pytest.mark.parametrize("preemptive", [True, False])
def test_where_ends_follow_the_bubble_before_only_what_is_long_enough_is_opened(preemptive: bool) -> None:
    machine = GateMachine(policy(preemptive=preemptive))
    attached(machine)
    plan = paced(machine, pace_ms=10)
    assert plan.opens_before_ns == pytest.approx(8 * MS, abs=2), "what begins later is shorter than 2 ms"
    permit_ns = LONGEST_NS if preemptive else 10 * MS - LEAST_MARGIN_NS
    assert plan.permit_ns == pytest.approx(permit_ns, abs=2), "counted from the end of the bubble before"
    machine = GateMachine(policy(preemptive=preemptive))
    attached(machine)
    assert paced(machine, pace_ms=7.6).opens_before_ns == pytest.approx(5.6 * MS, abs=2), (
        "though they are 1.85 ms long by the mean"
    )


def test_a_margin_is_no_wider_than_well_known_ends_vary(machine: GateMachine) -> None:
    attached(machine)
    plan = paced(machine, pace_ms=10, spread_ms=0.5)
    margin_ns = 10 * MS - plan.permit_ns
    assert 0.3 * MS < margin_ns < 0.5 * MS
    machine.handle(Overran(4, 3 * MS))
    assert paced(machine, pace_ms=10, spread_ms=0.5).permit_ns <= 8 * MS, "and one that was widened stays wide"


@pytest.mark.parametrize(("length_ms", "wait"), [(10, "LOSS"), (1.9, "RECV_GRAD")])
def test_what_is_not_worth_opening_stays_shut(machine: GateMachine, length_ms: float, wait: str) -> None:
    attached(machine)
    assert [a for a in ended(machine, length_ms, length_ms, wait=wait) if isinstance(a, PlanSlot)] == []


def test_a_bubble_that_becomes_too_short_is_shut(machine: GateMachine) -> None:
    attached(machine)
    ended(machine, 10, 10)
    assert ended(machine, *[1] * 16)[-1] == PlanSlot(4, 0)


def test_the_plan_holds_for_the_steps_ahead_that_are_to_be_squeezed(machine: GateMachine) -> None:
    attached(machine)
    planned = {step: machine.handle(StepStarted(step)) for step in (1, 2, 5, 16, 17, 18, 19, 20)}
    assert planned == {
        1: [PlanSteps(3, 5)],  # 1 and 2 only observe
        2: [PlanSteps(3, 6)],
        5: [PlanSteps(5, 9)],
        16: [PlanSteps(16, 18)],
        17: [PlanSteps(17, 18)],
        18: [NO_STEPS],  # 18 to 22 are alone, and 23 is too far ahead
        19: [],
        20: [PlanSteps(23, 24)],
    }


def steps_of(machine: GateMachine, steps: range, length_ms: float, overrun_ms: float = 0.0) -> list[Action]:
    actions: list[Action] = []
    for step in steps:
        actions += machine.handle(StepStarted(step))
        actions += machine.handle(Overran(4, int(overrun_ms * MS)))
        actions += machine.handle(StepEnded(step, int(length_ms * MS)))
    return actions


def test_steps_are_squeezed_left_alone_or_neither(machine: GateMachine) -> None:
    attached(machine, Side.NONE)
    found = {}
    for side in Side:
        machine.handle(SideChanged(side))
        for step in (1, 10, 18):
            machine.handle(StepStarted(step))
            found[side.name, step] = machine.squeezed
    assert {key for key, squeezed in found.items() if squeezed} == {("READY", 10)}
    neither = {key for key, squeezed in found.items() if squeezed is None}
    assert neither == {("STARTING", 10), ("DUE", 10)}, "when a side task ends and starts again is no draw"


def test_a_broken_budget_withdraws_the_plan_at_once_until_it_is_tried_again() -> None:
    machine = GateMachine(policy(budget=0.01))
    attached(machine)
    quiet = steps_of(machine, range(1, 10), 100)
    assert not [action for action in quiet if isinstance(action, Note)]
    assert machine.state is State.PLANNED
    actions = steps_of(machine, range(10, 17), 100, overrun_ms=20)
    decided = [action.decision.what if isinstance(action, Note) else action for action in actions]
    assert decided[decided.index("shut") + 1] == NO_STEPS
    assert (machine.state, machine.squeezed) == (State.SHUT, None)
    again = steps_of(machine, range(17, 130), 100)
    assert "retry" in [action.decision.what for action in again if isinstance(action, Note)]
    assert machine.state is State.PLANNED


def test_a_permit_ends_earlier_in_a_slot_that_overran(machine: GateMachine) -> None:
    attached(machine)
    ended(machine, 10, 10)
    (note,) = machine.handle(Overran(4, 3 * MS))
    assert isinstance(note, Note) and note.decision.what == "widen"
    assert ended(machine, 10) == [PlanSlot(4, 8 * MS, (STALLED_10,))]


def test_a_step_whose_start_was_lost_is_not_judged(machine: GateMachine) -> None:
    attached(machine)
    machine.handle(StepStarted(4))
    assert machine.handle(StepEnded(5, 10**12)) == []


def test_without_a_side_task_nothing_is_planned(machine: GateMachine) -> None:
    attached(machine, Side.NONE)
    assert machine.handle(StepStarted(10)) == []
    machine.handle(SideChanged(Side.STARTING))
    assert machine.handle(StepStarted(10)) == [PlanSteps(10, 14)], "it starts in bubbles"
    assert machine.handle(SideChanged(Side.READY)) == []
    assert machine.handle(SideChanged(Side.NONE)) == [NO_STEPS]
    assert machine.state is State.SHUT


def test_the_daemon_wakes_in_the_longest_bubble(machine: GateMachine) -> None:
    attached(machine)
    ended(machine, 5, 5, slot=1)
    assert ended(machine, 6, 6, slot=2)[1:] == [], "not worth a change"
    assert FlushAt(3) in ended(machine, 1, 50, 50, 50, 50, 50, 50, 50, 50, 50, 50, slot=3)


def test_a_lost_job_ends_the_plan_and_frees_what_was_stopped(machine: GateMachine) -> None:
    attached(machine)
    machine.handle(StepStarted(10))
    assert machine.handle(JobLost()) == [NO_STEPS, Continue()]
    assert machine.state is State.ABSENT
    assert ended(machine, 10) == [] == machine.handle(StepStarted(11)), "words of a job that is gone"


def test_the_next_job_is_learnt_anew(machine: GateMachine) -> None:
    attached(machine)
    ended(machine, 10, 10)
    machine.handle(JobLost())
    assert machine.handle(JobAttached()) == [ForgetPlan()]
    assert ended(machine, 10) == []
    assert ended(machine, 10) == [PlanSlot(4, 9 * MS, (STALLED_10,)), FlushAt(4)]


def test_what_the_table_does_not_hold_is_an_error_with_the_story(machine: GateMachine) -> None:
    attached(machine)
    with pytest.raises(TransitionError, match=r"(?s)Surprise in state SHUT.*JobAttached"):
        machine.handle(type("Surprise", (), {})())


@pytest.mark.parametrize(
    ("key", "leads_to", "says"),
    [
        ((State.ABSENT, JobAttached), (State.ABSENT,), "JobAttached in state ABSENT led to SHUT; allowed: ABSENT"),
        ((State.SHUT, StepStarted), (State.SHUT,), "StepStarted in state SHUT led to PLANNED; allowed: SHUT"),
        ((State.PLANNED, JobLost), (State.SHUT, State.PLANNED), "allowed: SHUT, PLANNED"),
    ],
)
def test_a_state_that_its_entry_does_not_name_is_an_error_with_the_story(
    key: tuple[State, type], leads_to: tuple[State, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE, key, replace(TABLE[key], leads_to=leads_to))
    machine = GateMachine(policy())
    machine.handle(SideChanged(Side.READY))
    with pytest.raises(TransitionError, match=rf"(?s){says}.*SideChanged.*{key[1].__name__}"):
        for event in (JobAttached(), StepStarted(3), JobLost()):
            machine.handle(event)


def test_without_a_share_alone_all_but_the_first_are_squeezed() -> None:
    always = GateMachine(policy(round_blocks=0))
    attached(always)
    assert [step for step in range(1, 99) if not always.is_squeezed(step)] == [1, 2]
    assert always.handle(StepStarted(22)) == [PlanSteps(22, 22 + AHEAD_STEPS + 1)]


def test_the_documents_show_the_table() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert diagram() in text, "run `python -m tests.support.document_tables`"


def test_every_state_takes_every_event() -> None:
    events = {event for _, event in TABLE}
    missing = {(state.name, event.__name__) for state in State for event in events if (state, event) not in TABLE}
    assert not missing, "a start or an end may be late or lost: none of them may surprise any state"


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Events in any order, with losses, duplicates, late delivery and clocks that jump."""
    kinds = st.one_of(
        st.builds(StepStarted, st.integers(-5, 60)),
        st.builds(
            BubbleEnded,
            st.integers(0, 3),
            st.sampled_from(["RECV_GRAD", "LOSS"]),
            st.integers(-MS, 30 * MS),
            st.none() | st.integers(-MS, 30 * MS),
        ),
        st.builds(StepEnded, st.integers(-5, 60), st.integers(-MS, 300 * MS)),
        st.builds(Overran, st.integers(0, 3), st.integers(0, 60 * MS)),
        st.builds(SideChanged, st.sampled_from(Side)),
        st.builds(JobSilent, st.booleans(), st.booleans()),
        st.sampled_from([JobAttached(), JobLeft(), JobLost(), SideBarred("full"), SideBarred("")]),
    )
    return draw(st.lists(kinds, max_size=80))


@given(histories(), st.booleans())
def test_no_order_of_events_breaks_the_invariants(history: list[Event], preemptive: bool) -> None:
    machine = GateMachine(policy(preemptive=preemptive))
    permits_ns: dict[int, int] = {}
    steps = NO_STEPS
    step = 0
    for event in history:
        actions = machine.handle(event)
        machine.validate()
        if isinstance(event, StepStarted):
            step = event.step
        for action in actions:
            match action:
                case ForgetPlan():
                    permits_ns, steps = {}, NO_STEPS
                case PlanSlot():
                    permits_ns[action.slot] = action.permit_ns
                    assert action.permit_ns in {0, LONGEST_NS} if preemptive else 0 <= action.permit_ns <= 29 * MS
                case PlanSteps():
                    steps = action
                    planned = range(action.from_step, action.until_step)
                    assert all(machine.is_squeezed(s) and step <= s <= step + AHEAD_STEPS for s in planned)
                case Start():
                    assert machine.side is Side.DUE and not machine.is_barred
                case Stop():
                    assert isinstance(event, SideChanged) and machine.state is not State.ABSENT
                case Continue():
                    let_go = isinstance(event, JobSilent) and event.stopped  # it may hold a lock
                    assert let_go or machine.state is State.ABSENT, "nobody stops it any more"
        assert steps == machine.steps, "the page says what the machine thinks"
        if machine.state is not State.PLANNED:
            assert steps == NO_STEPS, "no bubble is opened"
