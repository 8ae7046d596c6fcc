"""What a real driver does to those who wait, and the fake one if it is told to."""

import mmap
import threading
from collections.abc import Iterator

import pytest

from benchmarks.gpu.fake_driver import FakeDriver
from ds_hooks.shared.cuda_driver import address_of
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
        caller = threading.Thread(target=lambda: [call() for call in calls])
        caller.start()
        caller.join(0.2)
        assert caller.is_alive()
        words[0] = 1
        caller.join(60)
        assert not caller.is_alive()
