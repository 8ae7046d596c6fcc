"""The policy while a side task starts: it does not ask the gate yet, and is stopped outside bubbles."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from squeezer.config import GuardTable, SqueezeTable
from squeezer.policy.actions import NO_STEPS, PlanSteps, Stop
from squeezer.policy.events import JobAttached, Side, SideChanged, StepStarted
from squeezer.policy.state import AHEAD_STEPS, GateMachine

POLICY = SqueezeTable().policy(GuardTable())
SEED = 0
BLOCK, FIRST_DRAWN = POLICY.draw.alone_block_steps, POLICY.draw.observe_steps + 1


@pytest.fixture
def machine() -> Iterator[GateMachine]:
    made = GateMachine(POLICY)
    yield made
    made.validate()


def begun(machine: GateMachine, step: int) -> bool | None:
    """How the machine counts a step that begins."""
    machine.handle(StepStarted(step))
    return machine.squeezed


def drawn_alone() -> int:
    """The first step of the first block that is left alone by a guard that knows little."""
    machine = GateMachine(POLICY)
    machine.handle(JobAttached(0, SEED))
    machine.handle(SideChanged(Side.READY))
    return next(step for step in range(FIRST_DRAWN, 99, BLOCK) if not machine.is_squeezed(step))


def test_one_that_starts_during_a_job_waits_for_a_bubble(machine: GateMachine) -> None:
    assert machine.handle(SideChanged(Side.STARTING)) == []
    machine.handle(SideChanged(Side.NONE))
    machine.handle(JobAttached())
    assert machine.handle(SideChanged(Side.STARTING)) == [Stop()]


def test_it_starts_in_the_bubbles_of_all_steps(machine: GateMachine) -> None:
    machine.handle(JobAttached(0, SEED))
    machine.handle(SideChanged(Side.STARTING))
    assert machine.handle(StepStarted(1)) == [PlanSteps(1, 2 + AHEAD_STEPS)]
    assert [begun(machine, step) for step in range(2, 99)] == [None] * 97, "they are no baseline"


def test_where_it_is_not_stopped_exactly_the_first_steps_only_observe() -> None:
    machine = GateMachine(replace(POLICY, preemptive=False))
    machine.handle(JobAttached(0, SEED))
    machine.handle(SideChanged(Side.STARTING))
    assert (begun(machine, 1), machine.steps) == (False, NO_STEPS)
    assert begun(machine, FIRST_DRAWN - 1) is False


def test_once_it_is_ready_no_step_is_alone_that_was_planned_before(machine: GateMachine) -> None:
    alone = drawn_alone()
    machine.handle(JobAttached(0, SEED))
    machine.handle(SideChanged(Side.STARTING))
    assert begun(machine, alone - 1) is None
    machine.handle(SideChanged(Side.READY))
    assert begun(machine, alone) is None, "its bubbles were open before this was heard"
    assert not machine.steps.from_step <= alone < machine.steps.until_step
    assert begun(machine, alone + 1) is False, "the draw"
