"""How the policy's margins follow overruns, and how a slot comes back that they kept shut."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from squeezer.config import GuardTable, SqueezeTable
from squeezer.policy.actions import ONLY_RENEWALS_NS, Action, PlanSlot
from squeezer.policy.events import BubbleEnded, JobAttached, Overran, Side, SideChanged
from squeezer.policy.forecast import LONGEST_NS
from squeezer.policy.state import GateMachine

MS = 1_000_000
POLICY = replace(
    SqueezeTable(preemptive=False, margin_ms=1.0, forecast_quantile=0.1).policy(GuardTable()), slowdown_budget=math.inf
)
STALLED_10 = (20 * MS, LONGEST_NS)
"""After bubbles of 10 ms: one that lasts twice as long may last for ever."""


@pytest.fixture
def machine() -> Iterator[GateMachine]:
    made = GateMachine(POLICY)
    yield made
    made.validate()


def ended(machine: GateMachine, *lengths_ms: float) -> list[Action]:
    """What the machine does about bubbles of one slot."""
    return [a for ms in lengths_ms for a in machine.handle(BubbleEnded(4, "RECV_GRAD", int(ms * MS)))]


def attached(machine: GateMachine, side: Side = Side.READY) -> None:
    machine.handle(JobAttached(0, 5))
    machine.handle(SideChanged(side))


def test_a_slot_that_its_margin_keeps_shut_is_tried_again(machine: GateMachine) -> None:
    attached(machine)
    ended(machine, 10, 10)
    for _ in range(6):
        machine.handle(Overran(4, 3 * MS))
    ended(machine, 10)
    assert machine.guard.margin_ns(4) == 64 * MS
    plans = [action for action in ended(machine, *[10] * 64 * 6) if isinstance(action, PlanSlot)]
    assert plans and plans[-1].permit_ns == 2 * MS, "less a margin of 8 ms: from here on it is opened"
    for _ in range(3 * 64):
        machine.handle(Overran(4, 0))
    assert ended(machine, 10)[0] == PlanSlot(4, 9 * MS, (STALLED_10,))


def test_a_bubble_that_is_open_for_renewals_alone_counts_once(machine: GateMachine) -> None:
    attached(machine)
    ended(machine, *[10, 10, 10, 10, 90] * 6)
    for _ in range(4):
        machine.handle(Overran(4, 3 * MS))
    (plan,) = ended(machine, 10)
    assert isinstance(plan, PlanSlot) and plan.permit_ns == ONLY_RENEWALS_NS
    for quiet in range(64):
        assert machine.guard.margin_ns(4) == 16 * MS, f"after {quiet} quiet bubbles"
        ended(machine, 90 if quiet % 5 == 4 else 10)
        machine.handle(Overran(4, 0))
    assert machine.guard.margin_ns(4) == 8 * MS


def test_a_plan_does_not_follow_ends_that_its_side_task_may_have_delayed(machine: GateMachine) -> None:
    attached(machine)
    ended(machine, *[10] * 8)
    for _ in range(32):
        assert machine.handle(BubbleEnded(4, "RECV_GRAD", 14 * MS, None, True)) == []
    assert any(isinstance(action, PlanSlot) for action in ended(machine, *[14] * 32))


def test_what_overran_while_it_started_is_forgotten(machine: GateMachine) -> None:
    attached(machine, Side.STARTING)
    ended(machine, 10, 10)
    machine.handle(Overran(4, 3 * MS))
    assert machine.guard.margin_ns(4) == 2 * MS
    machine.handle(SideChanged(Side.READY))
    assert machine.guard.margin_ns(4) == 1 * MS
