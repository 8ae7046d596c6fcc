"""The side task's gate: what it lets start, how it sleeps, what it says about it. The clock and the sleep are given."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import trials.gate as gate_module
from ds_hooks.page import Doing, Field, Page, page_path
from squeezer.record import UNIT
from trials.gate import PageGate
from trials.ledger import HOST_UNIT, NEARLY_LONGEST, UNKNOWN_COST_NEEDS_NS, Starved, StopRequested

US, MS = 1_000, 1_000_000


class World:
    """A page with a main job and a daemon that act while the side task sleeps."""

    def __init__(self, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
        self.page, self.words = page, page.words
        self.now_ns = self.cpu_ns = 10 * MS
        self.sleeps = 0
        self.while_asleep: list[Callable[[], int | None]] = []
        monkeypatch.setattr(gate_module, "monotonic_ns", lambda: self.now_ns)
        monkeypatch.setattr(gate_module, "thread_time_ns", lambda: self.cpu_ns)
        monkeypatch.setattr(gate_module.signal, "sigtimedwait", self._sleep)
        monkeypatch.setattr(gate_module, "ACCOUNT_EVERY_NS", 0)

    def open(self, epoch: int, until_ns: int) -> int:
        self.words[Field.PERMIT_UNTIL_NS] = until_ns
        self.words[Field.BUBBLE] = epoch << 1 | 1
        return signal.SIGUSR1

    def close(self, epoch: int) -> None:
        self.words[Field.BUBBLE] = epoch << 1

    def work(self, wall_ns: int, cpu_ns: int | None = None) -> None:
        self.now_ns += wall_ns
        self.cpu_ns += wall_ns if cpu_ns is None else cpu_ns

    def _sleep(self, _signals: object, _timeout_s: float) -> SimpleNamespace | None:
        self.sleeps += 1
        assert not self.words[Field.SIDE_DOING], "asleep without having acknowledged"
        number = self.while_asleep.pop(0)()
        return None if number is None else SimpleNamespace(si_signo=number)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    page = Page.open(page_path(tmp_path / "pages", 0))
    yield World(page, monkeypatch)
    page.close()


def test_an_open_gate_lets_a_unit_start_without_a_sleep(world: World) -> None:
    gate = PageGate(world.page)
    gate.use(["a", "b"])
    world.open(1, 20 * MS)
    gate.enter(0)
    world.work(1 * MS)
    gate.enter(1)
    gate.rest()
    assert (world.sleeps, world.words[Field.UNITS_RUN], world.words[Field.BUSY_NS]) == (0, 2, 1 * MS)


@pytest.mark.parametrize("shut", ["no bubble", "no permit", "permit over", "does not fit"])
def test_a_shut_gate_sleeps_until_it_is_signalled_and_may_run(world: World, shut: str) -> None:
    gate = PageGate(world.page)
    gate.use(["a"])
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
    assert world.words[Field.SIDE_DOING] == 1
    gate.rest()
    assert world.words[Field.UNITS_RUN] == 2, "what ended before the sleep is counted, too"


def test_a_unit_whose_bubble_ends_and_is_followed_while_it_asks_starts_in_neither(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = PageGate(world.page)
    world.open(1, 50 * MS)

    def the_core_is_taken_away() -> int:
        asked_ns = world.now_ns
        world.close(1)
        world.now_ns += 20 * MS
        world.open(2, 50 * MS)
        monkeypatch.setattr(gate_module, "monotonic_ns", lambda: world.now_ns)
        return asked_ns

    monkeypatch.setattr(gate_module, "monotonic_ns", the_core_is_taken_away)
    world.while_asleep = [lambda: None]
    gate.enter(HOST_UNIT)
    assert gate._start_ns == world.now_ns, "its start lies in the second bubble"


def test_a_bubble_that_begins_while_it_lies_down_is_not_slept_through(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = PageGate(world.page)

    def too_early_to_be_woken() -> int:
        world.open(1, 50 * MS)
        monkeypatch.setattr(gate_module, "monotonic_ns", lambda: world.now_ns)
        return world.now_ns

    monkeypatch.setattr(gate_module, "monotonic_ns", too_early_to_be_woken)
    gate.enter(HOST_UNIT)
    assert (world.sleeps, world.words[Field.SIDE_DOING]) == (0, Doing.HOST)


def test_a_wake_up_in_vain_is_counted_and_slept_through(world: World) -> None:
    gate = PageGate(world.page)
    gate.use(["a"])
    world.while_asleep = [lambda: signal.SIGUSR1, lambda: world.open(1, 50 * MS)]
    gate.enter(0)
    assert (world.sleeps, world.words[Field.UNITS_DECLINED]) == (2, 1)


def test_the_end_signal_and_a_dead_daemon_end_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = PageGate(world.page)
    gate.use(["a"])
    world.while_asleep = [lambda: signal.SIGTERM]
    with pytest.raises(StopRequested):
        gate.enter(0)
    monkeypatch.setattr(gate_module.os, "getppid", lambda: 1)
    world.while_asleep = [lambda: None]
    with pytest.raises(StopRequested):
        gate.enter(0)


def test_a_unit_that_never_ran_needs_room(world: World) -> None:
    gate = PageGate(world.page)
    gate.use(["a"])
    world.open(1, world.now_ns + UNKNOWN_COST_NEEDS_NS - 1)
    world.while_asleep = [lambda: world.open(2, world.now_ns + UNKNOWN_COST_NEEDS_NS)]
    gate.enter(0)
    assert world.sleeps == 1


def test_cost_is_cpu_time_rises_fast_falls_slowly_and_is_kept_per_name_and_number_of_trials(world: World) -> None:
    gate = PageGate(world.page)
    gate.trials = 8
    gate.use(["a", "b"])
    world.open(1, 10**15)
    for cpu_ns in (100 * US, 300 * US, 100 * US):
        gate.enter(0)
        world.work(5 * MS, cpu_ns)
        gate.rest()
    assert gate._costs_ns[0] == pytest.approx(195 * US)  # 100 -> 200 -> 195
    gate.trials = 4
    gate.use(["b", "a"])
    assert gate._costs_ns[:2] == [0.0, 0.0]
    gate.trials = 8
    gate.use(["b", "a"])
    assert gate._costs_ns[1] == pytest.approx(195 * US)


def decline(world: World, gate: PageGate, *left_ms: float) -> int:
    """Ask for unit 0, which takes longer than the bubbles left it; in the last one it starts. Returns the sleeps."""

    def bubble(epoch: int, ms: float) -> Callable[[], int]:
        return lambda: world.open(epoch, world.now_ns + round(ms * MS))

    before = world.sleeps
    world.close(0)
    world.while_asleep = [bubble(epoch, ms) for epoch, ms in enumerate(left_ms, start=1)]
    gate.enter(0)
    assert not world.while_asleep, "it started too early"
    return world.sleeps - before


def takes(world: World, gate: PageGate, ms: float) -> None:
    """Unit 0 runs for so long in a bubble that is long enough."""
    world.open(99, world.now_ns + 10**15)
    gate.enter(0)
    world.work(round(ms * MS))
    gate.rest()


def test_a_unit_longer_than_all_bubbles_is_tried_in_one_of_the_longest_and_named(world: World) -> None:
    gate = PageGate(world.page)
    gate.trials = 16
    gate.use(["0.Linear forward"])
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
    gate.use(["another"])
    assert gate.take_starved() == []


def test_one_slow_run_is_forgotten(world: World) -> None:
    gate = PageGate(world.page)
    gate.use(["a"])
    takes(world, gate, 100)
    assert decline(world, gate, *[8] * 32) == 32
    world.work(6 * MS)
    gate.rest()
    assert gate.take_starved() == []
    assert decline(world, gate, 5, 8) == 2, "what it took then is what it is forecast to take"


def test_a_unit_that_fits_the_longest_bubble_of_a_step_waits_for_that(world: World) -> None:
    gate = PageGate(world.page)
    gate.use(["a"])
    takes(world, gate, 8)
    for _ in range(3):
        assert decline(world, gate, *[5] * 30, 9) == 31
        world.work(8 * MS)
        gate.rest()
    assert gate.take_starved() == []


def test_bubbles_that_are_over_before_it_looks_say_nothing_of_its_length(world: World) -> None:
    gate = PageGate(world.page)
    gate.use(["a"])
    takes(world, gate, 4)
    assert decline(world, gate, *[-1] * 100, 5) == 101
    world.work(9 * MS)
    gate.rest()
    assert gate.take_starved() == []


def test_host_work_asks_like_any_unit(world: World) -> None:
    gate = PageGate(world.page)
    world.while_asleep = [lambda: world.open(1, 50 * MS)]
    gate.enter(HOST_UNIT)
    assert world.sleeps == 1


def test_rest_acknowledges(world: World) -> None:
    gate = PageGate(world.page)
    world.open(7, 50 * MS)
    gate.enter(HOST_UNIT)
    assert world.words[Field.SIDE_DOING] == Doing.HOST
    gate.rest()
    assert world.words[Field.SIDE_DOING] == Doing.ASLEEP


def test_groups_that_take_turns_are_named_once(world: World, tmp_path: Path) -> None:
    names = tmp_path / "units.json"
    gate = PageGate(world.page, None, names)
    for units in (["a"], ["b"], ["a"], ["b"]):
        gate.use(units)
    assert names.read_text() == '{"groups": [{"trials": 0, "units": ["a"]}, {"trials": 0, "units": ["b"]}]}'


def test_units_are_recorded_as_the_report_reads_them(world: World, tmp_path: Path) -> None:
    units, names = tmp_path / "units.bin", tmp_path / "units.json"
    gate = PageGate(world.page, units, names)
    gate.trials = 3
    gate.use(["a"])
    world.open(1, 50 * MS)
    start_ns = world.now_ns
    gate.enter(0)
    world.work(2 * MS, 1 * MS)
    gate.enter(HOST_UNIT)
    world.work(1 * MS)
    gate.close()
    assert list(UNIT.iter_unpack(units.read_bytes())) == [
        (start_ns, 2 * MS, 1 * MS, 0, 0),
        (start_ns + 2 * MS, 1 * MS, 1 * MS, HOST_UNIT, 0),
    ]
    assert names.read_text() == '{"groups": [{"trials": 3, "units": ["a"]}]}'


def known(world: World, gate: PageGate, *costs_ns: int) -> None:
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
    gate = PageGate(world.page)
    gate.use(["a", "b"])
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
    units, names = tmp_path / "units.bin", tmp_path / "units.json"
    gate = PageGate(world.page, units, names)
    gate.use(["a", "b", "c", "d"])
    known(world, gate, 200 * US, 200 * US, 90 * US, 600 * US)
    before = world.words[Field.UNITS_RUN]
    start_ns = world.now_ns
    for unit, cost_ns in enumerate((200 * US, 200 * US, 90 * US, 600 * US)):
        gate.enter(unit)
        world.work(cost_ns)
    gate.close()
    assert world.words[Field.UNITS_RUN] == before + 4
    *_, row, long = UNIT.iter_unpack(units.read_bytes())
    assert row == (start_ns, 490 * US, 490 * US, 4, 0), "no longer than the grain"
    assert long == (start_ns + 490 * US, 600 * US, 600 * US, 3, 0), "a longer unit has its own"
    assert names.read_text() == json.dumps({"groups": [{"trials": 0, "units": ["a", "b", "c", "d", "a … c"]}]})
    gate = PageGate(world.page)
    gate.use(["a"])
    gate.use(["a"])
    assert len(gate._groups) == 1


@pytest.mark.parametrize("why", ["another bubble", "no bubble", "permit over", "does not fit"])
def test_a_short_unit_joins_none_where_it_may_not_start(world: World, why: str) -> None:
    gate = PageGate(world.page)
    gate.use(["a", "b"])
    known(world, gate, 100 * US, 100 * US)
    gate.enter(0)
    world.work(100 * US)
    slept = why != "another bubble"
    if slept:
        world.while_asleep = [lambda: world.open(7, 10**15)]
    if why == "no bubble":
        world.close(1)
    else:
        world.open(
            2 if why == "another bubble" else 1,
            world.now_ns + {"permit over": -1, "does not fit": 99 * US}.get(why, MS),
        )
    gate.enter(1)
    assert world.sleeps == slept
    assert gate._start_ns == world.now_ns and not gate._row, "it has a record of its own"


def test_what_a_row_takes_is_shared_out_among_its_forecasts(world: World) -> None:
    gate = PageGate(world.page)
    gate.use(["a", "b"])
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
    gate = PageGate(world.page)
    gate.use(["a", "b"])
    known(world, gate, 12 * MS, 10 * US)
    decline(world, gate, *[0.3] * 32)
    gate.enter(1)
    assert not gate._row


def test_units_that_take_no_time_stay_known(world: World) -> None:
    gate = PageGate(world.page)
    gate.use(["a", "b"])
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
    gate = PageGate(world.page)
    gate.use(["a", "b"])
    known(world, gate, 200 * US, 200 * US)
    for _ in range(1000):  # as in an evaluation of many batches
        for unit in range(2):
            gate.enter(unit)
            world.work(took_us * US)
    gate.rest()
    for cost_ns in gate._costs_ns[:2]:
        assert max(gate_module.LEAST_COST_NS, 0.9 * took_us * US) <= cost_ns <= max(200, 1.1 * took_us) * US
