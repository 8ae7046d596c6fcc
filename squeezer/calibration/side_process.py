"""The second program on the device: it does what it is told, one command after another, until its input ends.

`python -m squeezer.calibration.side_process FILE`; a command is a line of JSON, and so is its answer.

    busy   kernels without a pause while RUN is set, two in flight, until STOP
    gated  kernels, each behind a wait for GATE to reach its number; with `graph`, each unit of many as a CUDA graph
    hold   one kernel behind a wait for GATE; answers at once
    call   how long each of many driver calls takes while a stream waits at a shut gate
"""

import ctypes
import faulthandler
import json
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_hooks.shared.cuda_driver import DriverError
from squeezer.calibration.blocking_calls import time_calls
from squeezer.calibration.graphs import Graph
from squeezer.calibration.measured_device import MeasuredDevice, Word, until

IN_FLIGHT = 2


def busy(device: MeasuredDevice, options: dict[str, Any]) -> dict[str, Any]:
    """Compute while RUN is set.

    Args:
        device: where.
        options: `us` and `waves` of each kernel.

    Returns:
        `stamps`: (start, end) of each, in ns.
    """
    words, kernels = device.words, device.kernels
    busy_ns, waves = round(options["us"] * 1e3), options.get("waves", 1)
    queued: deque[tuple[int, int]] = deque()
    stamps: list[tuple[int, int]] = []
    words[Word.QUEUED] = 1
    while not words[Word.STOP]:
        if words[Word.RUN] and len(queued) < IN_FLIGHT:
            number = kernels.work(device.stream, busy_ns, waves)
            queued.append((device.mark(), number))
        while queued and device.passed(queued[0][0]):
            stamps.append(kernels.times(queued.popleft()[1]))
    device.finish()
    stamps += [kernels.times(number) for _, number in queued]
    return {"stamps": stamps}


def gated(device: MeasuredDevice, options: dict[str, Any]) -> dict[str, Any]:
    """Queue units, each behind a wait for GATE, the next when one has ended.

    Args:
        device: where.
        options: `count` of units; of each, how many kernels, `kernels`, and their length, `us`; `graph`.

    Returns:
        `stamps`: (first start, last end) of each; `host_ns`: what queueing one took.
    """
    words, kernels = device.words, device.kernels
    busy_ns, many = round(options["us"] * 1e3), options.get("kernels", 1)
    numbers: list[int] = []

    def unit() -> None:
        queue = kernels.work if many == 1 else kernels.small
        numbers[:] = [queue(device.stream, busy_ns) for _ in range(many)]

    graph = Graph(device, unit) if options.get("graph") else None
    recorded = list(numbers)
    stamps, host_ns = [], []
    for number in range(1, options["count"] + 1):
        if options.get("live"):  # the gate is open by then: launches come one by one
            words[Word.QUEUED] = number
            until(lambda number=number: words[Word.GATE] >= number or bool(words[Word.STOP]))  # type: ignore[misc]
        before_ns = time.perf_counter_ns()
        device.wait_for(Word.GATE, number)
        if graph is None:
            unit()
        else:
            for each in recorded:
                kernels.forget(each)
            graph.launch(device.stream)
            numbers[:] = recorded
        host_ns.append(time.perf_counter_ns() - before_ns)
        words[Word.QUEUED] = number
        device.finish()
        if words[Word.STOP]:
            break
        stamps.append((kernels.times(numbers[0])[0], kernels.times(numbers[-1])[1]))
    return {"stamps": stamps, "host_ns": host_ns}


def hold(device: MeasuredDevice, options: dict[str, Any]) -> dict[str, Any]:
    """Let the stream wait for GATE to reach `value`."""
    device.wait_for(Word.GATE, options["value"])
    device.kernels.work(device.stream, 10_000)
    return {}


def free_while_held(device: MeasuredDevice, options: dict[str, Any]) -> dict[str, Any]:
    """Wait at the gate with the host inside a call that waits for the device: `cuMemFree`."""
    memory = ctypes.c_uint64()
    device.driver.call("cuMemAlloc", ctypes.byref(memory), ctypes.c_size_t(1 << 20))
    hold(device, options)

    def free() -> None:
        device.driver.adopt_thread()
        device.driver.call("cuMemFree", memory)

    threading.Thread(target=free, daemon=True).start()
    time.sleep(0.05)
    return {}


COMMANDS: dict[str, Callable[[MeasuredDevice, dict[str, Any]], dict[str, Any]]] = {
    "busy": busy,
    "call": time_calls,
    "free_while_held": free_while_held,
    "gated": gated,
    "hold": hold,
}


def serve(device: MeasuredDevice) -> None:
    """Serve commands. What a killed parent has begun is ended."""
    threading.Thread(target=_outlive, args=(device, os.pidfd_open(os.getppid())), daemon=True).start()
    print(json.dumps({"ready": device.kernels.name}), flush=True)
    for line in sys.stdin:
        options = json.loads(line)
        try:
            answer = COMMANDS[options.pop("do")](device, options)
        except DriverError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


def _outlive(device: MeasuredDevice, parent_fd: int) -> None:
    select.select([parent_fd], [], [])
    device.open_all()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(35)
    serve(MeasuredDevice.open(Path(sys.argv[1])))
