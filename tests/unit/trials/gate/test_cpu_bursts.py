"""When the CPU gate accounts for units: short ones in bursts, known ones many at once. Clock and sleep are fakes."""

from pathlib import Path

import pytest

import trials.gate.cpu as gate_module
from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.unit_record import UNIT_RECORD
from squeezer.records.reader import read_groups
from tests.support.cpu_world import MS, US, World, decline
from trials.gate.base import HOST_UNIT
from trials.gate.cpu import BURSTS_PER_LESSON, CpuGate
from trials.gate.unit_costs import LEAST_COST_NS
from trials.gate.unit_records import UnitRecords


@pytest.fixture
def world(cpu_world: World) -> World:
    return cpu_world


def known(world: World, gate: CpuGate, *costs_ns: int) -> None:
    """Each unit has run once, by itself."""
    world.open(1, 10**15)
    for unit, cost_ns in enumerate(costs_ns):
        gate.enter(unit)
        world.work(cost_ns)
        gate.rest()


def test_known_units_are_accounted_for_many_at_once_and_new_ones_right_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "ACCOUNT_EVERY_NS", 20 * MS)
    gate = CpuGate(world.page)
    gate.use(["a", "b"], 1)
    known(world, gate, 2 * MS, 4 * MS)
    world.open(2, 10**15)
    ran, busy_ns = world.words[Field.UNITS_RUN], world.words[Field.BUSY_NS]
    assert (ran, busy_ns) == (2, 6 * MS)
    for _ in range(9):
        gate.enter(0)
        world.work(2 * MS)
        gate.rest()
    assert world.words[Field.UNITS_RUN] == ran
    gate.enter(0)
    world.work(2 * MS)
    gate.rest()
    assert (world.words[Field.UNITS_RUN], world.words[Field.BUSY_NS]) == (ran + 10, busy_ns + 20 * MS)
    gate.enter(1)
    world.work(1 * MS)
    gate.close()
    assert world.words[Field.UNITS_RUN] == ran + 11, "and what is left at the end"


def test_short_units_in_a_row_share_a_record_and_each_still_asks(world: World, tmp_path: Path) -> None:
    units, names = tmp_path / "units.bin", tmp_path / "units.jsonl"
    gate = CpuGate(world.page, UnitRecords(units))
    gate.use(["a", "b", "c", "d"], 1)
    known(world, gate, 200 * US, 200 * US, 90 * US, 600 * US)
    before = world.words[Field.UNITS_RUN]
    start_ns = world.now_ns
    for unit, cost_ns in enumerate((200 * US, 200 * US, 90 * US, 600 * US)):
        gate.enter(unit)
        world.work(cost_ns)
    gate.close()
    assert world.words[Field.UNITS_RUN] == before + 4
    *_, burst, long = UNIT_RECORD.iter_unpack(units.read_bytes())
    assert burst == (start_ns, 490 * US, 490 * US, 4, 0), "no longer than the grain"
    assert long == (start_ns + 490 * US, 600 * US, 600 * US, 3, 0), "a longer unit has its own"
    assert read_groups(names) == [{"trials": 1, "units": ["a", "b", "c", "d", "a … c"]}]
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    gate.use(["a"], 1)
    assert gate._group == 0


def test_rows_are_longer_where_a_unit_may_be_stopped(world: World, tmp_path: Path) -> None:
    world.words[Field.PREEMPTIVE] = 1
    units = tmp_path / "units.bin"
    gate = CpuGate(world.page, UnitRecords(units))
    gate.use(["a", "b", "c"], 1)
    known(world, gate, 8 * MS, 12 * MS, 1 * MS)
    start_ns = world.now_ns
    for unit, cost_ns in enumerate((8 * MS, 12 * MS, 1 * MS)):
        gate.enter(unit)
        world.work(cost_ns)
    gate.close()
    *_, burst, last = UNIT_RECORD.iter_unpack(units.read_bytes())
    assert burst == (start_ns, 20 * MS, 20 * MS, 3, 0)
    assert last == (start_ns + 20 * MS, 1 * MS, 1 * MS, 2, 0)


def test_host_work_joins_a_row_only_where_it_may_be_stopped(world: World, tmp_path: Path) -> None:
    for preemptive, expected in ((0, [(0, 1), (HOST_UNIT, 1), (1, 1)]), (1, [(2, 3)])):
        world.words[Field.PREEMPTIVE] = preemptive
        units = tmp_path / f"{preemptive}.bin"
        gate = CpuGate(world.page, UnitRecords(units))
        gate.use(["a", "b"], 1)
        known(world, gate, 1 * MS, 1 * MS)
        for unit in (0, HOST_UNIT, 1):
            gate.enter(unit)
            world.work(1 * MS)
        gate.close()
        _, _, *found = UNIT_RECORD.iter_unpack(units.read_bytes())
        assert [(unit, wall_ns // MS) for _, wall_ns, _, unit, _ in found] == expected
    assert read_groups(tmp_path / "1.jsonl") == [{"trials": 1, "units": ["a", "b", "a … b"]}]


def test_a_row_that_ends_with_host_work_is_named_by_its_last_unit(world: World, tmp_path: Path) -> None:
    world.words[Field.PREEMPTIVE] = 1
    gate = CpuGate(world.page, UnitRecords(tmp_path / "units.bin"))
    gate.use(["a", "b"], 1)
    known(world, gate, 1 * MS, 1 * MS)
    for unit in (0, 1, HOST_UNIT, HOST_UNIT):
        gate.enter(unit)
        world.work(1 * MS)
    gate.close()
    assert read_groups(tmp_path / "units.jsonl") == [{"trials": 1, "units": ["a", "b", "a … b"]}]


def test_rows_with_host_work_teach_nothing_and_some_are_kept_without_it(world: World) -> None:
    world.words[Field.PREEMPTIVE] = 1
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    known(world, gate, 1 * MS)
    costs_ns = []
    for _ in range(2 * BURSTS_PER_LESSON):
        gate.enter(0)
        world.work(1 * MS)
        gate.enter(0)
        world.work(1 * MS)
        gate.enter(HOST_UNIT)
        world.work(300 * MS)  # as when models are built
        gate.rest()
        costs_ns.append(gate._costs_ns[0])
    assert costs_ns == [pytest.approx(1 * MS)] * len(costs_ns), "the units themselves take what they took"
    for _ in range(2 * BURSTS_PER_LESSON):
        for unit in (0, 0, HOST_UNIT):
            gate.enter(unit)
            world.work(1500 * US)
        gate.rest()
    assert 1.3 * MS < gate._costs_ns[0] <= 1.5 * MS


def test_a_row_ends_where_units_are_numbered_anew(world: World, tmp_path: Path) -> None:
    world.words[Field.PREEMPTIVE] = 1
    units, names = tmp_path / "units.bin", tmp_path / "units.jsonl"
    gate = CpuGate(world.page, UnitRecords(units))
    gate.use(["a", "b"], 1)
    known(world, gate, 1 * MS, 1 * MS)
    for unit in (0, 1, HOST_UNIT):
        gate.enter(unit)
        world.work(1 * MS)
    gate.use(["c"], 1)
    world.work(2 * MS)
    gate.enter(0)
    world.work(1 * MS)
    gate.close()
    _, _, burst, host, last = UNIT_RECORD.iter_unpack(units.read_bytes())
    assert [(each[1] // MS, *each[3:]) for each in (burst, host, last)] == [(3, 2, 0), (2, HOST_UNIT, 1), (1, 0, 1)]
    assert [group["units"] for group in read_groups(names)] == [["a", "b", "a … b"], ["c"]]


@pytest.mark.parametrize("why", ["another bubble", "no bubble", "permit over", "does not fit"])
def test_a_short_unit_joins_none_where_it_may_not_start(world: World, why: str) -> None:
    gate = CpuGate(world.page)
    gate.use(["a", "b"], 1)
    known(world, gate, 100 * US, 100 * US)
    world.open(2, world.now_ns + {"permit over": 150 * US, "does not fit": 199 * US}.get(why, MS))
    gate.enter(0)
    world.work(160 * US if why == "permit over" else 100 * US)
    slept = why != "another bubble"
    if slept:
        world.while_asleep = [lambda: world.open(7, 10**15)]
    if why == "no bubble":
        world.close(2)
    elif why == "another bubble":
        world.open(3, world.now_ns + MS)
    gate.enter(1)
    assert world.sleeps == slept
    assert gate._start_ns == world.now_ns and not gate._burst, "it has a record of its own"


def test_a_row_that_was_stopped_goes_on_in_any_bubble_and_in_none_without(world: World) -> None:
    world.words[Field.PREEMPTIVE] = 1
    gate = CpuGate(world.page)
    gate.use(["a", "b", "c"], 1)
    known(world, gate, 2 * MS, 1 * MS, 1 * MS)
    gate.enter(0)
    world.work(2 * MS)
    world.open(3, world.now_ns)  # it was stopped, and goes on in a later bubble, whatever that one's permit
    gate.enter(1)
    assert (gate._burst, world.sleeps) == ([1], 0)
    world.work(1 * MS)
    world.close(3)  # and whoever should have stopped it did not
    world.while_asleep = [lambda: world.open(7, 10**15)]
    gate.enter(2)
    assert world.sleeps == 1 and not gate._burst


def test_what_a_row_takes_is_shared_out_among_its_forecasts(world: World) -> None:
    gate = CpuGate(world.page)
    gate.use(["a", "b"], 1)
    known(world, gate, 100 * US, 300 * US)
    gate.enter(0)
    gate.enter(1)
    world.work(2400 * US)  # six times as long
    gate.rest()
    assert gate._costs_ns[:2] == [pytest.approx(350 * US), pytest.approx(1050 * US)]
    gate.enter(0)
    world.work(100 * US)
    gate.enter(1)  # together they are longer than a grain now
    assert gate._start_ns == world.now_ns


def test_a_unit_that_is_tried_in_vain_is_measured_by_itself(world: World) -> None:
    gate = CpuGate(world.page)
    gate.use(["a", "b"], 1)
    known(world, gate, 12 * MS, 10 * US)
    decline(world, gate, *[0.3] * 32)
    gate.enter(1)
    assert not gate._burst


def test_units_that_take_no_time_stay_known(world: World) -> None:
    gate = CpuGate(world.page)
    gate.use(["a", "b"], 1)
    world.open(1, 20 * MS)
    for _ in range(1000):
        for unit in (0, 1):
            gate.enter(unit)
        gate.rest()
    assert world.words[Field.UNITS_RUN] == 2000 and not world.sleeps


@pytest.mark.parametrize("took_us", [0, 5, 200, 2000])
def test_many_rows_of_the_same_units_before_a_rest_teach_no_more_than_one_after_another(
    world: World, took_us: int
) -> None:
    gate = CpuGate(world.page)
    gate.use(["a", "b"], 1)
    known(world, gate, 200 * US, 200 * US)
    for _ in range(1000):  # as in an evaluation of many batches
        for unit in range(2):
            gate.enter(unit)
            world.work(took_us * US)
    gate.rest()
    for cost_ns in gate._costs_ns[:2]:
        assert max(LEAST_COST_NS, 0.9 * took_us * US) <= cost_ns <= max(200, 1.1 * took_us) * US


def test_names_are_written_with_the_units_that_bear_them_and_no_sooner(world: World, tmp_path: Path) -> None:
    units, names = tmp_path / "units.bin", tmp_path / "units.jsonl"
    gate = CpuGate(world.page, UnitRecords(units))
    gate.use(["a", "b", "c"], 1)
    known(world, gate, 200 * US, 200 * US, 200 * US)
    at = 0
    while not units.stat().st_size:
        assert not names.stat().st_size, "not with each burst"
        gate.enter(at % 3)
        world.work(200 * US)
        at += 1
    numbers = {unit for *_, unit, _ in UNIT_RECORD.iter_unpack(units.read_bytes())}
    (group,) = read_groups(names)
    assert max(numbers) == len(group["units"]) - 1 > 2
    gate.close()
