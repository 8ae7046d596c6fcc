"""Looks at a device's meters: how often, and what follows from them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_hooks.shared.device_uuid import write_device_uuid
from ds_hooks.shared.page.layout import Field
from squeezer.config import DeviceTable
from squeezer.daemon.device_watch import EVERY_NS, DeviceWatch
from squeezer.daemon.memory_limit import LOOKS_IN_A_ROW, MemoryLimit
from squeezer.device import CpuDevice, CudaDevice, Device
from squeezer.policy.events import Event, SideBarred
from squeezer.records.reader import read_details, read_events
from squeezer.records.writer import Recorder
from tests.support.fake_nvml import MB, NUMBER, FakeNvml, nvml_of

GB = 1 << 30


class World:
    """A watch, and all around it."""

    def __init__(self, run: Path) -> None:
        self.words = memoryview(bytearray(512)).cast("q")
        self.fake = FakeNvml()
        self.run = run
        self.recorder = Recorder(run, 0)
        self.events: list[Event] = []
        self.faults: list[str] = []
        self.has_job = True
        self.now_ns = 10**15
        write_device_uuid(self.words, NUMBER)

    def watch(self, device: Device | None = None, *, has_side: bool = True) -> DeviceWatch:
        made = CudaDevice(self.words, DeviceTable(), 0, {}, nvml_of(self.fake)) if device is None else device
        return DeviceWatch(
            device=made,
            words=self.words,
            reserve_bytes=GB,
            memory_limit=MemoryLimit(self.words, GB),
            has_side=has_side,
            has_job=lambda: self.has_job,
            recorder=self.recorder,
            feed=self.events.append,
            fault=self.faults.append,
            clock_ns=lambda: self.now_ns,
        )

    def looks(self, watch: DeviceWatch, count: int = 1) -> None:
        for _ in range(count):
            self.now_ns += EVERY_NS
            watch.look_if_due()

    def records(self, kind: str) -> list[dict[str, Any]]:
        self.recorder.write()
        found = [*read_events(self.run / "rank0.events.jsonl"), *read_details(self.run, 0)]
        return [record for record in found if record["r"] == kind]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.recorder.close()


def test_it_looks_once_a_second_while_a_main_job_lives(world: World) -> None:
    watch = world.watch()
    assert watch.left_s() is None, "the device is not known yet"
    watch.job_attached()
    assert watch.left_s() == 0.0
    watch.look_if_due()
    world.fake.calls.clear()
    world.now_ns += EVERY_NS - 1000
    assert watch.left_s() == pytest.approx(1e-6)
    watch.look_if_due()
    assert world.fake.calls == []
    world.looks(watch)
    assert world.fake.calls and watch.left_s() == 1.0
    world.has_job = False
    assert watch.left_s() is None
    (first, second) = world.records("device")
    assert first["t_ns"] == 10**15 and second["energy_mj"] == 10_000_000 and second["free_bytes"] == 70_000 * MB
    assert world.words[Field.SIDE_LIMIT_BYTES] == 70_000 * MB - GB


def test_a_slow_driver_is_asked_less_often(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = world.watch()
    watch.job_attached()

    def slow(handle: str) -> int:
        world.now_ns += EVERY_NS // 10
        return 1

    monkeypatch.setitem(world.fake._answers, "nvmlDeviceGetPowerUsage", slow)
    watch.look_if_due()
    assert watch.left_s() == pytest.approx(9.9), "a tenth of a second is a hundredth of ten"


def test_cores_have_no_meters(world: World) -> None:
    watch = world.watch(CpuDevice(world.words, DeviceTable(), 0))
    watch.job_attached()
    assert watch.left_s() is None
    world.looks(watch)
    assert world.records("device") == world.records("side") == world.events == []


def test_low_memory_bars_the_side_task_until_there_is_room(world: World) -> None:
    watch = world.watch()
    watch.job_attached()
    world.fake.free = 100 * MB
    world.looks(watch, LOOKS_IN_A_ROW)
    (barred,) = world.events
    assert isinstance(barred, SideBarred) and barred.reason.startswith("100 MiB of the device are free")
    world.looks(watch, 5)
    assert len(world.events) == 1
    world.fake.free = 70_000 * MB
    world.looks(watch, LOOKS_IN_A_ROW)
    assert world.events[1:] == [SideBarred("")]
    assert [(each["event"], each.get("reason", "")) for each in world.records("side")] == [
        ("barred", barred.reason),
        ("let_in", ""),
    ]


def test_low_memory_of_one_jobs_device_does_not_bar_a_side_task_from_the_next_jobs(world: World) -> None:
    watch = world.watch()
    watch.job_attached()
    world.fake.free = 100 * MB
    world.looks(watch, LOOKS_IN_A_ROW)
    watch.job_attached()
    assert len(world.events) == 1, "the same device"
    write_device_uuid(world.words, NUMBER + 1)
    watch.job_attached()
    assert watch.left_s() is None, "it has no meters, so nothing would ever lift it"
    assert world.events[1:] == [SideBarred("")]


def test_an_exclusive_device_bars_it_from_the_start_until_the_mode_is_another(world: World) -> None:
    world.fake.mode = 3
    watch = world.watch()
    watch.job_attached()
    (barred,) = world.events
    assert isinstance(barred, SideBarred) and "EXCLUSIVE_PROCESS" in barred.reason
    world.looks(watch)
    world.fake.mode = 0
    world.looks(watch)
    assert world.events[1:] == [SideBarred("")]


def test_a_device_that_becomes_exclusive_lets_its_side_task_go(world: World) -> None:
    """The next main job could not open it while the side task has it open."""
    watch = world.watch()
    watch.job_attached()
    world.looks(watch)
    world.fake.mode = 3
    world.looks(watch, 2)
    (barred,) = world.events
    assert isinstance(barred, SideBarred) and "EXCLUSIVE_PROCESS" in barred.reason


def test_whether_a_job_has_a_server_on_an_exclusive_device_is_asked_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(CudaDevice, "_has_server", lambda self, pid: asked.append(pid) or True)
    world.fake.mode = 3
    watch = world.watch()
    for pid in (7, 8):
        world.words[Field.MAIN_PID] = pid
        watch.job_attached()
        world.looks(watch, 3)
    assert asked == [7, 8] and world.events == [], "a program has to be started for it"


def test_an_exclusive_device_whose_meters_fail_stays_shut(world: World) -> None:
    world.fake.mode = 3
    watch = world.watch()
    watch.job_attached()
    world.fake.vanish()
    world.looks(watch, 3)
    assert len(world.events) == 1, "a side task that is let in cannot open it, and is given up"


def test_where_bubbles_are_only_observed_nothing_is_barred(world: World) -> None:
    world.fake.mode, world.fake.free = 3, 0
    watch = world.watch(has_side=False)
    watch.job_attached()
    world.looks(watch, LOOKS_IN_A_ROW)
    assert world.events == [] and len(world.records("device")) == LOOKS_IN_A_ROW


def test_errors_of_the_device_are_faults_and_a_lost_one_is_said_once(world: World) -> None:
    watch = world.watch()
    watch.job_attached()
    world.fake.xid = 31
    world.looks(watch, 2)
    assert len(world.faults) == 1 and "error 31 (Xid)" in world.faults[0]
    world.fake.vanish()
    world.looks(watch, 3)
    assert len(world.faults) == 2 and "GPU is lost" in world.faults[1]
    assert len(world.records("device")) == 2, "nothing is known any more"
