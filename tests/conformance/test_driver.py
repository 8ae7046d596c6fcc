"""What hooks and gate rely on of a driver: one suite for the fake one and for CUDA's."""

import mmap
import time
from collections.abc import Callable, Iterator

import pytest

from benchmarks.gpu.device_kernels import FakeKernels, Kernels, open_device
from benchmarks.gpu.fake_driver import FakeDriver
from ds_hooks.shared.cuda_driver import CudaDriver, DeviceWords, Driver, DriverError, address_of, comes

PROBE, FIRST, SECOND = range(3)
MS = 1_000_000
PATIENCE_S = 30.0


def cuda() -> tuple[Driver, Kernels]:
    try:
        CudaDriver(0)
    except DriverError as error:
        pytest.skip(f"no CUDA device: {error}")
    return open_device("cuda")


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[tuple[Driver, Kernels]]:
    if request.param == "cuda":
        driver, kernels = cuda()
        yield driver, kernels
        kernels.close()
        return
    with FakeDriver() as driver:
        yield driver, FakeKernels(driver)


@pytest.fixture
def driver(device: tuple[Driver, Kernels]) -> Driver:
    return device[0]


@pytest.fixture
def kernels(device: tuple[Driver, Kernels]) -> Kernels:
    return device[1]


@pytest.fixture
def words() -> "memoryview[int]":
    return memoryview(mmap.mmap(-1, 4096)).cast("q")


@pytest.fixture
def shared(driver: Driver, words: "memoryview[int]") -> Iterator[DeviceWords]:
    made = DeviceWords(driver, words, probe=PROBE)
    yield made
    words[FIRST] = words[SECOND] = 2**31 - 1
    made.release()


@pytest.fixture
def stream(driver: Driver, shared: DeviceWords, words: "memoryview[int]") -> Iterator[int]:
    made = driver.create_stream()
    yield made
    words[FIRST] = words[SECOND] = 2**31 - 1
    end = recorded(driver, made)
    until(lambda: driver.is_done(end))
    driver.destroy_stream(made)


def recorded(driver: Driver, stream: int) -> int:
    event = driver.create_event()
    driver.record(event, stream)
    return event


def until(true: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(1e-4)


def test_a_word_is_written_in_the_order_of_its_stream(
    driver: Driver, kernels: Kernels, shared: DeviceWords, stream: int, words: "memoryview[int]"
) -> None:
    driver.wait_at_least(stream, shared.address(FIRST), 1)
    shared.write(stream, (SECOND, 6), (SECOND, 7))
    written = recorded(driver, stream)
    assert not driver.is_done(written) and words[SECOND] == 0
    words[FIRST] = 1
    until(lambda: driver.is_done(written))
    assert words[SECOND] == 7


def test_a_wait_for_a_count_passes_at_it_and_after_it(
    driver: Driver, shared: DeviceWords, stream: int, words: "memoryview[int]"
) -> None:
    driver.wait_at_least(stream, shared.address(FIRST), 5)
    event = recorded(driver, stream)
    words[FIRST] = 4
    time.sleep(0.02)
    assert not driver.is_done(event)
    words[FIRST] = 6
    until(lambda: driver.is_done(event))


def test_one_stream_waits_for_an_event_of_another_as_it_was_recorded_last(
    driver: Driver, shared: DeviceWords, stream: int, words: "memoryview[int]"
) -> None:
    other = driver.create_stream()
    event = driver.create_event()
    driver.wait_at_least(stream, shared.address(FIRST), 1)
    driver.record(event, stream)
    driver.wait_event(other, event)
    after = recorded(driver, other)
    driver.wait_at_least(stream, shared.address(SECOND), 1)
    driver.record(event, stream)  # a later sandbox: who waits already does not wait for it
    words[FIRST] = 1
    until(lambda: driver.is_done(after))
    assert not driver.is_done(event)
    words[SECOND] = 1
    until(lambda: driver.is_done(event))
    driver.destroy_stream(other)


def test_events_tell_the_time_of_the_device(driver: Driver, kernels: Kernels) -> None:
    stream = driver.create_stream()
    start = recorded(driver, stream)
    kernels.work(stream, 5 * MS)
    end = recorded(driver, stream)
    until(lambda: driver.is_done(end))
    (begin_ns, end_ns) = kernels.stamps()[-1]
    assert driver.elapsed_ns(start, end) >= 0.99 * (end_ns - begin_ns)
    assert driver.elapsed_ns(start, start) == 0


def test_streams_run_beside_each_other(driver: Driver, shared: DeviceWords, stream: int) -> None:
    driver.wait_at_least(stream, shared.address(FIRST), 1)
    waiting = recorded(driver, stream)
    other = driver.create_stream()
    assert comes(driver, recorded(driver, other)) and not driver.is_done(waiting)


def test_a_kernel_that_receives_spins_until_the_word_is_there(
    driver: Driver, kernels: Kernels, shared: DeviceWords, stream: int, words: "memoryview[int]"
) -> None:
    kernels.receive(stream, shared.address(FIRST), 3)
    event = recorded(driver, stream)
    time.sleep(0.02)
    assert not driver.is_done(event)
    words[FIRST] = 3
    until(lambda: driver.is_done(event))


def test_memory_that_is_no_page_is_refused(driver: Driver, words: "memoryview[int]") -> None:
    with pytest.raises(DriverError, match=r"register|Register"):
        driver.register(address_of(words) + 8, 0)


def test_waits_of_one_call_pass_one_after_the_other(
    driver: Driver, shared: DeviceWords, stream: int, words: "memoryview[int]"
) -> None:
    driver.wait_for_words(stream, [(shared.address(FIRST), 2), (shared.address(SECOND), 3)])
    event = recorded(driver, stream)
    words[SECOND] = 3
    time.sleep(0.02)
    assert not driver.is_done(event)
    words[FIRST] = 2
    until(lambda: driver.is_done(event))
