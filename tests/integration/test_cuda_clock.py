"""Marks of a device with streams: what the device writes and when, on a driver whose streams are threads."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu.fake_driver import DEFAULT_STREAM, FakeDriver
from benchmarks.gpu.fake_torch import FREE_BYTES, PEAK_BYTES, UUID, fake_torch
from ds_hooks import attach
from ds_hooks.clock import cuda as clock_module
from ds_hooks.clock.cuda import WORD_MAX, CudaClock, PolledCudaClock, cuda_clock
from ds_hooks.handle import Handle
from ds_hooks.shared import cuda_driver as driver_module
from ds_hooks.shared.cuda_driver import DriverError, address_of
from ds_hooks.shared.device_uuid import read_device_uuid
from ds_hooks.shared.page.file import Page, make_private_dir, page_path
from ds_hooks.shared.page.layout import ClockKind, DeviceGate, Field, Role
from ds_hooks.shared.page.plan import plan_slot, plan_steps
from ds_hooks.shared.wire import BubbleEnd, BubbleStart, Bye, StepEnd, StepStart
from tests.support.hooked_engine import Daemon, Engine, connect
from trials.gate.bubble_watch import BubbleWatch

MS = 1_000_000
PATIENCE_S = 30.0


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    made = Page.open(page_path(make_private_dir(tmp_path / "run"), 0))
    made.claim(Role.MAIN)
    yield made
    made.close()


@pytest.fixture
def driver(page: Page) -> Iterator[FakeDriver]:
    with FakeDriver() as made:
        yield made


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path / "hooks")
    yield made
    made.close()


def new_clock(kind: type[CudaClock], page: Page, driver: FakeDriver) -> CudaClock:
    return kind(page, driver, lambda: DEFAULT_STREAM, time.monotonic_ns)


@pytest.fixture(params=[CudaClock, PolledCudaClock])
def clock(request: pytest.FixtureRequest, page: Page, driver: FakeDriver) -> CudaClock:
    return new_clock(request.param, page, driver)


def until(true: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(1e-4)


def ended(driver: FakeDriver, name: str) -> bool:
    return any(kernel.name == name and kernel.end_ns for kernel in driver.kernels)


def issue_step(clock: CudaClock, driver: FakeDriver, permit_ns: int, *, compute_ms: float = 30) -> tuple[int, int]:
    """Compute, wait, compute; nothing of it has run when this returns."""
    driver.launch(DEFAULT_STREAM, int(compute_ms * MS), "before")
    begin = clock.open(7, 3, permit_ns)
    driver.launch(DEFAULT_STREAM, 20 * MS, "receive")
    end = clock.close()
    driver.launch(DEFAULT_STREAM, 1 * MS, "after")
    return begin, end


def test_the_word_opens_when_the_device_comes_to_the_wait_and_not_when_it_is_issued(
    clock: CudaClock, driver: FakeDriver, page: Page
) -> None:
    words = page.words
    words[Field.PERMIT_LEFT] = 0  # as of a side task whose host hangs since the bubble before
    issue_step(clock, driver, 5 * MS)
    until(lambda: words[Field.BUBBLE] == 1 << 1 | 1)
    assert ended(driver, "before") and not ended(driver, "after")
    assert (words[Field.STEP], words[Field.SLOT], words[Field.PERMIT_LENGTH_NS]) == (7, 3, 5 * MS)
    until(lambda: words[Field.DEVICE_GATE] == 5000 or ended(driver, "receive"))
    assert words[Field.PERMIT_LEFT] == DeviceGate.ANY
    until(lambda: words[Field.BUBBLE] == 1 << 1)
    assert ended(driver, "receive") and words[Field.DEVICE_GATE] == DeviceGate.CLOSED
    assert words[Field.CLOCK_KIND] == clock.kind
    assert clock.leave(wait=True)


def test_a_bubble_takes_four_calls_of_the_driver_and_no_stream_of_its_own(page: Page, driver: FakeDriver) -> None:
    clock = new_clock(CudaClock, page, driver)
    for permit_ns, calls in ((5 * MS, ["record", "write_words", "write_words", "record"]), (0, ["record", "record"])):
        clock.open(1, 3, permit_ns), clock.close()  # events are made in the first bubbles, and used again
        stamps = clock.open(1, 3, permit_ns), clock.close()
        until(lambda stamps=stamps: driver.is_done(stamps[1]))
        for stamp in range(stamps[0] - 2, stamps[1] + 1):
            clock.time_ns(stamp)
        driver.called.clear()
        clock.open(1, 3, permit_ns), clock.close()
        assert list(driver.called) == calls
    assert clock.leave(wait=True)
    assert driver.streams == {DEFAULT_STREAM}


def test_the_gate_is_the_last_word_that_opens_and_the_first_that_shuts(
    page: Page, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = new_clock(CudaClock, page, driver)
    gate, batches = clock._device_words.address(Field.DEVICE_GATE), []
    monkeypatch.setattr(driver, "write_words", lambda _, values: batches.append([address for address, _ in values]))
    clock.open(1, 3, 5 * MS), clock.close()
    opened, shut = batches
    assert (opened.index(gate), shut.index(gate)) == (len(opened) - 1, 0)
    assert clock.leave(wait=True)


def test_a_permit_longer_than_a_word_holds_is_cut_and_not_wrapped_around(clock: CudaClock, page: Page) -> None:
    clock.open(1, 3, WORD_MAX + 5 * MS)
    assert clock.permit_ns == WORD_MAX
    until(lambda: page.words[Field.DEVICE_GATE])
    assert page.words[Field.DEVICE_GATE] == WORD_MAX // 1000
    assert page.words[Field.PERMIT_LENGTH_NS] == WORD_MAX
    clock.close()
    assert clock.leave(wait=True)


def test_a_bubble_that_counts_from_the_end_of_another_stays_shut(
    clock: CudaClock, driver: FakeDriver, page: Page
) -> None:
    clock.open(1, 3, 5 * MS, opens_before_ns=1 * MS)
    end = clock.close()
    until(lambda: driver.is_done(end))
    assert [page.words[f] for f in (Field.BUBBLE, Field.DEVICE_GATE)] == [0, 0], "nobody knows its begin by now"
    assert clock.leave(wait=True)


def test_a_wait_on_another_stream_than_the_steps_stays_shut(page: Page, driver: FakeDriver) -> None:
    """The step's own stream may compute meanwhile."""
    stream = DEFAULT_STREAM
    clock = CudaClock(page, driver, lambda: stream, time.monotonic_ns)
    clock.begin_step()
    stream = driver.create_stream()
    clock.open(1, 3, 5 * MS)
    assert clock.permit_ns == 0
    end = clock.close()
    until(lambda: driver.is_done(end))
    assert [page.words[f] for f in (Field.BUBBLE, Field.DEVICE_GATE)] == [0, 0]
    clock.begin_step()
    clock.open(2, 3, 5 * MS)
    until(lambda: page.words[Field.DEVICE_GATE])
    clock.close()
    assert clock.leave(wait=True)


def test_a_clock_whose_device_refuses_to_shut_the_gate_does_so_itself(page: Page, driver: FakeDriver) -> None:
    clock = new_clock(CudaClock, page, driver)
    clock.open(1, 3, 5 * MS)
    until(lambda: page.words[Field.DEVICE_GATE])
    driver.fail("write_words", at=1)
    assert not clock.leave(wait=True), "nobody knows what the device still does"
    assert page.words[Field.DEVICE_GATE] == DeviceGate.CLOSED and not page.is_open()


def test_a_wait_that_is_not_planned_writes_nothing_and_is_timed(
    clock: CudaClock, driver: FakeDriver, page: Page
) -> None:
    begin, end = issue_step(clock, driver, 0)
    until(lambda: driver.is_done(end))
    begin_ns, end_ns = clock.time_ns(begin), clock.time_ns(end)
    assert begin_ns is not None and end_ns is not None
    receive = next(kernel for kernel in driver.kernels if kernel.name == "receive")
    assert end_ns - begin_ns >= receive.end_ns - receive.start_ns
    assert [page.words[f] for f in (Field.BUBBLE, Field.DEVICE_GATE)] == [0, 0]
    assert clock.leave(wait=True)


def test_a_time_is_not_known_before_the_device_has_come_there(clock: CudaClock, driver: FakeDriver) -> None:
    begin, end = issue_step(clock, driver, 5 * MS)
    assert clock.time_ns(begin) is None
    until(lambda: driver.is_done(end))
    asked_ns = time.monotonic_ns()
    begin_ns, end_ns = clock.time_ns(begin), clock.time_ns(end)
    assert begin_ns is not None and end_ns is not None and begin_ns < end_ns
    assert begin_ns >= asked_ns, "nothing is known yet of how late the look came"
    assert clock.leave(wait=True)


def test_a_device_that_stands_still_is_not_followed_for_ever(
    clock: CudaClock, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "STAMPS_AT_MOST", 4)
    stamps = [clock.stamp() for _ in range(4)]
    with pytest.raises(DriverError, match="4 stamps behind"):
        clock.stamp()
    until(lambda: driver.is_done(stamps[-1]))
    assert all(clock.time_ns(stamp) is not None for stamp in stamps)
    clock.stamp()
    assert clock.leave(wait=True)


def test_times_come_to_the_hosts_clock_and_lengths_stay_the_devices(clock: CudaClock, driver: FakeDriver) -> None:
    lengths_ns, late_ns = [], []
    for _ in range(5):
        start = clock.begin_step()
        begin, end = issue_step(clock, driver, 5 * MS, compute_ms=1)
        until(partial(driver.is_done, end))
        start_ns, begin_ns, end_ns = (clock.time_ns(stamp) for stamp in (start, begin, end))
        assert start_ns is not None and begin_ns is not None and end_ns is not None
        lengths_ns.append(end_ns - begin_ns)
        late_ns.append(end_ns - driver.kernels[-2].end_ns)
    receives = [kernel for kernel in driver.kernels if kernel.name == "receive"]
    for length_ns, receive in zip(lengths_ns, receives, strict=True):
        assert length_ns >= receive.end_ns - receive.start_ns
    assert min(late_ns[1:]) <= late_ns[0]
    assert clock.leave(wait=True)


def test_the_page_stays_as_long_as_the_device_may_write_to_it(clock: CudaClock, driver: FakeDriver, page: Page) -> None:
    issue_step(clock, driver, 5 * MS)
    assert not clock.leave(wait=False)
    assert clock.leave(wait=True)
    assert page.words[Field.BUBBLE] == 1 << 1
    mapping = f"{address_of(page.words):x}-"
    page.close()
    assert mapping in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("call", ["create_stream", "register", "write_words", "wait_for_words", "record"])
def test_a_device_that_cannot_write_words_is_polled(
    call: str, page: Page, driver: FakeDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.fail(call, at=1)
    with fake_torch(driver):
        clock = cuda_clock(page, time.monotonic_ns)
    assert isinstance(clock, PolledCudaClock) and page.words[Field.CLOCK_KIND] == ClockKind.CUDA_POLLED
    assert f"{call}: refused on purpose" in capsys.readouterr().err
    assert clock.leave(wait=True)


def test_memory_that_the_device_sees_too_late_is_not_used(
    page: Page, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "PATIENCE_S", 0.02)
    driver.late_ns = 200 * MS
    with pytest.raises(DriverError, match="do not see each other"):
        new_clock(CudaClock, page, driver)
    driver.late_ns = 0


class DeviceEngine(Engine):
    """One that issues its work on a device and runs ahead of it."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, page: Path, driver: FakeDriver) -> None:
        super().__init__(page)
        self._driver = driver

    def _run(self, name: str) -> None:
        self._driver.launch(DEFAULT_STREAM, {"RecvGrad": 8 * MS, "loss": 2 * MS}.get(name, 1 * MS), name)


@pytest.fixture
def hooked(tmp_path: Path, driver: FakeDriver, daemon: Daemon) -> Iterator[tuple[DeviceEngine, Handle]]:
    """An engine on the device, and the hooks on it, attached once the daemon listens."""
    engine = DeviceEngine(page_path(tmp_path / "hooks", 0), driver)
    with fake_torch(driver):
        yield engine, attach(engine, directory=tmp_path / "hooks", local_rank=0)


def test_hooks_on_a_device_tell_true_times_and_never_wait(
    hooked: tuple[DeviceEngine, Handle], driver: FakeDriver, daemon: Daemon
) -> None:
    engine, handle = hooked
    assert handle.enabled, handle.fault
    page = daemon.page
    plan_slot(page.words, 1, 5 * MS)
    plan_steps(page.words, 1, 100)
    assert handle._connection is not None
    clock = handle._connection.clock
    assert isinstance(clock, CudaClock)
    driver.wait_at_least(DEFAULT_STREAM, clock._device_words.address(Field.PROBE), 4)
    for _ in range(10):
        engine.train_batch()
    assert driver.kernels == [], "the device stands still, and the host ran ahead of it"
    page.words[Field.PROBE] = 4
    until(lambda: sum(kernel.end_ns > 0 for kernel in driver.kernels) == 40)
    while not daemon.is_connected():
        engine.train_batch()
    handle.detach()
    assert (page.words[Field.MAIN_PEAK_BYTES], page.words[Field.FREE_BYTES]) == (PEAK_BYTES, FREE_BYTES)
    assert f"{read_device_uuid(page.words):032x}" == UUID.replace("-", "")
    messages = daemon.hear_all()
    starts = {(m.step, m.slot): m for m in messages if isinstance(m, BubbleStart)}
    ends = {(m.step, m.slot): m for m in messages if isinstance(m, BubbleEnd)}
    assert starts and set(ends) <= set(starts)
    assert all(m.permit_ns == (5 * MS if m.slot == 1 and m.step < 100 else 0) for m in starts.values())
    assert {type(m) for m in messages} >= {StepStart, StepEnd, BubbleStart, BubbleEnd}
    assert {m.side_cpu_ns for m in starts.values()} == {-1}


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("call", "at"), [("write_words", 1), ("write_words", 2), ("record", 3), ("record", 4)])
def test_hooks_whose_device_refuses_calls_from_now_on_leave_no_gate_open(
    call: str, at: int, ahead: bool, hooked: tuple[DeviceEngine, Handle], driver: FakeDriver, daemon: Daemon
) -> None:
    engine, handle = hooked
    words = daemon.page.words
    connect(engine, daemon)  # a goodbye that comes earlier is dropped
    until(lambda: driver.is_idle(DEFAULT_STREAM))
    before = len(driver.kernels)
    plan_slot(words, 1, 5 * MS)
    plan_steps(words, 1, 1 << 30)
    watch = BubbleWatch(words, time.monotonic_ns)
    if ahead:
        words[Field.PROBE] = 0
        assert handle._connection is not None and isinstance(handle._connection.clock, CudaClock)
        probe = handle._connection.clock._device_words.address(Field.PROBE)
        driver.wait_at_least(DEFAULT_STREAM, probe, 4)  # the device stands still, and the host runs ahead
    for later in range(200):
        driver.fail(call, at=at + later)
    engine.train_batch()
    words[Field.PROBE] = 4
    for _ in range(3):
        engine.train_batch()
    assert f"{call}: refused" in str(handle.fault)
    assert any(isinstance(message, Bye) for message in daemon.hear_all())
    until(lambda: sum(kernel.end_ns > 0 for kernel in driver.kernels[before:]) == 16)
    watch.look()
    assert watch.left_ns(0) <= 0, "a side task that asks now gets nothing"
    assert words[Field.PERMIT_LEFT] == 0 or words[Field.DEVICE_GATE] == DeviceGate.CLOSED, "nor do units that it gave"


def test_hooks_whose_device_does_not_say_any_more_where_it_is_say_goodbye_all_the_same(
    hooked: tuple[DeviceEngine, Handle], driver: FakeDriver, daemon: Daemon
) -> None:
    engine, handle = hooked
    connect(engine, daemon)
    for later in range(1, 200):
        driver.fail("is_done", at=later)
    engine.train_batch()
    assert "is_done: refused" in str(handle.fault)
    assert [message.fault for message in daemon.hear_all() if isinstance(message, Bye)] == [1]


def test_a_thread_that_looks_breaks_no_graph_that_the_main_job_records(page: Page, driver: FakeDriver) -> None:
    """The host runs ahead of a bubble, and may record one in its next forward."""
    arrives = threading.Event()

    def wait() -> None:
        arrives.wait(PATIENCE_S)

    clock = new_clock(PolledCudaClock, page, driver)
    driver.queue(DEFAULT_STREAM, wait)
    clock.open(1, 3, 5 * MS)
    with driver.recording():
        looks = driver.calls("is_done")
        until(lambda: driver.calls("is_done") > looks + 2)
    arrives.set()
    until(page.is_open)
    clock.close()
    until(lambda: not page.is_open())
    clock.leave(wait=True)


def test_a_thread_that_the_device_refuses_shuts_the_gate_and_says_so(page: Page, driver: FakeDriver) -> None:
    clock = new_clock(PolledCudaClock, page, driver)
    clock.open(1, 3, 5 * MS)
    until(page.is_open)
    driver.fail("is_done", at=1)
    clock.close()
    until(lambda: not page.is_open())
    with pytest.raises(DriverError, match="refused on purpose"):
        clock.open(1, 4, 5 * MS)
    clock.leave(wait=True)
