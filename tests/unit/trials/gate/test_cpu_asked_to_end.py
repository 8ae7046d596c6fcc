"""What the CPU's gate lets a side task do that is asked to end."""

import os
import signal

import pytest

import trials.gate.cpu as gate_module
from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.processes.identity import start_time
from tests.support.cpu_world import MS, World
from trials.gate.base import HOST_UNIT, StopRequested
from trials.gate.cpu import CpuGate


@pytest.fixture
def world(cpu_world: World) -> World:
    return cpu_world


def test_asked_to_end_it_finishes_what_goes_on_once_no_main_job_is_there(world: World) -> None:
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    gate.finishes = True
    world.while_asleep = [lambda: signal.SIGTERM]
    for _ in range(3):
        gate.enter(0)
        world.work(1 * MS)
    assert gate.is_alone() and world.sleeps == 1
    gate.finishes = False
    with pytest.raises(StopRequested):
        gate.enter(HOST_UNIT)


def test_asked_to_end_beside_a_main_job_it_finishes_in_bubbles_only_and_not_for_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    gate.finishes = True
    world.words[Field.MAIN_PID], world.words[Field.MAIN_START] = os.getpid(), start_time(os.getpid())
    world.while_asleep = [lambda: signal.SIGTERM, lambda: None, lambda: world.open(1, 20 * MS)]
    gate.enter(0)
    assert not gate.is_alone() and world.sleeps == 3
    world.close(1)
    world.while_asleep = [lambda: world.work(round(gate_module.FINISHES_S * 1e9) + MS)]
    with pytest.raises(StopRequested):
        gate.enter(0)
    assert world.words[Field.UNITS_RUN] == 1
    world.words[Field.MAIN_PID] = 0
    assert not gate.is_alone(), "its hooks have left, but its process lives"
    world.words[Field.MAIN_PID], world.words[Field.MAIN_START] = os.getpid(), start_time(os.getpid()) + 1
    assert gate.is_alone(), "its process has ended, and another has its number"


def test_asked_to_end_it_runs_nothing_beside_a_job_that_has_begun_again(world: World) -> None:
    """Its rank imports, so the page does not name it yet; but its daemon waits already."""
    gate = CpuGate(world.page)
    gate.use(["a"], 1)
    gate.finishes = True
    world.words[Field.NEXT_DAEMON] = os.getpid()
    past_ns = round(gate_module.FINISHES_S * 1e9) + MS
    world.while_asleep = [lambda: signal.SIGTERM, lambda: None, lambda: world.work(past_ns)]
    with pytest.raises(StopRequested):
        gate.enter(0)
    assert not gate.is_alone(), "it saves nothing beside it"
    assert world.words[Field.UNITS_RUN] == 0
