"""What every gate must do: on a core, on a CUDA device that threads play, and on a GPU where there is one.

A thread plays the main job; the test is the side task. Machines are busy, so a start counts as outside of bubbles only
in the second half of the time between two of them. Gates that never close must pass what does not need a bubble.
"""

import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_hooks.shared.forced_gate import force_gate
from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import DeviceGate, Field, SideActivity
from ds_hooks.shared.page.plan import plan_slot
from tests.support.bounded import within
from tests.support.fused_and_solo import ToyStudy, members
from tests.support.gated_devices import (
    MS,
    Cpu,
    Cuda,
    FakeCuda,
    Kind,
    LazyCuda,
    NeverCloses,
    Records,
    ShallowCuda,
    Streams,
    UnkindCuda,
)
from tests.support.main_job import MainJob
from tests.support.sandbox import wait_for
from trials.gate.base import GATE_SIGNALS, HOST_UNIT, GateError, OpenGate, StopRequested
from trials.gate.unit_costs import UnitCosts
from trials.training.group import TrialGroup

pytestmark = pytest.mark.integration
PATIENCE_S = 60.0  # of the side task, until a bubble lets it in

GPU = pytest.param(
    Cuda, marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


@pytest.fixture
def signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GATE_SIGNALS)
    yield
    while signal.sigtimedwait(GATE_SIGNALS, 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.fixture
def page(memory_path: Path) -> Iterator[Page]:
    made = Page.open(page_path(memory_path / "pages", 0))
    yield made
    made.close()


@pytest.fixture(params=[Cpu, FakeCuda, UnkindCuda, GPU])
def kind(request: pytest.FixtureRequest, page: Page, signals: None) -> Iterator[Kind]:
    made = request.param(page)
    yield made
    made.leave()


@pytest.fixture(params=[NeverCloses, Records, Cpu, FakeCuda, GPU])
def any_kind(request: pytest.FixtureRequest, page: Page, signals: None) -> Iterator[Kind]:
    made = request.param(page)
    yield made
    made.leave()


@pytest.fixture(params=[FakeCuda, GPU])
def cuda(request: pytest.FixtureRequest, page: Page, signals: None) -> Iterator[Streams]:
    made = request.param(page)
    yield made
    made.leave()


@pytest.fixture
def main(page: Page, signals: None) -> Iterator[MainJob]:
    made = MainJob(page)
    yield made
    made.join()


def test_all_calls_return_while_a_bubble_is_open(any_kind: Kind, main: MainJob) -> None:
    gate = any_kind.gate
    gate.use(["a", "b"], 2)
    main.open(10_000)
    gate.enter(HOST_UNIT)
    for unit in (0, 1, 0):
        gate.enter(unit)
        any_kind.work(1)
    gate.settle()
    gate.add_work(6)
    gate.rest()
    assert gate.take_starved() == []
    gate.use(["c"], 1)
    gate.enter(0)
    gate.rest()
    assert gate.close() and gate.close(), "the page may be unmapped"
    main.close()


def test_no_gate_changes_a_number(any_kind: Kind, main: MainJob) -> None:
    data = [(torch.randn(5, 3, dtype=torch.float64), torch.zeros(5)) for _ in range(2)]
    study = ToyStudy(lambda n: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double(), "adam", data)
    ungated = TrialGroup(study, members(study, range(2)), OpenGate())
    main.open(60_000)
    any_kind.gate.enter(HOST_UNIT)
    gated = TrialGroup(study, members(study, range(2)), any_kind.gate)
    for group in (ungated, gated):
        for batch in data:
            group.train_step(*batch)
    assert gated.evaluate() == ungated.evaluate()
    assert torch.equal(gated.losses_K(), ungated.losses_K())
    main.close()


def test_units_start_in_bubbles_only(kind: Kind, main: MainJob) -> None:
    kind.gate.use(["a", "b"], 1)
    main.play((60, 55, 60))
    while len(main.bubbles) < 4 or (len(kind.spans()) < 10 and len(main.bubbles) < 100):
        with within(PATIENCE_S, "the next round"):
            kind.gate.enter(HOST_UNIT)
        for unit in (0, 1):
            queue(kind, 4, unit)
    main.join()
    assert main.strays(kind.spans()) == []
    assert len(kind.spans()) >= 10


def queue(kind: Kind, ms: int, unit: int = 0) -> None:
    """Run a unit, or give it to the device."""
    with within(PATIENCE_S, f"unit {unit}, until it has been let in,"):
        kind.gate.enter(unit)
        kind.work(ms)


def run(kind: Kind, main: MainJob, *units_ms: int) -> None:
    """Run unit 0 with so much work each time, however many bubbles that takes, until their ends are known."""
    for ms in units_ms:
        queue(kind, ms)
    with within(PATIENCE_S, "what is queued"):
        kind.gate.settle()
    kind.gate.rest()
    main.join()
    kind.gate.rest()


def learn(kind: Kind, main: MainJob) -> None:
    """Let unit 0 be known to take 30 ms."""
    kind.gate.use(["a"], 1)
    for _ in range(2):
        main.play((20, 100, 100))
        run(kind, main, 30)
    assert isinstance(kind.gate, UnitCosts) and kind.gate._costs_ns[0] > 20 * MS


def test_a_unit_that_does_not_fit_waits_for_a_bubble_that_is_long_enough(kind: Kind, main: MainJob) -> None:
    learn(kind, main)
    first = len(main.bubbles)
    main.play((20, 15, 60), (60, 15, 60), (60, 150, 150))
    run(kind, main, 30)
    assert len(kind.spans()) == 3
    assert kind.spans()[2][0] >= main.bubbles[first + 2][0]


def test_one_that_misses_a_bubble_is_let_into_the_next(kind: Kind, main: MainJob) -> None:
    kind.gate.use(["a"], 1)
    main.play((40, 20, 20))
    time.sleep(0.15)
    run(kind, main, 1)
    assert len(main.bubbles) > 1 and len(kind.spans()) == 1 and main.strays(kind.spans()) == []


def test_a_bubble_that_outlives_its_permit_is_used_again(kind: Kind, main: MainJob, page: Page) -> None:
    kind.gate.use(["a"], 1)
    main.play((10, 100, 100))
    run(kind, main, 8, 8)
    plan_slot(page.words, 0, 1 * MS, ((60 * MS, 5000 * MS),))
    first = len(main.bubbles)
    main.play((10, 1, 30), (40, 1, 400))
    run(kind, main, 8)
    assert len(kind.spans()) == 3
    began_ns = kind.spans()[2][0] - main.bubbles[first + 1][0]
    # on a CUDA device a bubble counts from when the host last saw it closed, which may be some ms before
    assert 30 * MS <= began_ns < 400 * MS, "not in the bubble that was over by then, and not in the permit"


def test_the_end_is_asked_for_while_it_waits(kind: Kind, main: MainJob) -> None:
    threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGTERM)).start()
    with pytest.raises(StopRequested):
        kind.gate.enter(HOST_UNIT)
    assert kind.spans() == []


def test_a_unit_that_raises_leaves_the_gate_as_it_was(kind: Kind, main: MainJob) -> None:
    kind.gate.use(["a"], 1)
    main.play((10, 300, 300))
    with pytest.raises(ZeroDivisionError):
        kind.gate.enter(0)
        raise ZeroDivisionError
    run(kind, main, 4)
    assert main.strays(kind.spans()) == [] and len(kind.spans()) == 1


def test_it_says_when_it_sleeps(kind: Kind, main: MainJob, page: Page) -> None:
    kind.gate.use(["a"], 1)
    main.open(1000)
    kind.gate.enter(HOST_UNIT)
    kind.gate.rest()
    kind.gate.enter(HOST_UNIT)
    assert page.words[Field.SIDE_ACTIVITY] == SideActivity.HOST
    kind.work(1)
    kind.gate.rest()
    time.sleep(0.05)
    kind.gate.rest()
    assert page.words[Field.SIDE_ACTIVITY] == SideActivity.ASLEEP
    main.close()


def test_a_queued_unit_starts_without_the_host(cuda: Streams, main: MainJob) -> None:
    cuda.gate.use(["a"], 1)
    main.due(100)
    queue(cuda, 4)
    queue(cuda, 4)
    time.sleep(0.05)
    assert cuda.spans() == []
    main.open(100)
    time.sleep(0.1)
    main.close()
    assert len(cuda.spans()) == 2 and main.strays(cuda.spans()) == []


def test_the_third_unit_waits_for_the_first(cuda: Streams, main: MainJob) -> None:
    cuda.gate.use(["a"], 1)
    main.open(10_000)
    for _ in range(3):
        queue(cuda, 20)
    third_ns = time.monotonic_ns()
    time.sleep(0.15)
    assert cuda.spans()[0][1] <= third_ns + MS
    main.close()


def test_a_bubble_that_ends_between_two_queued_units_holds_the_second_back(cuda: Streams, main: MainJob) -> None:
    cuda.gate.use(["a"], 1)
    main.due(1000)
    queue(cuda, 100)
    queue(cuda, 4)
    main.open(1000)
    time.sleep(0.03)
    main.close()
    time.sleep(0.15)
    assert len(cuda.spans()) == 1
    main.open(1000)
    time.sleep(0.05)
    assert len(cuda.spans()) == 2 and main.strays(cuda.spans()) == []
    main.close()


def test_a_forced_gate_lets_through_what_is_queued_and_no_more(cuda: Streams, main: MainJob, page: Page) -> None:
    cuda.gate.use(["a"], 1)
    main.due(1000)
    queue(cuda, 4)
    page.words[Field.DEVICE_GATE] = DeviceGate.FORCED
    threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGTERM)).start()
    with pytest.raises(StopRequested):
        cuda.gate.enter(0)
    assert len(cuda.spans()) == 1
    assert cuda.gate.close()


def test_a_host_that_the_driver_holds_gets_out_though_bubbles_became_too_short(cuda: Streams, main: MainJob) -> None:
    learn(cuda, main)
    main.due(100)
    queue(cuda, 30)
    main.play((5, 6, 6))
    cuda.synchronize()
    with pytest.raises(GateError, match="too long for every bubble"):
        cuda.gate.settle()
    main.join()
    assert len(cuda.spans()) == 3


def test_a_gate_whose_own_call_the_driver_holds_gets_out_though_bubbles_became_too_short(
    main: MainJob, page: Page, signals: None
) -> None:
    shallow = ShallowCuda(page)
    learn(shallow, main)
    main.due(100)
    queue(shallow, 30)
    for _ in range(ShallowCuda.ROOM - 2):
        shallow.work(0)  # behind the event at its begin, and its first kernel; there is no room for the one at its end
    main.play((5, 6, 6))
    rescue = threading.Timer(20, force_gate, (page.words,))
    rescue.start()
    try:
        with pytest.raises(GateError, match="too long for every bubble"):
            shallow.gate.settle()
    finally:
        rescue.cancel()
        main.join()
        shallow.leave()


@pytest.fixture
def lazy(page: Page, signals: None) -> Iterator[LazyCuda]:
    made = LazyCuda(page)
    yield made
    made.leave()


@pytest.mark.parametrize("by", ["a bubble", "the daemon that ends it"])
def test_a_first_launch_that_loads_behind_its_own_wait_comes_through(
    by: str, lazy: LazyCuda, main: MainJob, page: Page
) -> None:
    lazy.gate.use(["a"], 1)
    main.due(1000)
    lazy.gate.enter(0)
    launch = threading.Thread(target=lazy.work, args=(4,), daemon=True)
    launch.start()
    launch.join(0.1)
    assert launch.is_alive(), "loading waits for the device, and that for the gate"
    if by == "a bubble":
        main.open(1000)
    else:
        force_gate(page.words)
    launch.join(60)
    assert not launch.is_alive()
    lazy.gate.settle()
    assert len(lazy.spans()) == 1
    if by == "a bubble":
        main.close()


def test_a_first_launch_in_a_unit_that_became_too_long_for_every_bubble_comes_through(
    lazy: LazyCuda, main: MainJob, page: Page
) -> None:
    learn(lazy, main)
    main.due(100)
    lazy.gate.enter(0)
    main.play((5, 6, 6))
    rescue = threading.Timer(20, force_gate, (page.words,))
    rescue.start()
    lazy.work(29)  # a kernel that this unit has not launched yet
    rescue.cancel()
    with pytest.raises(GateError, match="too long for every bubble"):
        lazy.gate.settle()
    main.join()
    assert len(lazy.spans()) == 3


def test_kernels_of_units_that_come_later_are_loaded_in_bubbles_too(lazy: LazyCuda, main: MainJob) -> None:
    units = ["a", "validation", "optimizer"]
    lazy.gate.use(units, 1)
    main.play((30, 60, 60))
    for number in (0, 0, 1, 0, 2, 0):
        lazy.gate.enter(number)
        lazy.work(2 + number)
    lazy.gate.settle()
    main.join()
    assert len(lazy.spans()) == 6 and main.strays(lazy.spans()) == []


def test_a_units_later_kernels_start_in_no_gap_between_bubbles_however_slow_its_host_is(
    main: MainJob, page: Page
) -> None:
    fake = FakeCuda(page)
    try:
        fake.gate.use(["a"], 1)
        main.due(1000)
        fake.gate.enter(0)
        main.open(1000)
        fake.work(4)
        time.sleep(0.05)
        for number in (2, 3):
            main.close()
            time.sleep(0.1)  # another thread looks at the page every millisecond
            fake.work(4)
            time.sleep(0.1)
            assert len(fake.spans()) == number - 1
            main.open(1000)
            wait_for(lambda number=number: len(fake.spans()) == number, "the next bubble")
        fake.gate.settle()
        main.close()
        gaps_ns = sum(begin - end for (_, end), (begin, _) in pairwise(main.bubbles))
        assert page.words[Field.BUSY_NS] < main.bubbles[-1][1] - main.bubbles[0][0] - gaps_ns / 2, "waits do not count"
    finally:
        fake.leave()
