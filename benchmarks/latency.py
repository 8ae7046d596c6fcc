"""Latencies of the way into a bubble and out of it, segment by segment, and the cost of one gate check.

A main job only computes and waits, on one core with a side task that only computes: the real hooks' clock and signals
on one side, the real gate on the other. Both modes are measured: *cooperative*, in which the side task goes to sleep
by itself at the bubble's end, and *preemptive*, in which it is stopped there and continued in the next bubble.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.shared.paths import ROOT
from benchmarks.shared.results import finish, parse
from ds_hooks.clock.cpu import CpuClock
from ds_hooks.shared.page.file import Page, make_private_dir, page_path
from ds_hooks.shared.page.layout import Field, Role, SideActivity
from ds_hooks.side_process import SideProcess
from trials.gate.base import StopRequested, block_signals
from trials.gate.cpu import CpuGate
from trials.gate.unit_records import UnitRecords

NAME = "latency"
BUBBLE_MS, COMPUTE_MS = 8.0, 4.0
UNIT_US = 100
UNITS = 8
GAP_NS = 200_000
"""A side task that misses this much of the clock was off the core."""
CHECKS = 100_000
SEGMENTS = {
    "cooperative": ("hook_open", "signal", "gate_opens", "resume", "hook_close", "acknowledge", "overrun"),
    "preemptive": ("hook_open", "resume", "hook_close", "stop", "overrun"),
}


def main() -> None:
    """Measure, print, write."""
    if sys.argv[1:2] == ["side"]:
        _be_the_side_task()
        return
    options = parse(NAME, __doc__ or "")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    bubbles = 300 if options.quick else 2000
    runs: list[dict[str, Any]] = [{"scenario": "gate_check", "us": [_gate_check_us() for _ in range(5)]}]
    runs += [{"scenario": mode, "us": _measure(mode, bubbles)} for mode in SEGMENTS]
    finish(NAME, options, runs, _summary(runs))


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {"gate_check_us": median(runs[0]["us"])}
    for run in runs[1:]:
        for segment, values in run["us"].items():
            for percent in (50, 99):
                summary[f"{run['scenario']}_{segment}_us_p{percent}"] = round(float(np.percentile(values, percent)), 1)
    return summary


def _gate_check_us() -> float:
    """Cost per unit of asking an open gate and of writing its record, in µs."""
    with tempfile.TemporaryDirectory(prefix="bsq-") as folder:
        pages = make_private_dir(Path(folder) / "pages")
        page = Page.open(page_path(pages, 0))
        gate = CpuGate(page, UnitRecords(Path(folder) / "units.bin"))
        gate.use([str(unit) for unit in range(UNITS)], 1)
        page.words[Field.PERMIT_UNTIL_NS] = time.monotonic_ns() + 60_000_000_000
        page.words[Field.BUBBLE] = 1
        start_ns = time.perf_counter_ns()
        for check in range(CHECKS):
            gate.enter(check % UNITS)
        cost_us = (time.perf_counter_ns() - start_ns) / CHECKS / 1e3
        gate.close()
        page.close()
    return cost_us


def _measure(mode: str, bubbles: int) -> dict[str, list[float]]:
    """Map each segment to its µs in every bubble."""
    with tempfile.TemporaryDirectory(prefix="bsq-") as folder:
        pages, log = make_private_dir(Path(folder) / "pages"), Path(folder) / "side.npy"
        page = Page.open(page_path(pages, 0))
        page.claim(Role.MAIN)
        command = [sys.executable, "-m", "benchmarks.latency", "side", str(page.path), str(log)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, env=environment, cwd=ROOT) as process:
            while page.words[Field.SIDE_PID] != process.pid:
                time.sleep(0.01)
            page.words[Field.SIDE_PROCESS] = process.pid
            seen = _bubbles(page, bubbles, preemptive=mode == "preemptive")
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
        page.close()
        sleeps, starts, gaps = (np.load(log.with_suffix(f".{kind}.npy")) for kind in ("sleeps", "starts", "gaps"))
    return _cooperative(seen, sleeps, starts) if mode == "cooperative" else _preemptive(seen, gaps)


def _bubbles(page: Page, count: int, *, preemptive: bool) -> np.ndarray:
    """Run the main job. Returns a row per bubble: begin, woken, end, halted (ns), overrun (ns of CPU time)."""
    clock, side = CpuClock(page, time.monotonic_ns), SideProcess(page.words)
    rows: list[list[int]] = []
    for step in range(1, count + 1):
        _spin_until(time.monotonic_ns() + int(COMPUTE_MS * 1e6))
        side.halt()  # a task that was left running must not reach the next bubble
        before_cpu_ns = clock.side_cpu_ns()
        begin_ns = clock.open(step, 0, 60_000_000_000)
        side.wake()
        woken_ns = time.monotonic_ns()
        time.sleep(BUBBLE_MS / 1e3)
        end_ns = clock.close()
        side.halt(() if preemptive else [SideActivity.UNIT])
        halted_ns = time.monotonic_ns()
        if rows:
            rows[-1][4] = before_cpu_ns - rows[-1][5]
        rows.append([begin_ns, woken_ns, end_ns, halted_ns, 0, clock.side_cpu_ns()])
    return np.array(rows[len(rows) // 10 : -1], np.int64)


def _spin_until(end_ns: int) -> None:
    while time.monotonic_ns() < end_ns:
        pass


def _cooperative(seen: np.ndarray, sleeps: np.ndarray, starts: np.ndarray) -> dict[str, list[float]]:
    us: dict[str, list[float]] = {segment: [] for segment in SEGMENTS["cooperative"]}
    for begin_ns, woken_ns, end_ns, halted_ns, overrun_ns, _ in seen:
        us["hook_open"].append((woken_ns - begin_ns) / 1e3)
        us["hook_close"].append((halted_ns - end_ns) / 1e3)
        us["overrun"].append(overrun_ns / 1e3)
        awake = sleeps[(sleeps[:, 1] > begin_ns) & (sleeps[:, 1] < end_ns), 1]
        asleep = sleeps[(sleeps[:, 0] > end_ns) & (sleeps[:, 0] < end_ns + COMPUTE_MS * 1e6), 0]
        first = starts[np.searchsorted(starts, begin_ns) :][:1]
        if len(awake) and len(first):
            us["signal"].append((awake[0] - woken_ns) / 1e3)
            us["gate_opens"].append((first[0] - awake[0]) / 1e3)
            us["resume"].append((first[0] - begin_ns) / 1e3)
        if len(asleep):
            us["acknowledge"].append((asleep[0] - end_ns) / 1e3)
    return us


def _preemptive(seen: np.ndarray, gaps: np.ndarray) -> dict[str, list[float]]:
    us: dict[str, list[float]] = {segment: [] for segment in SEGMENTS["preemptive"]}
    for begin_ns, woken_ns, end_ns, halted_ns, overrun_ns, _ in seen:
        us["hook_open"].append((woken_ns - begin_ns) / 1e3)
        us["hook_close"].append((halted_ns - end_ns) / 1e3)
        us["overrun"].append(overrun_ns / 1e3)
        back = gaps[(gaps[:, 1] > begin_ns) & (gaps[:, 1] < end_ns), 1]
        gone = gaps[(gaps[:, 0] > begin_ns) & (gaps[:, 1] > end_ns), 0]
        if len(back):
            us["resume"].append((back[0] - begin_ns) / 1e3)
        if len(gone):
            us["stop"].append(max(0.0, (gone[0] - end_ns) / 1e3))
    return us


def _be_the_side_task() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("log", type=Path)
    options = parser.parse_args(sys.argv[2:])
    block_signals()
    os.nice(19)
    page = Page.open(options.page, create=False)
    gate = CpuGate(page)
    gate.use([str(unit) for unit in range(UNITS)], 1)
    page.claim(Role.SIDE)
    sleeps: list[tuple[int, int]] = []
    signal.sigtimedwait = _timed(signal.sigtimedwait, sleeps)
    starts: list[int] = []
    gaps: list[tuple[int, int]] = []
    try:
        for unit in cycle(range(UNITS)):
            gate.enter(unit)
            last_ns = time.monotonic_ns()
            starts.append(last_ns)
            end_ns = last_ns + UNIT_US * 1000
            while last_ns < end_ns:
                now_ns = time.monotonic_ns()
                if now_ns - last_ns > GAP_NS:
                    gaps.append((last_ns, now_ns))
                last_ns = now_ns
    except StopRequested:
        pass
    for kind, content in (("sleeps", sleeps), ("gaps", gaps)):
        np.save(options.log.with_suffix(f".{kind}.npy"), np.array(content, np.int64).reshape(-1, 2))
    np.save(options.log.with_suffix(".starts.npy"), np.array(starts, np.int64))
    page.close()


def _timed(wait: Callable[..., Any], times: list[tuple[int, int]]) -> Callable[..., Any]:
    """Wrap `wait` to record when it was entered and left."""

    def timed(*args: Any) -> Any:
        entered_ns = time.monotonic_ns()
        found = wait(*args)
        times.append((entered_ns, time.monotonic_ns()))
        return found

    return timed


if __name__ == "__main__":
    main()
