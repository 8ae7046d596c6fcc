"""The parts `words`, `context`, `faults` and `memory` of `gpu_suite`, which need no pipeline."""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Self
from unittest import mock

from benchmarks.gpu.device_kernels import Kernels, open_device
from benchmarks.gpu.fake_driver import FakeDriver
from benchmarks.shared.intervals import ratio_with_ci95
from benchmarks.shared.paths import ROOT
from ds_hooks.shared.cuda_driver import DeviceWords, Driver, comes
from ds_hooks.shared.forced_gate import force_gate
from ds_hooks.shared.page.file import Page, make_private_dir, page_path
from ds_hooks.shared.page.layout import ClockKind, DeviceGate, Field, Role
from ds_hooks.shared.page.plan import plan_slot, plan_steps
from squeezer.calibration import mps_server as calibration
from squeezer.calibration.mps import PIPE_VARIABLE, directory_of, has_control

UNIT_US = {"cuda": 500.0, "cpu": 3000.0}
PATIENCE_S = 60.0
_END_S = 20.0
DEEP_QUEUE = 200
LONG_NS = 10_000_000
ECHOES = 200
CAP = 0.1
_FILL_UP = """
import sys, torch
torch.cuda.set_per_process_memory_fraction(float(sys.argv[1]))
held = []
try:
    while True:
        held.append(torch.empty(1 << 26, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError:
    print(torch.cuda.max_memory_reserved() / torch.cuda.get_device_properties(0).total_memory)
"""
"""Allocates until it is refused, then prints its share of the device."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A device, and a page for it."""

    device: str
    driver: Driver
    kernels: Kernels
    page: Page
    folder: Path
    quick: bool

    @classmethod
    def open(cls, device: str, folder: Path, *, quick: bool) -> Self:
        """Open the device and its page."""
        driver, kernels = open_device(device)
        page = Page.open(page_path(make_private_dir(folder / "pages"), 0))
        return cls(device, driver, kernels, page, folder, quick)

    def close(self) -> None:
        """Release both."""
        self.page.close()
        if isinstance(self.driver, FakeDriver):
            self.driver.close()

    def finish(self, stream: int) -> None:
        """Wait until everything queued in `stream` has ended."""
        event = self.driver.create_event()
        self.driver.record(event, stream)
        end_s = time.monotonic() + PATIENCE_S
        while not self.driver.is_done(event):
            if time.monotonic() > end_s:
                raise TimeoutError("the device does not finish")
            time.sleep(1e-5)
        self.driver.destroy_event(event)

    @contextmanager
    def side(self, way: str, page: Page | None = None) -> Iterator["Side"]:
        """Start a second process on the device; `side.py` lists the ways."""
        page = page or self.page
        out = self.folder / f"{way}.stamps"
        command = [sys.executable, "-m", "benchmarks.gpu.side", way, "--device", self.device, "--page", str(page.path)]
        command += ["--out", str(out), "--unit-us", str(UNIT_US[self.device])]
        environment = {
            **os.environ,
            "CUDA_MPS_CLIENT_PRIORITY": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        }
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        side = Side(process, page, out)
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
            if not ready or process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the side task ({way}) did not start")
            page.words[Field.SIDE_PROCESS] = process.pid  # as the daemon does: the hooks wake no other
            yield side
        finally:
            page.words[Field.SIDE_PROCESS] = 0
            side.end()


@dataclass(slots=True)
class Side:
    """A second process on the device."""

    process: "subprocess.Popen[str]"
    page: Page
    out: Path

    def end(self) -> None:
        """Open its gate, and end it."""
        if self.process.poll() is None:
            force_gate(self.page.words)
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.page.words[Field.DEVICE_GATE] = DeviceGate.CLOSED

    def stamps(self) -> list[tuple[int, int]]:
        """(start, end) of its kernels, after it has ended."""
        return [(start_ns, end_ns) for start_ns, end_ns in json.loads(self.out.read_text(encoding="utf-8"))]


@contextmanager
def mps_server(folder: Path) -> Iterator[None]:
    """Let this process, before it uses the device, and its children share the device by a server of our own."""
    with calibration.mps_server(folder) as directories, mock.patch.dict(os.environ, directories):
        yield


@contextmanager
def no_mps_server() -> Iterator[None]:
    """Let them share it by no server, even where there is one."""
    nowhere = {PIPE_VARIABLE: os.devnull} if has_control(directory_of(os.environ)) else {}
    with mock.patch.dict(os.environ, nowhere):
        yield


def words_between_processes(bench: Bench) -> dict[str, Any]:
    """Time of a word to the host and back, and from here to a side task at the gate, by the kernels' own stamps."""
    driver, words = bench.driver, bench.page.words
    bench.page.claim(Role.MAIN)
    words[Field.CLOCK_KIND] = ClockKind.CUDA  # or the side task would take every bubble for shut
    shared, stream = DeviceWords(driver, words, probe=Field.PROBE), driver.create_stream()
    to_host_us, round_trip_us = [], []
    count = ECHOES // 10 if bench.quick else ECHOES
    seen = driver.create_event()
    for number in range(1, count + 1):
        begin_ns = time.perf_counter_ns()
        shared.write(stream, (Field.PERMIT_LENGTH_NS, number))
        _until(lambda number=number: words[Field.PERMIT_LENGTH_NS] == number)  # type: ignore[misc]
        to_host_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
        words[Field.PROBE] = 0
        driver.wait_at_least(stream, shared.address(Field.PROBE), 1)
        driver.record(seen, stream)
        begin_ns = time.perf_counter_ns()
        words[Field.PROBE] = 1
        _until(lambda: driver.is_done(seen))
        round_trip_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
    across_us = _across(bench, shared, stream, count)
    shared.release()
    plan_steps(words, 0, 0)
    return {"to_host_us": to_host_us, "round_trip_us": round_trip_us, "across_us": across_us}


def _until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > end_s:
            raise TimeoutError("the device and the host do not see each other's words")
        time.sleep(0)


def _across(bench: Bench, shared: DeviceWords, stream: int, count: int) -> list[float]:
    """Time from the end of a kernel here to the start of the first one behind the other's gate, in µs."""
    kernels, words = bench.kernels, bench.page.words
    first = len(kernels.stamps())
    permit_ns = 2**31
    plan_slot(words, 0, permit_ns)
    plan_steps(words, 1, 2**31)
    with bench.side("gate") as side:
        for epoch in range(1, count + 1):
            os.kill(side.process.pid, signal.SIGUSR1)
            time.sleep(2e-3)  # time to arm itself
            kernels.work(stream, 200_000)
            gate = DeviceGate.open_for(permit_ns)
            permit, bubble = (Field.PERMIT_LENGTH_NS, permit_ns), (Field.BUBBLE, epoch << 1 | 1)
            shared.write(stream, (Field.STEP, epoch), permit, bubble, (Field.DEVICE_GATE, gate))
            bench.finish(stream)
            time.sleep(2e-3)
            shared.write(stream, (Field.DEVICE_GATE, DeviceGate.CLOSED), (Field.BUBBLE, epoch << 1))
            bench.finish(stream)
    own = kernels.stamps()[first:]
    theirs = sorted(side.stamps())
    latencies_us = []
    for _, end_ns in own:
        after = next((start_ns for start_ns, _ in theirs if start_ns >= end_ns), None)
        if after is not None and after - end_ns < 50_000_000:
            latencies_us.append((after - end_ns) / 1e3)
    words[Field.BUBBLE] = 0
    return latencies_us


def context_cost(bench: Bench, way: str) -> dict[str, Any]:
    """Time of the same kernels with and without another process on the device, in turn."""
    pairs = 3 if bench.quick else 8
    alone_ns, beside_ns = [], []
    bench.page.words[Field.PLAN_UNTIL_STEP] = 1  # the naive one computes
    for _ in range(pairs):
        alone_ns.append(_batch_ns(bench))
        with bench.side(way):
            beside_ns.append(_batch_ns(bench))
    bench.page.words[Field.PLAN_UNTIL_STEP] = 0
    slowdown, interval = ratio_with_ci95(list(zip(beside_ns, alone_ns, strict=True)))
    runs = {"alone_ns": alone_ns, "beside_ns": beside_ns}
    return {"slowdown": slowdown, "slowdown_ci95": interval, **runs}


def context_changes(bench: Bench) -> dict[str, Any]:
    """The gaps between kernels that are queued without a pause: alone, and while another process comes and goes."""
    alone_us = _gaps_us(bench)
    stream = _queue_kernels(bench)
    begun_s = time.monotonic()
    with bench.side("idle"):
        started_s = time.monotonic()
    ended_s = time.monotonic()
    beside_us = _gaps_us(bench, stream)
    times = {"start_s": started_s - begun_s, "end_s": ended_s - started_s}
    return {"alone_gaps_us": alone_us, "beside_gaps_us": beside_us, **times}


def _queue_kernels(bench: Bench) -> int:
    """Give a stream work for longer than a process takes to start and end; as much as has room in it."""
    stream = bench.driver.create_stream()
    for _ in range(100 if bench.quick else 900):
        bench.kernels.work(stream, LONG_NS)
    return stream


def _gaps_us(bench: Bench, stream: int | None = None) -> list[float]:
    """The longest gaps between the kernels of a stream, by default of one without company, in µs."""
    stream = _queue_kernels(bench) if stream is None else stream
    bench.finish(stream)
    bench.driver.destroy_stream(stream)
    own = bench.kernels.stamps()[-(100 if bench.quick else 900) :]
    return sorted(((after - before) / 1e3 for (_, before), (after, _) in pairwise(own)), reverse=True)[:20]


def _batch_ns(bench: Bench) -> float:
    """Time of a batch of kernels, by their stamps: the median of five."""
    kernels, stream = bench.kernels, bench.driver.create_stream()
    times_ns = []
    for _ in range(5):
        first = len(kernels.stamps())
        for _ in range(10 if bench.quick else 100):
            kernels.work(stream, round(UNIT_US[bench.device] * 1e3))
        bench.finish(stream)
        own = kernels.stamps()[first:]
        times_ns.append(own[-1][1] - own[0][0])
    bench.driver.destroy_stream(stream)
    return median(times_ns)


def sigstop(bench: Bench) -> dict[str, Any]:
    """Does SIGSTOP reach queued kernels? Stops this process with a deep queue; a child continues it."""
    stream = bench.driver.create_stream()
    first = len(bench.kernels.stamps())
    unit_ns = round(UNIT_US[bench.device] * 1e3)
    for _ in range(DEEP_QUEUE):
        bench.kernels.work(stream, unit_ns)
    script = "import os, signal, time; time.sleep(0.2); os.kill(os.getppid(), signal.SIGCONT)"
    with subprocess.Popen([sys.executable, "-c", script]):
        before = len(bench.kernels.stamps()) - first
        os.kill(os.getpid(), signal.SIGSTOP)
    after = len(bench.kernels.stamps()) - first - before
    bench.finish(stream)
    return {"queued": DEEP_QUEUE, "after": after}


def sigkill(bench: Bench) -> dict[str, Any]:
    """Does the device survive the death of a process whose stream waits?"""
    with bench.side("waiting") as side:
        side.process.kill()
        side.process.wait()
    stream = bench.driver.create_stream()
    bench.kernels.work(stream, 1_000_000)
    event = bench.driver.create_event()
    bench.driver.record(event, stream)
    goes_on = comes(bench.driver, event)
    with bench.side("idle"):  # another process may take its place
        pass
    return {"goes_on": goes_on}


def memory(bench: Bench) -> dict[str, Any]:
    """The device memory of a context, and whether an allocator's cap holds."""
    before = _free_bytes(bench.driver)
    with bench.side("idle"):
        after = _free_bytes(bench.driver)
    script = subprocess.run([sys.executable, "-c", _FILL_UP, str(CAP)], capture_output=True, text=True, check=True)
    return {"context_mib": (before - after) / 2**20, "cap": CAP, "held": float(script.stdout)}


def _free_bytes(driver: Any) -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    driver.call("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value
