"""What is measured, a function each. All times are the device's own timer's, of both processes alike.

slices    how long the device runs one process before it turns to the other
          -> with MPS: observe only, or not
opening   from the gate's opening to the side task's first kernel
          -> the shortest bubble worth opening
arrival   from the arrival of data to the main job's next kernel, beside a side task in each of its states: the figure
          that decides
          -> margins; observe only, or not
blocking  which calls of the driver wait behind a shut gate, and whether the main job waits for a host that does
          -> depth of the queue; observe only, or not
words     the device's time for words on the compute stream, or on a second one
          -> where the words are written; on top of each arrival
graphs    a unit's launches one by one, and as one CUDA graph
          -> nothing: steps are recorded as graphs wherever they can be
contexts  the main job's kernels beside a second process that does nothing
          -> whether a side task may exist
shut      what becomes of a kernel behind a gate that stays shut for three minutes, and what the kernel's log says
          -> nothing: bubbles may be as far apart
"""

import random
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from ds_hooks.shared.cuda_driver import DriverError
from squeezer.calibration.blocking_calls import main_calls
from squeezer.calibration.bubble_words import WaysToMark
from squeezer.calibration.measured_device import LateError, MeasuredDevice, Word, until
from squeezer.calibration.peer import PROGRAM, Peer, peer, started

Row = dict[str, Any]
MARGINS_US = (0, 150, 500, 1500)
"""How long before the main job's data arrive the side task stops, in the figure `arrival`."""
SHUT_S = 180.0
_CALLS_LIMIT_S = 30.0
_OPENS_AFTER_S = 3.0


class Figures:
    """Measures on one device, in this process and a second one.

    Args:
        device: this process's view.
        path: the file of the shared words.
        side_environment: what the second process's environment has besides this one's.
        quick: a quarter of the repetitions.
        program: the module that the second process runs.
    """

    def __init__(
        self,
        device: MeasuredDevice,
        path: Path,
        side_environment: Mapping[str, str],
        *,
        quick: bool,
        program: str = PROGRAM,
    ) -> None:
        self._device, self._path, self._quick, self._program = device, path, quick, program
        self._environment = dict(side_environment)
        self._draws = random.Random(0)
        self._shut_s = SHUT_S / 4 if quick else SHUT_S

    def _peer(self, **environment: str) -> Any:
        return peer(self._device, self._path, {**self._environment, **environment}, self._program)

    def _count(self, full: int) -> int:
        return max(10, full // 4) if self._quick else full

    # slices

    def slices(self) -> Iterator[Row]:
        """A kernel that spins, as a receive does, beside kernels of the side task without a pause."""
        device = self._device
        for side_us, waves in ((100, 1), (1000, 1), (1000, 50)):
            with self._peer() as other:
                other.tell("busy", us=side_us, waves=waves)
                started(device)
                device.kernels.watch(device.stream, device.address(Word.READY), 1, 5_000)
                time.sleep(0.02)
                device.words[Word.RUN] = 1
                time.sleep(self._count(40) / 100)
                device.words[Word.RUN] = 0
                stamps = other.stop()["stamps"]
                device.words[Word.READY] = 1
                device.finish()
                start_ns, end_ns, gaps = device.kernels.gaps()
            yield {
                "side_us": side_us,
                "waves": waves,
                "main_ns": [start_ns, end_ns],
                "main_gaps_us": [round((again - last) / 1e3, 1) for last, again in gaps],
                "side_us_each": [round((end - start) / 1e3, 1) for start, end in stamps],
                "side_gaps_us": [round((b[0] - a[1]) / 1e3, 1) for a, b in pairwise(stamps)],
                "side_kernels": len(stamps),
                "side_span_us": (stamps[-1][1] - stamps[0][0]) / 1e3 if stamps else 0,
            }

    # opening

    def opening(self) -> Iterator[Row]:
        """The main job's stream writes the word, then spins, waits in the stream, or does nothing."""
        for main in ("idle", "spin", "stream"):
            with self._peer() as other:
                yield {"main": main, **self._opening(other, main)}

    def _opening(self, other: Peer, main: str) -> Row:
        device, count, opened = self._device, self._count(200), []
        other.tell("gated", count=count, us=50)
        for number in range(1, count + 1):
            until(lambda number=number: device.words[Word.QUEUED] >= number)  # type: ignore[misc]
            time.sleep(5e-4)
            stamp = device.kernels.stamp(device.stream)
            device.driver.write_word(device.stream, device.address(Word.GATE), number)
            self._receive(main, number)
            time.sleep(3e-3)
            device.words[Word.READY] = number
            device.finish()
            opened.append(device.kernels.times(stamp)[0])
        stamps = other.answer()["stamps"]
        pairs = list(zip(opened, stamps, strict=True))
        return {
            "opening_us": [round((start - at) / 1e3, 2) for at, (start, _) in pairs],
            "side_us": [round((end - start) / 1e3, 1) for _, (start, end) in pairs],
        }

    def _receive(self, kind: str, number: int) -> int | None:
        device = self._device
        if kind == "spin":
            return device.kernels.receive(device.stream, device.address(Word.READY), number)
        if kind == "stream":
            device.wait_for(Word.READY, number)
        return None

    # arrival

    def arrival(self) -> Iterator[Row]:
        """Each state of the side task, with a receive that spins and one that waits in the stream.

        `busy` computes all the time; `margin_X` stops X µs before the data come.
        """
        for receive in ("spin", "stream"):
            yield {"receive": receive, "side": "none", **self._arrivals(receive, None)}
            with self._peer() as other:
                yield {"receive": receive, "side": "idle", **self._arrivals(receive, None)}
                other.tell("hold", value=1)
                other.answer()
                yield {"receive": receive, "side": "waiting", **self._arrivals(receive, None)}
                self._device.words[Word.GATE] = 1
                for us, waves in ((50, 1), (500, 1), (500, 50)):
                    other.tell("busy", us=us, waves=waves)
                    started(self._device)
                    side = {"side_us": us, "waves": waves}
                    yield {"receive": receive, "side": "busy", **side, **self._arrivals(receive, -1)}
                    if us == 50:
                        for margin_us in MARGINS_US:
                            found = self._arrivals(receive, margin_us)
                            yield {"receive": receive, "side": f"margin_{margin_us}", **side, **found}
                    other.stop()
                    self._device.words[Word.QUEUED] = 0

    def _arrivals(self, receive: str, margin_us: int | None) -> Row:
        """Let data arrive many times. `margin_us`: when the side task stops before; -1: never; None: it rests."""
        device, words = self._device, self._device.words
        offset_ns, error_ns = device.offset_ns()
        seen, started_, ended = [], [], []
        for _ in range(self._count(120)):
            words[Word.READY] = 0
            arrives = self._receive(receive, 1)
            work = device.kernels.work(device.stream, 100_000, 10)
            begin_ns = time.monotonic_ns()
            if margin_us is not None:
                words[Word.RUN] = 1
            arrival_ns = begin_ns + 2_500_000 + self._draws.randrange(1_000_000)
            if margin_us is not None and margin_us >= 0:
                _spin_until(arrival_ns - 1000 * margin_us)
                words[Word.RUN] = 0
            _spin_until(arrival_ns)
            at_ns = time.monotonic_ns()
            words[Word.READY] = 1
            device.finish()
            words[Word.RUN] = 0
            at_ns += offset_ns
            if arrives is not None:
                seen.append(round((device.kernels.times(arrives)[0] - at_ns) / 1e3, 2))
            started_.append(round((device.kernels.times(work)[0] - at_ns) / 1e3, 2))
            ended.append(round((device.kernels.times(work)[1] - at_ns) / 1e3, 2))
            time.sleep(1e-3)
        return {"seen_us": seen, "started_us": started_, "ended_us": ended, "clock_error_us": error_ns / 1e3}

    # blocking

    def blocking(self) -> Iterator[Row]:
        """In the process at the gate; then in the main one, while the other's host waits in `cuMemFree`."""
        with self._peer() as other:
            other.tell("call")
            yield {"process": "side", **other.answer(_CALLS_LIMIT_S)}
        with self._peer() as other:
            opens = threading.Timer(_OPENS_AFTER_S, self._device.words.__setitem__, (Word.GATE, 1))
            opens.daemon = True
            opens.start()  # before the other process launches, which may have to wait for this
            other.tell("free_while_held", value=1)
            other.answer()
            took_ms = self._calls_beside()
            opens.cancel()
            yield {"process": "main", "took_ms": took_ms, "opens_after_ms": 1e3 * _OPENS_AFTER_S}

    def _calls_beside(self) -> dict[str, float | str]:
        took_ms: dict[str, float | str] = {}
        for name, call in main_calls(self._device):
            start_s = time.perf_counter()
            try:
                call()
                took_ms[name] = 1e3 * (time.perf_counter() - start_s)
            except (DriverError, LateError) as error:
                took_ms[name] = str(error)
        return took_ms

    # words

    def words(self) -> Iterator[Row]:
        """Two small kernels with a bubble's marks between them: device time for each way, and the host's."""
        ways = WaysToMark(self._device)
        for _ in range(self._count(20)):
            for name in self._draws.sample(sorted(ways.ways), len(ways.ways)):
                ways.measure(name)
        yield ways.row()

    # graphs

    def graphs(self) -> Iterator[Row]:
        """A unit of 40 short kernels: from the gate's opening to its end; queued before it, or after."""
        device, count = self._device, self._count(60)
        for graph in (False, True):
            for live in (False, True):
                with self._peer() as other:
                    other.tell("gated", count=count, us=3, kernels=40, graph=graph, live=live)
                    opened = []
                    for number in range(1, count + 1):
                        until(lambda number=number: device.words[Word.QUEUED] >= number)  # type: ignore[misc]
                        time.sleep(5e-4)
                        stamp = device.kernels.stamp(device.stream)
                        device.driver.write_word(device.stream, device.address(Word.GATE), number)
                        device.finish()
                        opened.append(device.kernels.times(stamp)[0])
                        time.sleep(3e-3)
                    answer = other.answer()
                yield {
                    "graph": graph,
                    "live": live,
                    "to_first_us": [
                        round((s[0] - at) / 1e3, 2) for at, s in zip(opened, answer["stamps"], strict=True)
                    ],
                    "to_end_us": [round((s[1] - at) / 1e3, 2) for at, s in zip(opened, answer["stamps"], strict=True)],
                    "host_us": [round(ns / 1e3, 1) for ns in answer["host_ns"]],
                }

    # contexts

    def contexts(self) -> Iterator[Row]:
        """Batches of kernels: alone, beside a process that is idle, one that waits at the gate, and one that runs."""
        device = self._device
        alone = [self._batch_us() for _ in range(self._count(20))]
        states: dict[str, list[float]] = {"idle": [], "waiting": [], "busy": []}
        with self._peer() as other:
            states["idle"] = [self._batch_us() for _ in range(self._count(20))]
            other.tell("hold", value=1)
            other.answer()
            states["waiting"] = [self._batch_us() for _ in range(self._count(20))]
            device.words[Word.GATE] = 1
            other.tell("busy", us=200, waves=20)
            started(device)
            device.words[Word.RUN] = 1
            states["busy"] = [self._batch_us() for _ in range(10)]
            other.stop()
        again = [self._batch_us() for _ in range(self._count(20))]
        yield {"alone_us": alone, **{f"{name}_us": found for name, found in states.items()}, "alone_again_us": again}

    # shut

    def shut(self) -> Iterator[Row]:
        """The side task's kernel waits for minutes, then the gate opens. The main job computes now and then."""
        logged = driver_messages()
        with self._peer() as other:
            other.tell("hold", value=1)
            other.answer()
            end_s, batches_us = time.monotonic() + self._shut_s, []
            while time.monotonic() < end_s:
                batches_us.append(self._batch_us())
                time.sleep(self._shut_s / 20)
            self._device.words[Word.GATE] = 1
            other.tell("gated", count=1, us=10)  # in the same stream, so behind what waits
            came_through = len(other.answer()["stamps"]) == 1
        after = driver_messages()
        new = None if after is None or logged is None else after[len(logged) :]
        yield {"shut_s": self._shut_s, "came_through": came_through, "main_us": batches_us, "kernel_log": new}

    def _batch_us(self) -> float:
        kernels = self._device.kernels
        first = kernels.stamp(self._device.stream)
        for _ in range(50):
            kernels.work(self._device.stream, 200_000, 10)
        last = kernels.stamp(self._device.stream)
        self._device.finish()
        return round((kernels.times(last)[0] - kernels.times(first)[0]) / 1e3, 1)


FIGURES: tuple[str, ...] = ("slices", "arrival", "opening", "blocking", "words", "graphs", "contexts", "shut")
"""The cheapest and most decisive first."""


def driver_messages() -> list[str] | None:
    """What NVIDIA's driver has written to the kernel's log (Xid: a fault); None: this user may not read it."""
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["dmesg"], capture_output=True, text=True, check=True, timeout=10).stdout
        return [line for line in said.splitlines() if "NVRM" in line]
    return None


def _spin_until(at_ns: int) -> None:
    while time.monotonic_ns() < at_ns:
        pass
