"""The side task of `gpu_suite`: kernels of known length, in one of six ways to use a device.

    idle     it has a context and runs nothing
    waiting  its stream waits for a gate that nobody opens
    naive    it always computes
    host     layer by layer, when its host sees an open bubble in which the layer fits: a gate on the host alone
    gate     ours: each layer waits on the device itself
    trials   the same with fused trials of the product in place of kernels of known length

`python -m benchmarks.gpu.side WAY --page FILE --out FILE` prints a line when it is ready, and ends by SIGTERM.
"""

import argparse
import json
import signal
from collections import deque
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

from benchmarks.gpu.device_kernels import Kernels, open_device
from ds_hooks.shared.cuda_driver import DeviceWords, Driver, Words, comes
from ds_hooks.shared.forced_gate import force_gate
from ds_hooks.shared.page.file import Page
from ds_hooks.shared.page.layout import DeviceGate, Field, Role
from ds_hooks.shared.processes.parent import die_with_parent
from ds_hooks.shared.processes.signals import END_SIGNAL
from trials.gate.base import StopRequested, block_signals
from trials.gate.cuda import CudaGate
from trials.gate.process import nap

UNITS = 8
WITHOUT_A_GATE = ("idle", "waiting", "naive")


class HostGate(CudaGate):
    """A gate without the device's help: it queues a unit when it has seen the bubble open."""

    def _probe(self) -> None:
        """Allow nothing to be queued ahead, because nothing waits on the device."""
        self._watch.ahead = False


class NoWaits:
    """A driver whose streams ignore waits for words."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def wait_for_words(self, stream: int, values: Words) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._driver, name)


def main() -> None:
    """Run the side task."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.side")
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="where the kernels' stamps go")
    parser.add_argument("--unit-us", type=float, default=500.0)
    options = parser.parse_args()
    if options.way in WITHOUT_A_GATE:
        die_with_parent()  # a gate looks by itself whether anybody is left
    block_signals()
    page = Page.open(options.page, create=False)
    page.claim(Role.SIDE)
    driver, kernels = open_device(options.device)
    unit_ns = round(options.unit_us * 1e3)
    try:
        WAYS[options.way](page, driver, kernels, unit_ns)
    except StopRequested:
        pass
    options.out.write_text(json.dumps(kernels.stamps()), encoding="utf-8")


def _ready() -> None:
    print("ready", flush=True)


def _idle(page: Page, driver: Driver, kernels: Kernels, unit_ns: int) -> None:
    _ready()
    signal.sigwait({END_SIGNAL})


def _waiting(page: Page, driver: Driver, kernels: Kernels, unit_ns: int) -> None:
    words, stream = DeviceWords(driver, page.words, probe=Field.SIDE_BYTES), driver.create_stream()
    driver.wait_at_least(stream, words.address(Field.DEVICE_GATE), DeviceGate.FORCED)
    kernels.work(stream, unit_ns)
    passed = driver.create_event()
    driver.record(passed, stream)
    _ready()
    signal.sigwait({END_SIGNAL})
    force_gate(page.words)  # whoever has sent that may not have opened it
    if comes(driver, passed):
        words.release()


def _naive(page: Page, driver: Driver, kernels: Kernels, unit_ns: int) -> None:
    stream = driver.create_stream()
    queued: deque[int] = deque()
    free = [driver.create_event() for _ in range(3)]
    _ready()
    received = None
    while received != END_SIGNAL:
        if page.words[Field.PLAN_UNTIL_STEP] and free:  # it has its windows, too
            kernels.work(stream, unit_ns)
            queued.append(free.pop())
            driver.record(queued[-1], stream)
        while queued and driver.is_done(queued[0]):
            free.append(queued.popleft())
        received = nap(1e-4)


def _host(page: Page, driver: Driver, kernels: Kernels, unit_ns: int) -> None:
    stream = driver.create_stream()
    _compute(HostGate(page, NoWaits(driver), stream), stream, kernels, unit_ns)  # type: ignore[arg-type]


def _gate(page: Page, driver: Driver, kernels: Kernels, unit_ns: int) -> None:
    stream = driver.create_stream()
    _compute(CudaGate(page, driver, stream), stream, kernels, unit_ns)


def _compute(gate: CudaGate, stream: int, kernels: Kernels, unit_ns: int) -> None:
    gate.use([f"unit {unit}" for unit in range(UNITS)], 1)
    _ready()
    try:
        for unit in cycle(range(UNITS)):
            gate.enter(unit)
            kernels.work(stream, unit_ns)
    finally:
        gate.close()


def _trials(page: Page, driver: Driver, kernels: Kernels, unit_ns: int) -> None:
    from benchmarks.gpu.fused_side import train  # imports torch, which the others do without

    train(page, _ready)


WAYS: dict[str, Callable[[Page, Driver, Kernels, int], None]] = {
    "idle": _idle,
    "waiting": _waiting,
    "naive": _naive,
    "host": _host,
    "gate": _gate,
    "trials": _trials,
}

if __name__ == "__main__":
    main()
