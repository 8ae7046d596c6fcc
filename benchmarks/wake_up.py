"""What a bubble costs a main job by the scheduling class of the process that runs in it.

A main job on one core computes; then it continues a process on the same core, asks a peer on another one for data, and
waits for it, as hooks and pipeline engine do. The peer answers after a bubble's time; then the process is stopped. Two
times are the main job's own and are lost to it: *held*, until it has asked, because the process that it woke has taken
the core from it; and *late*, from the peer's answer until it runs on. Processes and lengths come in random order.
"""

import os
import random
import signal
import socket
import statistics
import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.shared.processes import child
from benchmarks.shared.results import finish, parse

NAME = "wake_up"
NOTHING, NICE, BATCH, IDLE = "nothing", "nice_19", "batch_nice_19", "idle"
ARMS = (NOTHING, NICE, BATCH, IDLE)
BUBBLES_MS = (0.5, 1.0, 2.0, 5.0, 20.0)
COMPUTE_MS = 8.0
SETS_UP_S = 1.0
STAMP_BYTES = 8


def main() -> None:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for the main job, one for its peer")
    order = [(arm, ms) for arm in ARMS for ms in BUBBLES_MS] * (20 if options.quick else 200)
    random.shuffle(order)
    seen: dict[tuple[str, float], list[tuple[float, float]]] = {(arm, ms): [] for arm in ARMS for ms in BUBBLES_MS}
    with ExitStack() as ends:
        sides = {arm: ends.enter_context(child(_compute, arm, core=cores[0])) for arm in ARMS if arm != NOTHING}
        server = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = server.getsockname()
        ends.enter_context(child(_answer, address, [ms for _, ms in order], core=cores[1]))
        time.sleep(SETS_UP_S)  # as the sides do
        for pid in sides.values():
            os.kill(pid, signal.SIGSTOP)
        os.sched_setaffinity(0, cores[:1])
        peer = ends.enter_context(server.accept()[0])
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for arm, ms in order:
            _spin(COMPUTE_MS)
            seen[arm, ms].append(_bubble_us(peer, sides.get(arm)))
        os.sched_setaffinity(0, cores)
    runs = []
    for (arm, ms), pairs in seen.items():
        held_us, late_us = map(list, zip(*pairs, strict=True))
        runs.append({"arm": arm, "bubble_ms": ms, "held_us": held_us, "late_us": late_us})
    finish(NAME, options, runs, _summary(runs))


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Per arm: both times over all lengths, and the mean of their sum per length; in µs."""
    summary: dict[str, Any] = {}
    for arm in ARMS:
        own = [run for run in runs if run["arm"] == arm]
        for kind in ("held", "late"):
            values_us = [us for run in own for us in run[f"{kind}_us"]]
            for percent in (50, 90, 99):
                summary[f"{arm}_{kind}_us_p{percent}"] = round(float(np.percentile(values_us, percent)))
        for run in own:
            lost_us = statistics.fmean(run["held_us"]) + statistics.fmean(run["late_us"])
            summary[f"{arm}_lost_us_mean_at_{run['bubble_ms']:g}_ms"] = round(lost_us)
    return summary


def _bubble_us(peer: socket.socket, side: int | None) -> tuple[float, float]:
    """One bubble. Returns (held, late) in µs."""
    begin_ns = time.monotonic_ns()
    if side is not None:
        os.kill(side, signal.SIGCONT)
    peer.sendall(b"?")
    asked_ns = time.monotonic_ns()
    stamp = peer.recv(STAMP_BYTES, socket.MSG_WAITALL)
    now_ns = time.monotonic_ns()
    if side is not None:
        os.kill(side, signal.SIGSTOP)
    return (asked_ns - begin_ns) / 1e3, (now_ns - int.from_bytes(stamp, "little")) / 1e3


def _answer(address: tuple[str, int], lengths_ms: list[float]) -> None:
    """The peer: it is busy for a bubble's time, then sends when that was."""
    with socket.create_connection(address) as main_job:
        main_job.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for ms in lengths_ms:
            if not main_job.recv(1):
                return
            _spin(ms)
            main_job.sendall(time.monotonic_ns().to_bytes(STAMP_BYTES, "little"))


def _compute(arm: str) -> None:
    """A side task without a gate."""
    os.nice(19)
    if arm in (BATCH, IDLE):
        os.sched_setscheduler(0, os.SCHED_BATCH if arm == BATCH else os.SCHED_IDLE, os.sched_param(0))
    matrix = np.ones((64, 64))
    while True:
        matrix @ matrix


def _spin(ms: float) -> None:
    end_ns = time.monotonic_ns() + int(ms * 1e6)
    while time.monotonic_ns() < end_ns:
        pass


if __name__ == "__main__":
    main()
