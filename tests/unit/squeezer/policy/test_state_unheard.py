"""The policy where a main job goes silent, or goes on without hooks: what becomes of the side task."""

from collections.abc import Iterator

import pytest

from squeezer.config import GuardTable, SqueezeTable
from squeezer.policy.actions import Action, Continue, ForgetPlan, Kill, Start
from squeezer.policy.events import JobAttached, JobLeft, JobLost, JobSilent, Side, SideChanged, StepEnded, StepStarted
from squeezer.policy.state import GateMachine

MS = 1_000_000


@pytest.fixture
def machine() -> Iterator[GateMachine]:
    made = GateMachine(SqueezeTable().policy(GuardTable()))
    yield made
    made.validate()


def attached(machine: GateMachine, side: Side = Side.READY) -> None:
    machine.handle(JobAttached())
    machine.handle(SideChanged(side))


def silent(machine: GateMachine, *, stopped: bool, asleep: bool = False) -> list[Action]:
    """What the machine does about a main job that is silent."""
    return machine.handle(JobSilent(stopped, asleep))


def test_a_stopped_side_task_runs_to_its_gate_where_the_main_job_may_wait_for_its_lock(machine: GateMachine) -> None:
    attached(machine)
    assert silent(machine, stopped=False) == [], "it computes in a long bubble"
    assert silent(machine, stopped=True) == [Continue()]
    assert silent(machine, stopped=False, asleep=True) == [], "it is at its gate"
    machine.handle(StepStarted(1))
    assert silent(machine, stopped=True) == [Continue()], "another time"


def test_one_that_does_not_reach_its_gate_is_killed_and_starts_when_the_main_job_is_heard(machine: GateMachine) -> None:
    attached(machine)
    silent(machine, stopped=True)
    (kill,) = silent(machine, stopped=False)
    assert isinstance(kill, Kill) and "lock" in kill.reason
    assert machine.handle(SideChanged(Side.DUE)) == []
    assert silent(machine, stopped=False) == [], "there is none"
    assert Start() in machine.handle(StepStarted(1))
    machine.handle(SideChanged(Side.STARTING))
    assert [type(action) for action in silent(machine, stopped=True)] == [Kill], "it does not ask the gate yet"


def test_patience_is_ten_steps_and_longer_before_the_first(machine: GateMachine) -> None:
    attached(machine)
    assert machine.patience_ns == 60_000 * MS
    for step, ms in enumerate((100, 2000, 300), 1):
        machine.handle(StepStarted(step))
        machine.handle(StepEnded(step, ms * MS))
    assert machine.patience_ns == 20_000 * MS
    for step in range(4, 12):
        machine.handle(StepStarted(step))
        machine.handle(StepEnded(step, 100 * MS))
    assert machine.patience_ns == 5_000 * MS


def test_hooks_that_leave_a_living_job_take_along_a_side_task_that_starts(machine: GateMachine) -> None:
    attached(machine, Side.STARTING)
    assert [type(action) for action in machine.handle(JobLeft())] == [Kill]
    assert machine.handle(SideChanged(Side.DUE)) == []
    assert machine.handle(JobAttached()) == [ForgetPlan(), Start()]
    assert machine.handle(SideChanged(Side.DUE)) == [Start()], "once more, if that fails"
    attached(machine)
    assert machine.handle(JobLeft()) == [], "stopped, or asleep at its gate"
    assert machine.handle(SideChanged(Side.DUE)) == [], "it crashed"
    machine.handle(JobAttached())
    machine.handle(SideChanged(Side.READY))
    machine.handle(JobLeft())
    assert machine.handle(JobLost()) == [Continue()], "nothing to yield to any more"


@pytest.mark.parametrize("with_job", [True, False])
def test_one_that_crashes_starts_again_at_once(machine: GateMachine, with_job: bool) -> None:
    if with_job:
        attached(machine)
    assert machine.handle(SideChanged(Side.DUE)) == [Start()]
