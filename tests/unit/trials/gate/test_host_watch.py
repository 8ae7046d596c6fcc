"""What becomes of units for which bubbles have become too short, also where the driver holds the host; all made up."""

import threading
from pathlib import Path
from typing import Any

import pytest

from ds_hooks.shared.page.layout import DeviceGate, Field
from tests.support.cuda_world import MS, World, learn
from tests.support.paths import ROOT
from tests.support.sandbox import wait_for
from trials.gate.base import GateError
from trials.gate.cuda import CudaGate
from trials.gate.host_watch import where_is


def too_long_for_every_bubble(world: World) -> CudaGate:
    """A gate with two units on the device whose bubbles never come."""
    gate = world.gate()
    learn(world, gate, 4 * MS)
    world.due(1, 9 * MS)
    for name in ("too long now", "behind it"):
        world.run(gate, 0, 4 * MS, name)
    for epoch in range(1, 50):
        world.bubble(epoch, epoch * 10 * MS, 2 * MS, 1 * MS)
    return gate


def test_units_that_no_bubble_lets_start_any_more_pass_in_one_and_shut_the_gate_for_good(world: World) -> None:
    gate, begin_ns = too_long_for_every_bubble(world), world.now_ns
    with pytest.raises(GateError, match="too long for every bubble that came since"):
        world.run(gate, 0, 4 * MS, "never")
    assert [name for name, _, _ in world.kernels] == ["too long now", "behind it"]
    into_its_bubble_ms = (world.kernels[0][1] - begin_ns) / MS % 10
    assert into_its_bubble_ms < 1, "it began with a bubble"
    assert not gate.close() and not world._work, "nothing waits on the device"
    assert world.words[Field.DEVICE_GATE] == DeviceGate.CLOSED


def test_the_same_where_the_driver_holds_the_host(world: World, caplog: pytest.LogCaptureFixture) -> None:
    gate = too_long_for_every_bubble(world)
    seconds: float | None = 0.0
    for _ in range(600):  # the thread that trains waits for both, somewhere in the driver
        seconds = gate.look_for_host()
        world.pass_time(1 * MS)
    assert [name for name, _, _ in world.kernels] == ["too long now", "behind it"] and seconds is not None
    assert __file__ in caplog.text
    with pytest.raises(GateError, match="too long for every bubble that came since"):
        gate.settle()
    assert gate.look_for_host() is None


def test_what_is_left_of_a_permit_is_shown_while_the_driver_holds_the_host(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS, 5 * MS)
    world.bubble(1, 0, 10 * MS)
    world.bubble(2, 40 * MS, 10 * MS)
    begin_ns = world.now_ns
    world.run(gate, 0, 7 * MS, "longer than forecast")
    world.run(gate, 1, 5 * MS, "late")
    for _ in range(60):
        gate.look_for_host()
        world.pass_time(1 * MS)
    assert [(name, round((start - begin_ns) / MS)) for name, start, _ in world.kernels] == [
        ("longer than forecast", 0),
        ("late", 40),
    ]


def test_what_a_slow_host_launches_after_the_permit_waits_for_the_next_bubble_though_this_one_is_open(
    world: World,
) -> None:
    gate, begin_ns = world.gate(), world.now_ns
    learn(world, gate, 2 * MS)
    world.bubble(1, 0, 30 * MS, permit_ns=4 * MS)
    world.bubble(2, 50 * MS, 20 * MS)
    world.run(gate, 0, 1 * MS, "first")
    for ms in range(60):
        gate.look_for_host()
        if ms == 8:
            world._work.append(("second", 1 * MS, 0))
        world.pass_time(1 * MS)
    starts_ms = {name: round((start - begin_ns) / MS) for name, start, _ in world.kernels}
    assert starts_ms == {"first": 0, "second": 50}


def run_in(file: Path, code: str, **names: object) -> Any:
    """The function `f` of `code`, as if that stood in `file`."""
    scope: dict[str, Any] = dict(names)
    exec(compile(code, str(file), "exec"), scope)
    return scope["f"]


@pytest.mark.parametrize("is_the_users", [True, False])
def test_the_users_innermost_line_is_named_or_else_the_innermost(is_the_users: bool, tmp_path: Path) -> None:
    held, go_on = threading.Event(), threading.Event()
    ours = run_in(ROOT / "trials" / "ours.py", "def f(held, go_on):\n    held.set()\n    go_on.wait()")
    file = tmp_path / "study.py" if is_the_users else ROOT / "trials" / "group.py"
    called = run_in(file, "def f(*events):\n    ours(*events)", ours=ours)
    thread = threading.Thread(target=called, args=(held, go_on), daemon=True)
    thread.start()
    held.wait()
    said = f"{file}:2 " if is_the_users else "threading.py:"
    wait_for(lambda: said in where_is(thread.ident or 0), f"the thread in {said}")
    go_on.set()
    thread.join()
