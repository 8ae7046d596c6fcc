"""What a real driver does to those who wait, and the fake one if it is told to."""

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.gpu.fake_device import FakeDevice
from benchmarks.gpu.fake_driver import FakeDriver
from ds_hooks.shared.cuda_driver import DriverError, address_of
from tests.support.sandbox import wait_for

MS = 1_000_000


@pytest.fixture
def words() -> Iterator["memoryview[int]"]:
    with memoryview(mmap.mmap(-1, 4096)) as page, page.cast("q") as made:
        yield made


def waiting(driver: FakeDriver, words: "memoryview[int]") -> int:
    """A stream that waits for word 0."""
    stream = driver.create_stream()
    driver.wait_at_least(stream, driver.register(address_of(words), 4096), 1)
    return stream


def test_who_asks_for_an_event_breaks_a_recording_unless_it_spares_them() -> None:
    with FakeDriver() as driver:
        event = driver.create_event()
        broken, refused = (
            pytest.raises(DriverError, match=text) for text in ("another thread has", "is being recorded")
        )
        with broken, driver.recording(), refused:
            driver.is_done(event)
        driver.spare_recordings()
        with driver.recording():
            assert driver.is_done(event)


@pytest.mark.parametrize(("connections", "runs_meanwhile"), [(0, True), (1, False)])
def test_a_stream_that_waits_holds_those_on_its_hardware_queue(
    connections: int, runs_meanwhile: bool, words: "memoryview[int]"
) -> None:
    with FakeDriver(connections=connections) as driver:
        waiting(driver, words)
        other = driver.create_stream()
        driver.launch(other, 1 * MS)
        if runs_meanwhile:
            wait_for(lambda: driver.kernels, "the other stream's kernel")
        else:
            time.sleep(0.05)  # in which a queue of its own would begin it
        assert bool(driver.kernels) is runs_meanwhile
        words[0] = 1
        wait_for(lambda: driver.kernels, "the other stream's kernel")


@pytest.mark.parametrize("held_by", ["a full queue", "a first launch", "an allocation"])
def test_it_holds_its_caller_behind_what_waits(held_by: str, words: "memoryview[int]") -> None:
    with FakeDriver(depth=2, loads_lazily=True) as driver:
        driver.launch(0, 0, "known")
        stream = waiting(driver, words)
        if held_by == "a full queue":
            calls = [lambda: driver.launch(stream, 0, "known")] * 4
        elif held_by == "a first launch":
            calls = [lambda: driver.launch(0, 0, "new")]
        else:
            calls = [driver.synchronize]
        caller = threading.Thread(target=lambda: [call() for call in calls], daemon=True)
        caller.start()
        caller.join(0.2)
        assert caller.is_alive()
        words[0] = 1
        caller.join(60)
        assert not caller.is_alive()


def test_pages_stay_the_devices_when_the_host_has_unmapped_them(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(bytes(4096))
    with FakeDriver() as driver, path.open("r+b") as file:
        page = mmap.mmap(file.fileno(), 4096)
        address = address_of(view := memoryview(page).cast("q"))
        reached = driver.register(address, 4096)
        with pytest.raises(DriverError, match="registered already"):
            driver.register(address, 4096)
        view.release()
        page.close()
        event = driver.create_event()
        driver.write_word(0, reached, 7)
        driver.record(event, 0)
        wait_for(lambda: driver.is_done(event), "the word")
        assert path.read_bytes()[0] == 7
        driver.unregister(address)


class Contexts(NamedTuple):
    """The main job's and the side task's, on one device."""

    main: FakeDriver
    side: FakeDriver
    reached: int
    """The first word, as the main job's device sees it."""


@contextmanager
def contexts(words: "memoryview[int]", *, mps: bool, slice_ns: int = 40 * MS) -> Iterator[Contexts]:
    device = FakeDevice(slice_ns, mps=mps)
    with FakeDriver(device=device) as main, FakeDriver(device=device, priority=1) as side:
        yield Contexts(main, side, main.register(address_of(words), 4096))
        words[0] = 1


def marked(driver: FakeDriver) -> int:
    event = driver.create_event()
    driver.record(event, 0)
    return event


@pytest.mark.parametrize("mps", [False, True])
def test_a_kernel_that_spins_takes_turns_with_the_side_task_and_one_that_waits_does_not(
    mps: bool, words: "memoryview[int]"
) -> None:
    with contexts(words, mps=mps) as (main, side, reached):
        for receive, takes_turns in ((main.wait_at_least, False), (main.spin, not mps)):
            words[0] = 0
            receive(0, reached, 1)
            side.launch(0, 200 * MS)
            ended = marked(side)
            wait_for(lambda event=ended: side.is_done(event), "the side task's kernel")
            took_ns = side.kernels[-1].end_ns - side.kernels[-1].start_ns
            assert (took_ns > 1.4 * 200 * MS) is takes_turns
            words[0] = 1
            wait_for(lambda: main.is_idle(0), "the receive")


@pytest.mark.parametrize("mps", [False, True])
def test_the_main_jobs_words_come_late_where_it_has_to_wait_for_its_turn(mps: bool, words: "memoryview[int]") -> None:
    with contexts(words, mps=mps, slice_ns=500 * MS) as (main, side, reached):
        main.wait_at_least(0, reached, 1)
        main.write_word(0, reached + 8, 1)
        side.launch(0, 400 * MS)
        wait_for(lambda: side.kernels, "the side task's kernel")
        words[0] = 1
        wait_for(lambda: words[1], "the word behind the wait")
        assert bool(side.kernels[0].end_ns) is not mps


def test_of_mps_clients_one_of_low_priority_begins_no_kernel_while_another_computes(words: "memoryview[int]") -> None:
    with contexts(words, mps=True) as (main, side, _):
        main.launch(0, 100 * MS)
        wait_for(lambda: main.kernels, "the main job's kernel")
        side.launch(0, 100 * MS)
        wait_for(lambda: side.kernels, "the side task's kernel")
        assert side.kernels[0].start_ns >= main.kernels[0].end_ns > 0
        main.launch(0, 1 * MS)
        wait_for(lambda: len(main.kernels) == 2, "the main job's next kernel")
        assert not side.kernels[0].end_ns, "the other way round nobody waits"


def test_mps_clients_of_one_priority_overlap(words: "memoryview[int]") -> None:
    device = FakeDevice(mps=True)
    with FakeDriver(device=device) as main, FakeDriver(device=device) as side:
        main.launch(0, 300 * MS)
        wait_for(lambda: main.kernels, "the main job's kernel")
        side.launch(0, 1 * MS)
        wait_for(lambda: side.kernels, "the side task's kernel")
        assert not main.kernels[0].end_ns
