"""The policy where the device has no room for a side task."""

from collections.abc import Iterator

import pytest

from squeezer.config import GuardTable, SqueezeTable
from squeezer.policy.actions import ForgetPlan, Kill, Start
from squeezer.policy.events import JobAttached, JobLeft, Side, SideBarred, SideChanged, StepStarted
from squeezer.policy.state import GateMachine


@pytest.fixture
def machine() -> Iterator[GateMachine]:
    made = GateMachine(SqueezeTable().policy(GuardTable()))
    yield made
    made.validate()


def test_a_side_task_without_room_ends_and_comes_back_when_there_is_room(machine: GateMachine) -> None:
    machine.handle(JobAttached())
    machine.handle(SideChanged(Side.READY))
    assert machine.handle(SideBarred("no memory")) == [Kill("no memory")]
    assert machine.handle(SideChanged(Side.DUE)) == []
    assert machine.handle(StepStarted(9)) == [], "the steps are left to the main job"
    assert machine.handle(JobAttached()) == [ForgetPlan()]
    assert machine.handle(SideBarred("")) == [Start()]


def test_a_side_task_that_waits_for_room_starts_without_having_run(machine: GateMachine) -> None:
    assert machine.handle(SideBarred("one process only")) == []
    machine.handle(JobAttached())
    assert machine.handle(SideChanged(Side.DUE)) == []
    assert machine.handle(SideBarred("")) == [Start()]


def test_room_alone_starts_nothing_where_hooks_have_left(machine: GateMachine) -> None:
    machine.handle(JobAttached())
    machine.handle(SideChanged(Side.READY))
    machine.handle(JobLeft())
    machine.handle(SideBarred("no memory"))
    machine.handle(SideChanged(Side.DUE))
    assert machine.handle(SideBarred("")) == []
