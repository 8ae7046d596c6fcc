"""What a permit's rest, renewals and limits mean to units of a device with streams; all is made up."""

import signal

import pytest

from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.page.plan import plan_slot
from tests.support.cuda_world import MS, US, World, learn
from trials.gate.base import StopRequested


def test_a_unit_longer_than_any_permit_that_a_device_writes_is_not_queued_for_a_longer_plan(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 10_000 * MS)
    world.due(1, 20_000 * MS)
    world.signals.append(signal.SIGTERM)
    with pytest.raises(StopRequested):  # else it would wait on the device for more than the gate ever says
        gate.enter(0)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_device_that_may_be_given_one_unit_gets_it_in_an_open_bubble(depth: int, world: World) -> None:
    gate = world.gate()
    gate.limit_queue(depth)
    learn(world, gate, 2 * MS)
    begin_ns = world.now_ns
    world.bubble(1, 5 * MS, 20 * MS)
    queued: list[tuple[int, int]] = []
    for _ in range(3):
        world.run(gate, 0, 2 * MS)
        queued.append((world.now_ns - begin_ns, len(gate._queue)))
    if depth == 2:
        assert queued[:2] == [(0, 1), (0, 2)], "before the bubble begins"
        return
    gate.settle()
    starts = [start_ns - begin_ns for _, start_ns, _ in world.kernels]
    assert [many for _, many in queued] == [1, 1, 1]
    assert 5 * MS <= queued[0][0] < 5.3 * MS, "it was seen soon, although nothing waited on the device"
    assert all(0 <= start - at < 0.3 * MS for start, (at, _) in zip(starts, queued, strict=True))


def test_a_unit_that_comes_late_in_a_renewal_waits_for_the_next_bubble(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 2 * MS, 2 * MS)
    begin_ns = world.now_ns
    plan_slot(world.page.words, 3, 1, ((4 * MS, 10 * MS),))  # as where only renewals are worth it
    world.bubble(1, 0, 12 * MS, permit_ns=1 * US)
    world.run(gate, 0, 5700 * US)  # it takes longer than it was forecast to
    world.run(gate, 1, 2 * MS)
    second_ns = begin_ns + 40 * MS
    world.at(20 * MS, lambda: world.bubble(2, second_ns - world.now_ns, 6 * MS))
    for _ in range(450):
        world.pass_time(100 * US)
        gate.rest()  # a look
    (_, first_ns, _), (_, late_ns, _) = world.kernels
    assert first_ns - begin_ns < 4.3 * MS and late_ns == second_ns
    assert world.words[Field.UNITS_RUN] == 2


def test_work_fits_if_it_could_use_most_of_the_bubbles(world: World) -> None:
    gate = world.gate()
    assert not gate.fits(1 * MS), "before any bubble was seen"
    for number, permit_ns in enumerate((0, 4 * MS, 6 * MS), 1):
        world.open(number, permit_ns)
        gate.rest()
        world.close(number)
        gate.rest()
        assert gate.fits(2 * MS) == bool(permit_ns), "a permit of nothing is no room"
    assert gate.fits(5 * MS) and gate.fits(6 * MS) and not gate.fits(7 * MS)
