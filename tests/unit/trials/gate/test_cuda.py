"""The gate of a device with streams: what it queues when, and what it says. Device, clock and sleep are made up."""

import ctypes
import os
import signal
import threading

import pytest

from ds_hooks.shared.device_uuid import write_device_uuid
from ds_hooks.shared.forced_gate import force_gate
from ds_hooks.shared.page.layout import PAGE_BYTES, DeviceGate, Field, SideActivity
from ds_hooks.shared.page.plan import plan_slot
from tests.support.cuda_world import MS, OFFSET, US, World, learn
from trials.gate.base import HOST_UNIT, GateError, StopRequested
from trials.gate.unit_costs import UNKNOWN_COST_NEEDS_NS

GATE_CALLS = ("register", "create_event", "record", "wait_for_words", "is_done", "elapsed_ns", "unregister")


def test_a_unit_that_is_queued_ahead_starts_when_the_device_says_so(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS)
    begin_ns = world.now_ns + 5 * MS
    world.bubble(1, 5 * MS, 8 * MS)
    world.run(gate, 0, 1 * MS)
    assert world.now_ns < begin_ns, "the host does not wait for the bubble"
    world.pass_time(9 * MS)
    assert world.kernels == [("0", begin_ns, begin_ns + 1 * MS)]


def test_at_most_two_units_are_queued_and_the_third_waits_for_the_first_to_end(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 2 * MS)
    begin_ns = world.now_ns + 5 * MS
    world.bubble(1, 5 * MS, 30 * MS)
    for _ in range(3):
        world.run(gate, 0, 2 * MS)
    assert begin_ns + 2 * MS <= world.now_ns < begin_ns + 2.2 * MS
    world.pass_time(20 * MS)
    assert [start for _, start, _ in world.kernels] == [begin_ns, begin_ns + 2 * MS, begin_ns + 4 * MS]
    assert world.words[Field.UNITS_RUN] == 1, "what has ended is noted when the gate is asked"


def test_a_unit_that_comes_late_waits_for_the_next_bubble_though_this_one_is_open(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 2 * MS, 3 * MS)
    world.bubble(1, 1 * MS, 20 * MS, 7 * MS)
    world.run(gate, 0, 5 * MS)  # it was forecast to take 2 ms, so 2 of the permit's 7 ms are left
    world.run(gate, 1, 3 * MS)
    next_ns = world.now_ns + 40 * MS
    world.at(30 * MS, lambda: world.bubble(2, 10 * MS, 20 * MS, 7 * MS))
    gate.settle()
    (first, _), (second, start_ns) = [(name, start) for name, start, _ in world.kernels]
    assert (first, second) == ("0", "1") and start_ns == next_ns


def test_what_a_unit_has_run_already_makes_room_for_the_next(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 4 * MS, 2 * MS)
    begin_ns = world.now_ns + 1 * MS
    world.bubble(1, 1 * MS, 7 * MS)
    world.run(gate, 0, 4 * MS)
    for look_ns in (900 * US, 200 * US):  # just before the bubble and just after its begin
        world.pass_time(look_ns)
        gate.rest()
    world.pass_time(2 * MS)
    world.run(gate, 1, 2 * MS)
    assert world.now_ns < begin_ns + 3 * MS, "it is queued while the first one runs"
    world.pass_time(10 * MS)
    assert [start for _, start, _ in world.kernels] == [begin_ns, begin_ns + 4 * MS]


@pytest.mark.parametrize("queued", [0, 1])
def test_a_unit_that_does_not_fit_is_not_queued_and_starts_in_the_next_bubble(world: World, queued: int) -> None:
    gate = world.gate()
    learn(world, gate, 4 * MS, 3 * MS)
    world.bubble(1, 1 * MS, 6 * MS)
    world.run(gate, 0, 4 * MS)
    if not queued:
        world.pass_time(5 * MS + 100 * US)
    second_ns = world.now_ns + 20 * MS
    world.at(10 * MS, lambda: world.bubble(2, second_ns - world.now_ns, 6 * MS))
    world.run(gate, 1, 3 * MS)
    world.pass_time(second_ns - world.now_ns + 5 * MS)
    assert [(name, start) for name, start, _ in world.kernels][1:] == [("1", second_ns)]
    assert world.words[Field.UNITS_DECLINED] == 1


@pytest.mark.parametrize(("lasts_ms", "starts_ms"), [(20, 8), (7, 60)])
def test_a_bubble_that_outlives_its_permit_is_used_again(world: World, lasts_ms: int, starts_ms: int) -> None:
    gate = world.gate()
    gate.use(["a", "b"], 1)
    permit_ns = 1500 * US
    plan_slot(world.page.words, 3, permit_ns, ((4 * MS, 4500 * US), (8 * MS, 15 * MS)))
    start_ns = world.now_ns
    world.bubble(1, 0, lasts_ms * MS, permit_ns=permit_ns)
    world.at(lasts_ms * MS, lambda: world.bubble(2, (60 - lasts_ms) * MS, 20 * MS))
    world.run(gate, 0, 2 * MS)
    world.pass_time(10 * US)
    world.run(gate, 1, 2 * MS)
    gate.rest()
    world.pass_time(100 * MS)
    (_, first_ns, _), (_, second_ns, _) = world.kernels
    assert first_ns - start_ns < MS
    assert starts_ms * MS <= second_ns - start_ns < (starts_ms + 2) * MS


def test_what_is_queued_counts_before_what_asks(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 4 * MS, 3 * MS)
    world.due(1, 7 * MS - 1)
    world.run(gate, 0, 4 * MS)
    world.signals.append(signal.SIGTERM)
    with pytest.raises(StopRequested):
        gate.enter(1)
    world.due(1, 7 * MS)
    world.run(gate, 1, 3 * MS)


def test_a_close_between_two_queued_units_holds_the_second_back_for_the_next_bubble(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS, 1 * MS)
    world.bubble(1, 1 * MS, 3 * MS)
    world.run(gate, 0, 4 * MS)  # it takes longer than it was forecast to
    world.run(gate, 1, 1 * MS)
    second_ns = world.now_ns + 20 * MS
    world.at(10 * MS, lambda: world.bubble(2, second_ns - world.now_ns, 6 * MS))
    world.pass_time(25 * MS)
    assert [(name, start) for name, start, _ in world.kernels][1:] == [("1", second_ns)]


def test_a_bubble_is_taken_to_have_begun_when_it_was_last_seen_shut(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 3 * MS)
    world.bubble(1, 2 * MS, 10 * MS, 6 * MS)
    gate.rest()  # a look
    world.pass_time(5 * MS)  # 3 ms of 6 would be left, but for all we know the bubble may be 5 ms old
    world.signals.append(signal.SIGTERM)
    with pytest.raises(StopRequested):
        gate.enter(0)
    learn(world, gate, 1 * MS)
    world.run(gate, 0, 1 * MS)
    assert world.words[Field.BUBBLE] & 1


def test_nothing_starts_in_a_bubble_that_nobody_saw_begin(world: World) -> None:
    world.open(4, 50 * MS)
    gate = world.gate()
    learn(world, gate, 1 * MS)
    world.signals.append(signal.SIGTERM)
    with pytest.raises(StopRequested):
        gate.enter(0)
    assert world.kernels == []


def test_a_unit_that_never_ran_needs_room(world: World) -> None:
    gate = world.gate()
    gate.use(["a"], 1)
    world.due(1, UNKNOWN_COST_NEEDS_NS - 1)
    world.signals.append(signal.SIGTERM)
    with pytest.raises(StopRequested):
        gate.enter(0)
    world.due(1, UNKNOWN_COST_NEEDS_NS)
    gate.enter(0)


@pytest.mark.parametrize("how", ["signal", "orphan"])
def test_the_end_signal_and_a_dead_daemon_end_it(world: World, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    gate = world.gate()
    if how == "signal":
        world.signals.append(signal.SIGTERM)
    else:
        monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(StopRequested):
        gate.enter(HOST_UNIT)


def test_it_sleeps_long_where_nothing_is_due_and_briefly_where_something_is(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS)
    world.pass_time(1000 * MS)
    world.at(1600 * MS, lambda: world.signals.append(signal.SIGUSR1))
    world.at(1610 * MS, lambda: world.bubble(1, 5 * MS, 5 * MS))
    gate.enter(0)
    assert world.naps[:4] == [0.5] * 4, "until the signal came"
    assert max(world.naps[5:]) <= 0.5
    world.naps.clear()
    learn(world, gate, 6 * MS)
    world.at(7 * MS, lambda: world.bubble(2, 20 * MS, 9 * MS))
    gate.enter(0)
    assert 0 < max(world.naps) < 0.001


def test_it_says_that_it_sleeps_while_nothing_runs_and_not_before(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 2 * MS, 9 * MS)
    world.bubble(1, 1 * MS, 4 * MS)
    world.run(gate, 0, 2 * MS)
    assert world.words[Field.SIDE_ACTIVITY] == SideActivity.UNIT
    seen: list[tuple[int, int]] = []
    for ms in range(1, 8):
        world.at(ms * MS + 500 * US, lambda: seen.append((world.now_ns, world.words[Field.SIDE_ACTIVITY])))
    world.at(8 * MS, lambda: world.signals.append(signal.SIGTERM))
    with pytest.raises(StopRequested):
        gate.enter(1)
    assert [doing for _, doing in seen] == [SideActivity.UNIT] * 2 + [SideActivity.ASLEEP] * 5


def test_what_waits_on_the_device_is_asleep(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 2 * MS)
    world.due(1, 9 * MS)
    world.run(gate, 0, 2 * MS)
    gate.rest()
    assert world.words[Field.SIDE_ACTIVITY] == SideActivity.ASLEEP
    world.open(1, 9 * MS)
    gate.rest()
    assert world.words[Field.SIDE_ACTIVITY] == SideActivity.UNIT


def test_what_runs_on_after_its_bubble_is_told_with_its_slot(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS, 1 * MS)
    world.bubble(1, 1 * MS, 3 * MS)
    world.run(gate, 0, 1 * MS)
    world.run(gate, 1, 5 * MS)  # until 3 ms after the end
    world.at(10 * MS, lambda: world.bubble(2, 1 * MS, 3 * MS))
    world.run(gate, 0, 1 * MS)
    world.run(gate, 0, 1 * MS)
    ((slot, overrun_ns),) = world.overruns
    assert slot == 3
    assert overrun_ns == pytest.approx(3 * MS, rel=0.05)


def test_a_forced_gate_lets_through_what_is_queued_and_nothing_more(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS)
    world.due(1, 9 * MS)
    world.run(gate, 0, 1 * MS, "queued")
    world.words[Field.DEVICE_GATE] = DeviceGate.FORCED
    world.at(5 * MS, lambda: world.signals.append(signal.SIGTERM))
    with pytest.raises(StopRequested):
        world.run(gate, 0, 1 * MS, "too late")
    assert [name for name, _, _ in world.kernels] == ["queued"]
    assert gate.close()
    assert world.registered == 0


def test_what_missed_its_bubble_starts_in_none_that_is_much_too_short(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 4 * MS)
    world.due(1, 9 * MS)
    world.run(gate, 0, 4 * MS, "first")
    world.run(gate, 0, 4 * MS, "second")
    world.bubble(1, 1 * MS, 2 * MS, 9 * MS)  # the first one runs on
    world.bubble(2, 20 * MS, 1 * MS, 1 * MS)
    world.bubble(3, 40 * MS, 9 * MS, 9 * MS)
    world.bubble(4, 60 * MS, 9 * MS, 9 * MS)
    begin_ns = world.now_ns
    world.run(gate, 0, 1 * MS, "third")
    world.pass_time(80 * MS)
    starts_ms = {name: (start - begin_ns) / MS for name, start, _ in world.kernels}
    assert starts_ms["second"] >= 40, "not in the one that begins at 20"


def test_it_lets_go_of_the_page_when_the_device_has(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS)
    world.bubble(1, 50 * MS, 9 * MS)
    world.run(gate, 0, 1 * MS)
    assert gate.close()
    assert (world.registered, len(world.kernels), world.words[Field.UNITS_RUN]) == (0, 1, 1)


def test_what_waits_at_the_end_is_waited_for(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS)
    world.due(1, 9 * MS)
    world.run(gate, 0, 1 * MS)
    forced_ns = world.now_ns + 30 * MS

    def force() -> None:
        force_gate(world.words)

    world.at(30 * MS, force)
    assert gate.close()
    assert (world.now_ns > forced_ns, world.registered, len(world.kernels)) == (True, 0, 1)


@pytest.mark.parametrize("call", GATE_CALLS)
@pytest.mark.parametrize("after", range(5))
def test_a_refused_call_shuts_the_gate_for_good(world: World, call: str, after: int) -> None:
    world.fails[call] = after
    entered = 0
    gate = None
    world.due(1, 10**9)
    world.at(1 * MS, lambda: world.open(1, 10**9))
    try:
        gate = world.gate()
        for _ in range(12):
            gate.enter(HOST_UNIT)
            entered += 1
    except GateError as error:
        assert call in str(error)
        fell = len(world.kernels)
        world.fails.clear()
        if gate is not None:
            for ask in (gate.rest, lambda: gate.enter(HOST_UNIT)):
                with pytest.raises(GateError, match=call):
                    ask()
            assert not gate.close(), "nobody knows what the device still needs"
        world.pass_time(50 * MS)
        assert len(world.kernels) == fell
        return
    assert call in ("register", "create_event", "unregister") and entered == 12
    assert gate is not None
    assert gate.close() == (call != "unregister" or after > 0)


def test_a_device_that_does_not_wait_is_found_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "wait_for_words", lambda *_: None)
    with pytest.raises(GateError, match="does not wait"):
        world.gate()


def test_a_device_that_never_sees_the_page_is_found_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = ctypes.create_string_buffer(PAGE_BYTES)
    monkeypatch.setattr(world, "register", lambda *_: ctypes.addressof(elsewhere) + OFFSET)
    with pytest.raises(GateError, match="does not wait"):
        world.gate()


@pytest.mark.parametrize(
    ("theirs", "ours", "same"),
    [(0, 5, True), (5, 0, True), (2**127 + 2**63 + 1, 2**127 + 2**63 + 1, True), (2**127 + 5, 5, False), (4, 5, False)],
)
def test_a_side_task_on_another_device_than_the_main_job_never_runs(
    world: World, theirs: int, ours: int, same: bool
) -> None:
    write_device_uuid(world.words, theirs)
    gate = world.gate(device_uuid=ours)
    world.due(1, 10**9)
    if same:
        gate.enter(HOST_UNIT)
    else:
        with pytest.raises(GateError, match="the main job's device is"):
            gate.enter(HOST_UNIT)


def test_another_thread_is_made_known_to_the_device_once(world: World) -> None:
    gate = world.gate()
    world.due(1, 10**9)
    gate.enter(HOST_UNIT)
    assert world.adopted == 0

    def backward() -> None:
        gate.rest()
        gate.rest()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert world.adopted == 1
