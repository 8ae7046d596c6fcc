"""What every bubble clock must do: the CPU's, and CUDA's two on a fake driver, and on a GPU where there is one.

The main job is the test. Its wait ends only when the test lets it, so nothing here depends on how fast the machine is.
"""

import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from benchmarks.gpu.fake_driver import DEFAULT_STREAM, FakeDriver
from benchmarks.gpu.fake_torch import fake_torch
from ds_hooks.clock.base import BubbleClock
from ds_hooks.clock.cpu import CpuClock
from ds_hooks.clock.cuda import CudaClock, PolledCudaClock
from ds_hooks.clock.registry import CLOCKS, clock_for
from ds_hooks.shared.cuda_driver import CudaDriver, DeviceWords, Driver, DriverError
from ds_hooks.shared.page.file import Page, make_private_dir, page_path
from ds_hooks.shared.page.layout import ClockKind, DeviceGate, Field, Role

pytestmark = pytest.mark.integration

MS = 1_000_000
PATIENCE_S = 30.0
PROBE, ARRIVALS = range(2)


def nothing() -> None: ...


class World(Protocol):
    """A main job on some device."""

    kind: int

    def clock(self, page: Page) -> BubbleClock:
        """A new clock of the page."""

    def bubble(self, clock: BubbleClock, permit_ns: int, look: Callable[[], None] = nothing) -> tuple[int, int]:
        """Step 7 waits in slot 3, and `look` is called when the device does. Returns the stamps."""

    def leave(self) -> None:
        """End it wherever it is."""


class Core:
    """The host waits itself."""

    kind = ClockKind.CPU

    def clock(self, page: Page) -> BubbleClock:
        return CpuClock(page, time.monotonic_ns)

    def bubble(self, clock: BubbleClock, permit_ns: int, look: Callable[[], None] = nothing) -> tuple[int, int]:
        begin = clock.open(7, 3, permit_ns)
        look()
        return begin, clock.close()

    def leave(self) -> None: ...


class Stream:
    """The device waits, and the host runs ahead of it."""

    def __init__(self, make: type[CudaClock], driver: Driver, stream: int) -> None:
        self._make, self._driver, self._stream = make, driver, stream
        self.kind = make.kind
        self._words = memoryview(mmap.mmap(-1, 4096)).cast("q")
        self._shared = DeviceWords(driver, self._words, probe=PROBE)
        self._arrivals = itertools.count(1)

    def clock(self, page: Page) -> BubbleClock:
        return self._make(page, self._driver, lambda: self._stream, time.monotonic_ns)

    def bubble(self, clock: BubbleClock, permit_ns: int, look: Callable[[], None] = nothing) -> tuple[int, int]:
        arrival = next(self._arrivals)
        begin = clock.open(7, 3, permit_ns)
        self._driver.wait_at_least(self._stream, self._shared.address(ARRIVALS), arrival)
        end = clock.close()
        until(lambda: self._driver.is_done(begin))
        look()
        assert not self._driver.is_done(end), "the wait goes on until the data arrive"
        self._words[ARRIVALS] = arrival
        until(lambda: self._driver.is_done(end))
        return begin, end

    def leave(self) -> None:
        self._words[ARRIVALS] = 2**31 - 1
        self._shared.release()


def gpu() -> tuple[Driver, int]:
    try:
        driver = CudaDriver(0)
    except DriverError as error:
        pytest.skip(f"no CUDA device: {error}")
    return driver, driver.create_stream()


@pytest.fixture(
    params=[
        "cpu",
        *("cuda-fake", "polled-fake", "cuda-unkind", "polled-unkind"),
        *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda-gpu", "polled-gpu")),
    ]
)
def world(request: pytest.FixtureRequest, page: Page) -> Iterator[World]:
    clock, _, device = request.param.partition("-")
    if clock == "cpu":
        yield Core()
        return
    make = CudaClock if clock == "cuda" else PolledCudaClock
    if device == "gpu":
        made = Stream(make, *gpu())
        yield made
        made.leave()
        return
    with FakeDriver(connections=1, depth=16) if device == "unkind" else FakeDriver() as driver:
        made = Stream(make, driver, DEFAULT_STREAM)
        yield made
        made.leave()


@pytest.fixture
def page(memory_path: Path) -> Iterator[Page]:
    made = Page.open(page_path(make_private_dir(memory_path / "run"), 0))
    made.claim(Role.MAIN)
    yield made
    made.close()


@pytest.fixture
def clock(world: World, page: Page) -> Iterator[BubbleClock]:
    made = world.clock(page)
    yield made
    made.leave(wait=True)


def until(true: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(1e-4)


def known(clock: BubbleClock, *stamps: int) -> list[int]:
    """Their times, once the device has come there."""
    times: list[int] = []
    for stamp in stamps:

        def look(stamp: int = stamp) -> bool:
            time_ns = clock.time_ns(stamp)
            if time_ns is not None:
                times.append(time_ns)
            return time_ns is not None

        until(look)
    return times


def test_the_word_is_open_while_the_device_waits_and_shut_before_and_after(
    world: World, clock: BubbleClock, page: Page
) -> None:
    words = page.words
    seen = []

    def look() -> None:
        until(page.is_open)
        seen.append(words[Field.BUBBLE])
        assert (words[Field.STEP], words[Field.SLOT]) == (7, 3)

    for _ in range(3):
        assert not page.is_open()
        world.bubble(clock, 5 * MS, look)
        until(lambda: not page.is_open())
        seen.append(words[Field.BUBBLE])
    assert seen == [1 << 1 | 1, 1 << 1, 2 << 1 | 1, 2 << 1, 3 << 1 | 1, 3 << 1]


def test_the_permit_is_there_before_the_word_opens_and_no_use_after_it_has_shut(
    world: World, clock: BubbleClock, page: Page
) -> None:
    words = page.words

    def look() -> None:
        until(page.is_open)
        if clock.follows_host:
            assert words[Field.PERMIT_UNTIL_NS] - words[Field.BUBBLE_START_NS] == 5 * MS
        else:
            assert (words[Field.PERMIT_LENGTH_NS], words[Field.PERMIT_UNTIL_NS]) == (5 * MS, 0)
            until(lambda: words[Field.DEVICE_GATE] == DeviceGate.open_for(5 * MS))
        assert clock.permit_ns in (0, 5 * MS)

    world.bubble(clock, 5 * MS, look)
    until(lambda: not page.is_open())
    assert words[Field.DEVICE_GATE] == DeviceGate.CLOSED


def test_without_a_permit_nothing_can_run_and_the_bubble_is_timed(world: World, clock: BubbleClock, page: Page) -> None:
    words = page.words
    seen: list[tuple[int, ...]] = []

    def look() -> None:
        time.sleep(0.005)
        seen.append(tuple(words[f] for f in (Field.PERMIT_UNTIL_NS, Field.PERMIT_LENGTH_NS, Field.DEVICE_GATE)))
        assert clock.permit_ns == 0

    begin, end = world.bubble(clock, 0, look)
    assert seen == [(0, 0, DeviceGate.CLOSED)]
    begin_ns, end_ns = known(clock, begin, end)
    assert end_ns - begin_ns >= 5 * MS
    assert clock.epoch == 1, "it has a number of its own"


def test_numbers_grow_by_one_and_never_come_twice_on_a_page(world: World, page: Page) -> None:
    words, epochs = page.words, []
    for _ in range(2):
        clock = world.clock(page)
        for permit_ns in (5 * MS, 0, 5 * MS):
            world.bubble(clock, permit_ns)
            epochs.append(clock.epoch)
        assert clock.leave(wait=True)
    assert epochs == [1, 2, 3, 4, 5, 6]
    assert words[Field.BUBBLE] == 6 << 1


def test_within_a_step_times_never_go_back_and_a_bubble_lasts_as_long_as_the_wait(
    world: World, clock: BubbleClock
) -> None:
    for _ in range(4):
        step = clock.begin_step()
        bubbles = [world.bubble(clock, permit_ns, lambda: time.sleep(0.005)) for permit_ns in (5 * MS, 0)]
        last = clock.stamp()
        times = known(clock, step, *bubbles[0], *bubbles[1], last)
        assert times == sorted(times)
        assert times[2] - times[1] >= 5 * MS and times[4] - times[3] >= 5 * MS


def test_a_stamp_is_a_time_if_the_clock_follows_the_host(world: World, clock: BubbleClock) -> None:
    stamps = [clock.begin_step(), *world.bubble(clock, 5 * MS), clock.stamp()]
    times = known(clock, *stamps)
    assert (stamps == times) == clock.follows_host
    if clock.follows_host:
        assert times[-1] <= time.monotonic_ns()


def test_what_was_stamped_before_leaving_is_known_after_it(world: World, page: Page) -> None:
    clock = world.clock(page)
    begin, end = world.bubble(clock, 5 * MS)
    assert clock.leave(wait=True)
    begin_ns, end_ns = known(clock, begin, end)
    assert begin_ns <= end_ns


@pytest.mark.parametrize("wait", [True, False])
def test_leaving_in_the_middle_of_a_bubble_shuts_the_word(world: World, page: Page, wait: bool) -> None:
    clock = world.clock(page)
    clock.open(7, 3, 5 * MS)
    until(page.is_open)
    left = clock.leave(wait=wait)
    assert left or not (wait or clock.follows_host), "False only if the device was not waited for"
    until(lambda: page.words[Field.BUBBLE] == 1 << 1)
    assert page.words[Field.DEVICE_GATE] == DeviceGate.CLOSED


def test_the_page_names_the_clock_until_it_leaves(world: World, page: Page) -> None:
    clock = world.clock(page)
    assert page.words[Field.CLOCK_KIND] == clock.kind == world.kind
    assert clock.leave(wait=True)
    assert page.words[Field.CLOCK_KIND] == ClockKind.CPU


def test_cpu_times_are_told_where_they_mean_something(clock: BubbleClock, page: Page) -> None:
    without, page.words[Field.SIDE_PID] = clock.side_cpu_ns(), os.getpid()
    first, main_ns = clock.side_cpu_ns(), clock.main_cpu_ns()
    end_ns = time.process_time_ns() + 5 * MS
    while time.process_time_ns() < end_ns:
        pass
    used_ns, main_used_ns = clock.side_cpu_ns() - first, clock.main_cpu_ns() - main_ns
    if clock.follows_host:
        assert without == 0 and used_ns >= 4 * MS and main_used_ns >= 5 * MS
    else:
        assert (without, first, used_ns, main_ns, main_used_ns) == (-1, -1, 0, -1, 0)


def test_each_device_has_one_clock(page: Page) -> None:
    made: dict[str, Any] = {}
    with FakeDriver() as driver, fake_torch(driver):
        for device in CLOCKS:
            made[device] = clock_for(device, page, time.monotonic_ns)
            assert made[device].leave(wait=True)
    assert {device: type(clock) for device, clock in made.items()} == {"cpu": CpuClock, "cuda": CudaClock}
