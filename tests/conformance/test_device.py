"""What the daemon relies on of a device: one suite for CPU cores and for a CUDA device.

The side task is a real process. It needs no GPU: of a CUDA device the daemon touches the page and processes only.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ds_hooks.shared.device_uuid import write_device_uuid
from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import DeviceGate, Field
from ds_hooks.shared.page.plan import next_permit_ns, plan_slot, plan_steps
from ds_hooks.shared.processes.identity import start_time
from ds_hooks.shared.processes.strays import name_strays
from squeezer.config import DeviceTable
from squeezer.device import DEVICES, CudaDevice, Device, SideProcess
from tests.support.sandbox import is_alive, stat, wait_for

PATIENCE_S = 60.0
COUNTS = "import itertools\nfor n in itertools.count():\n    print(n, flush=True)\n"
OBSTINATE = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{COUNTS}"


class Side:
    """A side task that counts for ever, and takes SIGTERM as an order to end unless it is obstinate."""

    def __init__(self, program: str = COUNTS) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        self.process = SideProcess(pid=self._process.pid, pidfd=os.pidfd_open(self._process.pid))
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        self.wait_until_it_runs()

    def wait_until_it_runs(self) -> None:
        """Until it prints what it had not printed when this was called."""
        self.drain()
        assert select.select([self._output], [], [], PATIENCE_S)[0], "the side task does not run"

    def drain(self) -> None:
        while select.select([self._output], [], [], 0)[0] and os.read(self._output, 1 << 20):
            pass

    def is_halted(self) -> bool:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def status(self) -> int:
        """How it ended: minus the signal's number."""
        return self._process.wait(timeout=PATIENCE_S)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        os.close(self.process.pidfd)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    opened = Page.open(page_path(tmp_path / "pages", 0))
    yield opened
    opened.close()


@pytest.fixture(params=sorted(DEVICES))
def device(request: pytest.FixtureRequest, page: Page) -> Device:
    return DEVICES[request.param](page.words, DeviceTable(), 0)


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side()
    yield made
    made.close()


@pytest.fixture
def obstinate() -> Iterator[Side]:
    made = Side(OBSTINATE)
    yield made
    made.close()


def test_it_is_registered_under_its_name(device: Device) -> None:
    assert DEVICES[device.name] is type(device)
    assert device.arguments()[:2] == ["--device", device.name]


def test_without_the_drivers_library_nothing_is_known_and_nothing_barred(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    write_device_uuid(page.words, 7)
    for kind in DEVICES.values():
        device = kind(page.words, DeviceTable(), 0)
        assert device.meters() is None and device.bars_side_task() == ""
        assert device.needs_job != device.stops, "a context must not come first"


def test_the_side_task_gets_the_threads_that_are_asked_for(device: Device) -> None:
    environment = device.environment(3)
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE", "a thread that spins takes the core from the main job"


def test_it_halts_the_side_task_just_where_it_says_that_it_can(device: Device, side: Side) -> None:
    device.stop(side.process)
    end_s = time.monotonic() + PATIENCE_S
    while device.stops and not side.is_halted():
        assert time.monotonic() < end_s, "it was not halted"
        time.sleep(1e-3)
    if not device.stops:
        side.wait_until_it_runs()
    device.resume(side.process)
    side.wait_until_it_runs()


LEADS = "import os, time\nif pid := os.fork():\n    print(pid, flush=True)\ntime.sleep(60)\n"


def test_what_the_side_task_has_started_is_halted_continued_and_killed_with_it(device: Device, page: Page) -> None:
    if not device.stops:
        pytest.skip("what is queued on such a device cannot be halted")
    leads = [sys.executable, "-c", LEADS]
    with (
        subprocess.Popen(leads, stdout=subprocess.PIPE, process_group=0) as leader,
        subprocess.Popen(["sleep", "60"]) as stray,  # it has left the group
    ):
        try:
            assert leader.stdout is not None
            both = (leader.pid, int(leader.stdout.readline()))
            process = SideProcess(pid=leader.pid, pidfd=os.pidfd_open(leader.pid))
            name_strays(page.words, {stray.pid: start_time(stray.pid)})
            for act, state in ((device.stop, "T"), (device.resume, "S")):
                act(process)
                for pid in (*both, stray.pid):
                    wait_for(lambda pid=pid, state=state: stat(pid)[0] == state, f"state {state}", 20.0)
            stray.kill()
            stray.wait()
            device.end(process, 0.0, beside_main=True)
            for pid in both:
                wait_for(lambda pid=pid: not is_alive(pid), "its end", 20.0)
            os.close(process.pidfd)
        finally:
            os.killpg(leader.pid, signal.SIGKILL)
            stray.kill()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_end_is_asked_for_and_waited_for(device: Device, side: Side, is_stopped: bool) -> None:
    if is_stopped:
        device.stop(side.process)
    device.end(side.process, PATIENCE_S, beside_main=False)
    assert select.select([side.process.pidfd], [], [], 0)[0], "it has not ended yet"
    assert side.status() == -signal.SIGTERM


def test_who_does_not_end_is_killed(device: Device, obstinate: Side) -> None:
    device.end(obstinate.process, 0.05, beside_main=False)
    assert obstinate.status() == -signal.SIGKILL


def test_signals_to_a_side_task_that_has_ended_are_lost_in_peace(device: Device, side: Side) -> None:
    device.end(side.process, PATIENCE_S, beside_main=False)
    status = side.status()
    for act in (device.stop, device.resume):
        act(side.process)
    device.end(side.process, PATIENCE_S, beside_main=False)
    assert side.status() == status


def test_after_the_end_the_gate_is_not_left_open(device: Device, side: Side, page: Page) -> None:
    page.words[Field.DEVICE_GATE] = DeviceGate.CLOSED
    device.end(side.process, PATIENCE_S, beside_main=False)
    assert page.words[Field.DEVICE_GATE] == DeviceGate.CLOSED


def test_a_main_job_that_ends_in_a_bubble_leaves_nothing_permitted(device: Device, page: Page) -> None:
    words = page.words
    words[Field.BUBBLE], words[Field.PERMIT_UNTIL_NS] = 9 << 1 | 1, 2**62
    words[Field.DEVICE_GATE] = 5000
    plan_slot(words, 0, 5_000_000)
    plan_steps(words, 1, 2**31)
    device.main_ended()
    # a CPU gate asks for the permit; a CUDA gate for its own word, for an open bubble, and for one that is due
    asked = {
        "cpu": [words[Field.PERMIT_UNTIL_NS]],
        "cuda": [words[Field.DEVICE_GATE] != DeviceGate.CLOSED, words[Field.BUBBLE] & 1, next_permit_ns(words, 9, 0)],
    }
    assert not any(asked[device.name])


def test_it_joins_the_cores_of_the_rank_and_survives_its_end(device: Device, side: Side) -> None:
    own = os.sched_getaffinity(0)
    core = min(own)
    os.sched_setaffinity(side.process.pid, {core})
    try:
        assert device.join(side.process.pid, None)
        assert os.sched_getaffinity(0) == {core}
        device.end(side.process, PATIENCE_S, beside_main=False)
        side.status()
        device.join(side.process.pid, None)  # nobody's by now
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, own)


PARENT = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {COUNTS!r}])\n{COUNTS}"


def test_a_side_task_and_its_children_follow_the_next_job_to_its_cores(device: Device) -> None:
    own, core = os.sched_getaffinity(0), max(os.sched_getaffinity(0))
    job, side = Side(), Side(PARENT)
    children = psutil.Process(side.process.pid).children()
    try:
        os.sched_setaffinity(job.process.pid, {core})
        assert device.join(job.process.pid, side.process)
        assert len(children) == 1
        for pid in (side.process.pid, children[0].pid):
            assert os.sched_getaffinity(pid) == {core}
    finally:
        os.sched_setaffinity(0, own)
        for child in children:
            child.kill()
        side.close()
        job.close()


def test_a_context_cannot_follow_to_another_device(page: Page, side: Side) -> None:
    device = CudaDevice(page.words, DeviceTable(), 0, {})
    write_device_uuid(page.words, 7)
    device.environment(1)  # of the side task, which starts on device 7
    me = os.getpid()
    assert device.join(me, side.process)
    write_device_uuid(page.words, 8)
    assert not device.join(me, side.process)
    assert device.join(me, None), "there is none yet"
