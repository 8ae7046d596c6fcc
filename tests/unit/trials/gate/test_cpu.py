"""The side task's gate: what it lets start, how it sleeps, what it says about it. The clock and the sleep are given."""

import os
import signal
from pathlib import Path

import pytest

import trials.gate.cpu as gate_module
from ds_hooks.shared.page.layout import Field, SideActivity
from ds_hooks.shared.page.plan import plan_slot
from ds_hooks.shared.rotating_file import RotatingFile
from ds_hooks.shared.unit_record import UNIT_RECORD
from squeezer.records.reader import read_groups
from tests.support.cpu_world import MS, US, World, decline
from trials.gate.base import HOST_UNIT, Starved, StopRequested
from trials.gate.cpu import CpuGate
from trials.gate.unit_costs import NEARLY_LONGEST, UNKNOWN_COST_NEEDS_NS
from trials.gate.unit_records import UnitRecords


@pytest.fixture
def world(cpu_world: World) -> World:
    return cpu_world


def test_an_open_gate_lets_a_unit_start_without_a_sleep(world: World) -> None:
    gate = CpuGate(world.page)
    gate.use(["a", "b"], 1)
    world.open(1, 20 * MS)
    gate.enter(0)
    world.work(1 * MS)
    gate.enter(1)
    gate.rest()
    assert (world.sleeps, world.words[Field.UNITS_RUN], world.words[Field.BUSY_NS]) == (0, 2, 1 * MS)


@pytest.mark.parametrize("shut", ["no bubble", "no permit", "permit over", "does not fit"])
def test_a_shut_gate_sleeps_until_it_is_signalled_and_may_run(world: World, shut: str) -> None:
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    world.open(1, 20 * MS)
    gate.enter(0)
    world.work(2 * MS)
    if shut == "no bubble":
        world.close(1)
    elif shut == "no permit":
        world.open(2, 0)
    elif shut == "permit over":
        world.open(2, world.now_ns - 1)
    else:
        world.open(2, world.now_ns + 2 * MS - 1)
    world.while_asleep = [lambda: None, lambda: world.open(3, 50 * MS)]
    gate.enter(0)
    assert world.sleeps == 2
    assert world.words[Field.SIDE_ACTIVITY] == 1
    gate.rest()
    assert world.words[Field.UNITS_RUN] == 2, "what ended before the sleep is counted, too"


def in_slot(world: World, slot: int, permit_ns: int, *renewals: tuple[int, int]) -> None:
    """The next bubble that opens now is of this slot."""
    plan_slot(world.page.words, slot, permit_ns, renewals)
    world.words[Field.SLOT], world.words[Field.PLAN_BASE_NS] = slot, world.now_ns


def test_a_bubble_that_outlives_its_permit_is_used_again_and_it_wakes_by_itself(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    world.open(1, 20 * MS)
    gate.enter(0)
    world.work(2 * MS)
    in_slot(world, 6, 3 * MS, (4 * MS, 5 * MS), (7 * MS, 12 * MS))
    start_ns = world.now_ns
    world.open(2, start_ns + 3 * MS)
    gate.enter(0)
    world.work(2 * MS)
    naps_s = []

    def nap(_signals: object, timeout_s: float) -> None:
        naps_s.append(timeout_s)
        world.now_ns += round(timeout_s * 1e9)

    monkeypatch.setattr(signal, "sigtimedwait", nap)
    gate.enter(0)
    assert world.now_ns == start_ns + 7 * MS, "it is too long for the first renewal"
    world.work(2 * MS)
    gate.enter(0)
    assert world.now_ns == start_ns + 9 * MS, "and fits into the second again"
    gate.rest()
    assert naps_s == [pytest.approx(5e-3)]
    assert world.words[Field.UNITS_DECLINED] == 0, "nothing was in vain"


@pytest.mark.parametrize("why", ["bubble over", "not opened", "another slot", "renewals over"])
def test_where_no_renewal_is_to_come_it_sleeps_on(world: World, why: str) -> None:
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    world.open(1, 20 * MS)
    gate.enter(0)
    world.work(2 * MS)
    in_slot(world, 6, 3 * MS, (4 * MS, 12 * MS))
    if why == "another slot":
        world.words[Field.SLOT] = 5
    world.open(2, 0 if why == "not opened" else world.now_ns + 1)
    if why == "bubble over":
        world.close(2)
    elif why == "renewals over":
        world.now_ns += 11 * MS
    else:
        world.now_ns += 5 * MS
    world.while_asleep = [lambda: None, lambda: world.open(3, world.now_ns + 5 * MS)]
    gate.enter(0)
    assert world.sleeps == 2


def test_a_unit_whose_bubble_ends_and_is_followed_while_it_asks_starts_in_neither(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = CpuGate(world.page)
    world.open(1, 50 * MS)

    def the_core_is_taken_away() -> int:
        asked_ns = world.now_ns
        world.close(1)
        world.now_ns += 20 * MS
        world.open(2, 50 * MS)
        monkeypatch.setattr(gate_module, "monotonic_ns", lambda: world.now_ns)
        return asked_ns

    monkeypatch.setattr(gate_module, "monotonic_ns", the_core_is_taken_away)
    gate.enter(HOST_UNIT)
    assert gate._start_ns == world.now_ns, "its start lies in the second bubble"


def test_a_bubble_that_begins_while_it_lies_down_is_not_slept_through(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = CpuGate(world.page)

    def too_early_to_be_woken() -> int:
        world.open(1, 50 * MS)
        monkeypatch.setattr(gate_module, "monotonic_ns", lambda: world.now_ns)
        return world.now_ns

    monkeypatch.setattr(gate_module, "monotonic_ns", too_early_to_be_woken)
    gate.enter(HOST_UNIT)
    assert (world.sleeps, world.words[Field.SIDE_ACTIVITY]) == (0, SideActivity.HOST)


def test_a_wake_up_in_vain_is_counted_and_slept_through(world: World) -> None:
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    world.while_asleep = [lambda: signal.SIGUSR1, lambda: world.open(1, 50 * MS)]
    gate.enter(0)
    assert (world.sleeps, world.words[Field.UNITS_DECLINED]) == (2, 1)


def test_the_end_signal_and_a_dead_daemon_end_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    world.while_asleep = [lambda: signal.SIGTERM]
    with pytest.raises(StopRequested):
        gate.enter(0)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(StopRequested):
        gate.enter(0)


def test_units_numbered_anew_begin_with_host_work_which_asks_too(world: World) -> None:
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    world.while_asleep = [lambda: world.open(1, 20 * MS)]
    gate.enter(0)
    world.work(1 * MS)
    world.close(1)
    world.while_asleep = [lambda: world.open(2, 20 * MS)]
    gate.use(["b"], 1)
    assert world.sleeps == 2, "the bubble had ended"


def test_a_unit_that_never_ran_needs_room(world: World) -> None:
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    world.open(1, world.now_ns + UNKNOWN_COST_NEEDS_NS - 1)
    world.while_asleep = [lambda: world.open(2, world.now_ns + UNKNOWN_COST_NEEDS_NS)]
    gate.enter(0)
    assert world.sleeps == 1


def test_cost_is_cpu_time_rises_fast_falls_slowly_and_is_kept_per_name_and_number_of_trials(world: World) -> None:
    gate = CpuGate(world.page)
    gate.use(["a", "b"], 8)
    world.open(1, 10**15)
    for cpu_ns in (100 * US, 300 * US, 100 * US):
        gate.enter(0)
        world.work(5 * MS, cpu_ns)
        gate.rest()
    assert gate._costs_ns[0] == pytest.approx(195 * US)  # 100 -> 200 -> 195
    gate.use(["b", "a"], 4)
    assert gate._costs_ns[:2] == [0.0, 0.0]
    gate.use(["b", "a"], 8)
    assert gate._costs_ns[1] == pytest.approx(195 * US)


def takes(world: World, gate: CpuGate, ms: float) -> None:
    """Unit 0 runs for so long in a bubble that is long enough."""
    world.open(99, world.now_ns + 10**15)
    gate.enter(0)
    world.work(round(ms * MS))
    gate.rest()


def test_a_unit_longer_than_all_bubbles_is_tried_in_one_of_the_longest_and_named(world: World) -> None:
    gate = CpuGate(world.page)
    gate.use(["0.Linear forward"], 16)
    takes(world, gate, 12)
    longest = 8 * NEARLY_LONGEST
    decline(world, gate, *[3, 8, 3, 5] * 8, 7, longest - 0.1, 7, longest)
    assert gate.take_starved() == [], "not before it has run"
    world.work(11 * MS)
    gate.rest()
    found = Starved(unit="0.Linear forward", trials=16, needs_ns=11 * MS, longest_ns=8 * MS)
    assert gate.take_starved() == [found]
    assert gate.take_starved() == []
    decline(world, gate, *[8] * 32)  # it is still known to be long
    world.work(11 * MS)
    gate.rest()
    gate.use(["another"], 1)
    assert gate.take_starved() == []


def test_one_slow_run_is_forgotten(world: World) -> None:
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    takes(world, gate, 100)
    assert decline(world, gate, *[8] * 32) == 32
    world.work(6 * MS)
    gate.rest()
    assert gate.take_starved() == []
    assert decline(world, gate, 5, 8) == 2, "what it took then is what it is forecast to take"


def test_a_unit_that_fits_the_longest_bubble_of_a_step_waits_for_that(world: World) -> None:
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    takes(world, gate, 8)
    for _ in range(3):
        assert decline(world, gate, *[5] * 30, 9) == 31
        world.work(8 * MS)
        gate.rest()
    assert gate.take_starved() == []


def test_bubbles_that_are_over_before_it_looks_say_nothing_of_its_length(world: World) -> None:
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    takes(world, gate, 4)
    assert decline(world, gate, *[-1] * 100, 5) == 101
    world.work(9 * MS)
    gate.rest()
    assert gate.take_starved() == []


def test_host_work_asks_like_any_unit(world: World) -> None:
    gate = CpuGate(world.page)
    world.while_asleep = [lambda: world.open(1, 50 * MS)]
    gate.enter(HOST_UNIT)
    assert world.sleeps == 1


def test_rest_acknowledges(world: World) -> None:
    gate = CpuGate(world.page)
    world.open(7, 50 * MS)
    gate.enter(HOST_UNIT)
    assert world.words[Field.SIDE_ACTIVITY] == SideActivity.HOST
    gate.rest()
    assert world.words[Field.SIDE_ACTIVITY] == SideActivity.ASLEEP


def test_groups_that_take_turns_are_named_once(world: World, tmp_path: Path) -> None:
    names = tmp_path / "units.jsonl"
    gate = CpuGate(world.page, UnitRecords(tmp_path / "units.bin"))
    for units in (["a"], ["b"], ["a"], ["b"]):
        gate.use(units, 1)
    gate.close()
    assert read_groups(names) == [{"trials": 1, "units": ["a"]}, {"trials": 1, "units": ["b"]}]


def test_units_are_recorded_as_the_report_reads_them(world: World, tmp_path: Path) -> None:
    units, names = tmp_path / "units.bin", tmp_path / "units.jsonl"
    gate = CpuGate(world.page, UnitRecords(units))
    gate.use(["a"], 3)
    world.open(1, 50 * MS)
    start_ns = world.now_ns
    gate.enter(0)
    world.work(2 * MS, 1 * MS)
    gate.enter(HOST_UNIT)
    world.work(1 * MS)
    gate.close()
    assert list(UNIT_RECORD.iter_unpack(units.read_bytes())) == [
        (start_ns, 2 * MS, 1 * MS, 0, 0),
        (start_ns + 2 * MS, 1 * MS, 1 * MS, HOST_UNIT, 0),
    ]
    assert read_groups(names) == [{"trials": 3, "units": ["a"]}]


def test_part_of_a_unit_that_a_killed_side_task_left_is_removed(world: World, tmp_path: Path) -> None:
    units = tmp_path / "units.bin"
    units.write_bytes(UNIT_RECORD.pack(1, 2, 3, 0, 0) + b"half")
    gate = CpuGate(world.page, UnitRecords(units))
    gate.use(["a"], 1)
    world.open(1, 50 * MS)
    gate.enter(0)
    world.work(1 * MS)
    gate.close()
    assert [cpu_ns for _, _, cpu_ns, _, _ in UNIT_RECORD.iter_unpack(units.read_bytes())] == [3, 1 * MS]


def test_names_that_a_full_disk_does_not_take_are_written_later(tmp_path: Path) -> None:
    records = UnitRecords(tmp_path / "units.bin")
    group = records.add_group(4, ["a", "b"])
    names, records._names_file = records._names_file, RotatingFile(Path("/dev/full"))
    records._write()
    records._names_file = names
    records.add_burst(group, 0, 1)
    records.close()
    assert read_groups(tmp_path / "units.jsonl") == [{"trials": 4, "units": ["a", "b", "a … b"]}]


def test_units_of_a_restarted_side_task_keep_their_names(world: World, tmp_path: Path) -> None:
    units, names = tmp_path / "units.bin", tmp_path / "units.jsonl"
    world.open(1, 50 * MS)
    for own in (["a"], ["b", "c"]):
        gate = CpuGate(world.page, UnitRecords(units))
        gate.use(own, 1)
        gate.enter(len(own) - 1)
        world.work(1 * MS)
        gate.close()
        with names.open("a") as file:
            file.write('{"group": 7, "tri')  # as a killed one leaves it
    groups = read_groups(names)
    assert [groups[group]["units"][unit] for *_, unit, group in UNIT_RECORD.iter_unpack(units.read_bytes())] == [
        "a",
        "c",
    ]


def test_threads_that_python_does_not_know_are_found_by_what_they_use_in_a_sleep(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "runs_on_asleep", lambda: False)
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    world.close(1)
    seen = []

    def used(ns: int) -> None:
        seen.append(world.words[Field.SIDE_CHILDREN])
        world.others_ns += ns

    world.while_asleep = [lambda: used(MS // 2), lambda: used(2 * MS), lambda: used(0), lambda: world.open(2, 90 * MS)]
    gate.enter(0)
    assert seen == [0, 0, 1]
    gate.rest()
    assert world.words[Field.SIDE_CHILDREN] == 1, "they may go on at any time"
