"""What the gate of a device with streams learns of its units, and records. Device, clock and sleep are made up."""

from collections import deque
from pathlib import Path

import pytest
import torch

from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.unit_record import UNIT_RECORD
from tests.support.cuda_world import MS, US, World, learn
from trials.gate.base import HOST_UNIT, Starved
from trials.gate.cuda import CudaGate
from trials.gate.unit_costs import HOST_WORK_NEEDS_NS, NEARLY_LONGEST
from trials.gate.unit_records import UnitRecords


def test_costs_are_the_devices_rise_fast_fall_slowly_and_belong_to_the_units_that_were_asked_for(world: World) -> None:
    gate = world.gate()
    gate.use(["a", "b"], 8)
    gate._has_run |= {(0, 0), (0, 1), (1, 0)}
    world.due(1, 10**9)
    gate.rest()
    world.open(1, 10**9)
    for busy_ns in (1000 * US, 3000 * US, 1000 * US):
        world.run(gate, 0, busy_ns)
        gate.rest()
        world.pass_time(5 * MS)
    world.run(gate, 1, 700 * US)
    assert gate._costs_ns[0] == pytest.approx(1950 * US, rel=0.01)  # 1000 -> 2000 -> 1950
    gate.use(["c"], 4)  # while b still runs
    world.run(gate, 0, 300 * US)
    gate.rest()
    world.pass_time(5 * MS)
    gate.rest()
    assert gate._costs_ns[0] == pytest.approx(300 * US, rel=0.01)
    gate.use(["b", "a"], 8)
    assert gate._costs_ns[:2] == [pytest.approx(700 * US, rel=0.01), pytest.approx(1950 * US, rel=0.01)]
    assert world.words[Field.BUSY_NS] == 6 * MS


def test_the_first_time_says_nothing_of_what_a_unit_takes(world: World) -> None:
    gate = world.gate()
    gate.use(["a"], 1)
    world.due(1, 10**9)
    world.open(1, 10**9)
    known_ns = []
    for busy_ns in (300 * MS, 1 * MS):
        world.run(gate, 0, busy_ns)
        gate.settle()
        known_ns.append(gate._costs_ns[0])
    assert known_ns == [0.0, pytest.approx(1 * MS, rel=0.01)]


def test_settling_waits_for_what_runs_and_sees_meanwhile_that_the_bubble_ends(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 5 * MS)
    world.bubble(1, 1 * MS, 6 * MS)
    world.run(gate, 0, 9 * MS)
    gate.settle()
    assert not gate._queue and world.overruns and world.overruns[0][1] == pytest.approx(3 * MS, rel=0.1)


def test_each_operation_of_host_work_on_the_device_waits_for_a_bubble(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaGate, "device_type", "meta")  # one that PyTorch has everywhere
    gate = world.gate()
    learn(world, gate, 1 * MS)
    world.due(1, 9 * MS)
    gate.enter(HOST_UNIT)
    before, on_host = len(world._work), torch.ones(2)
    assert torch.stack([on_host.add_(1)] * 2).sum().item() == 8 and len(world._work) == before, "on the host"
    torch.ones(2, device="meta").add_(1)
    there = on_host.to("meta")
    torch.stack([there, there])
    held = [work for work in list(world._work)[before:] if work[0] == "wait"]
    assert len(held) == 4 and {least for _, _, least in held} == {1}
    gate.enter(0)
    after = len(world._work)
    there.add_(1)
    assert len(world._work) == after, "a unit's own operations do not"
    gate.rest()


def test_a_unit_longer_than_all_bubbles_is_tried_in_one_of_the_longest_and_named(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 12 * MS, trials=16)
    lengths_ms = [3, 8, 3, 5] * 8 + [7, 8, 8]

    def next_bubble(epoch: int) -> None:
        length_ns = lengths_ms[epoch] * MS
        world.bubble(epoch + 1, 1 * MS, length_ns)
        if epoch + 1 < len(lengths_ms):
            world.at(length_ns + 3 * MS, lambda: next_bubble(epoch + 1))

    next_bubble(0)
    world.run(gate, 0, 11 * MS)
    assert world.words[Field.UNITS_DECLINED] in (32, 33)
    gate.rest()
    assert gate.take_starved() == [], "not before it has run"
    for _ in range(200):
        world.pass_time(100 * US)
        gate.rest()
    (found,) = gate.take_starved()
    assert found == Starved(unit="unit 0", trials=16, needs_ns=11 * MS, longest_ns=found.longest_ns)
    assert 8 * MS * NEARLY_LONGEST < found.longest_ns <= 8 * MS
    assert [slot for slot, _ in world.overruns] == [3]


def test_host_work_that_was_tried_in_a_long_bubble_needs_as_little_as_ever_then(world: World) -> None:
    gate = world.gate()
    gate._doubt(HOST_UNIT, deque([8 * MS] * 32))
    world.due(1, 8 * MS)
    gate.enter(HOST_UNIT)
    world.open(1, 8 * MS)
    gate.rest()
    assert gate._costs_ns[HOST_UNIT] == HOST_WORK_NEEDS_NS


def test_units_are_recorded_as_the_report_reads_them(world: World, tmp_path: Path) -> None:
    units = tmp_path / "units.bin"
    gate = world.gate(UnitRecords(units))
    gate.use(["a"], 16)
    begin_ns = world.now_ns + 2 * MS
    world.bubble(1, 2 * MS, 50 * MS)
    world.run(gate, 0, 3 * MS)
    world.run(gate, 0, 1 * MS)
    gate.enter(HOST_UNIT)
    assert gate.close()
    first, second, host = UNIT_RECORD.iter_unpack(units.read_bytes())
    assert first[1:] == (3 * MS, 3 * MS, 0, 0) and second[1:] == (1 * MS, 1 * MS, 0, 0)
    assert host[2:] == (0, HOST_UNIT, 0), "host work is not the device's"
    assert begin_ns <= first[0] < begin_ns + 60 * US
    assert second[0] == first[0] + 3 * MS
