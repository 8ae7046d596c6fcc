"""Speedup and memory of K fused trials: against the same K one after another, and against K processes.

Every model in two sizes, with AdamW and one thread per process. Fused and solo steps alternate in one process, so that
both meet the same machine. The K processes run for a fixed time on all cores together. Memory is a process's peak
resident set, torch included, at the K that the planner would choose.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import cache
from statistics import median
from typing import Any

import torch

from benchmarks.shared.fused_models import MODELS, MOST_FUSED, QUICK_MODELS, Alone, Classes, Together, alternate
from benchmarks.shared.intervals import ratio_with_ci95
from benchmarks.shared.paths import ROOT
from benchmarks.shared.results import finish, kept_runs, parse

NAME = "fusion"
KS = (1, 2, 4, 8, 16, 32, 64, MOST_FUSED)
QUICK_KS = (1, 16)
SECONDS, QUICK_SECONDS = 1.0, 0.4
"""The least time for each K."""


def main() -> None:
    """Measure, print, write."""
    if sys.argv[1:2] == ["worker"]:
        _work()
        return
    options = parse(NAME, __doc__ or "")
    torch.set_num_threads(1)
    names = [name for name in MODELS if not options.quick or name in QUICK_MODELS]
    runs = kept_runs(options)
    for name in names:
        if options.only in (None, name):
            runs.append(_measure(name, QUICK_KS, QUICK_SECONDS) if options.quick else _measure(name, KS, SECONDS))
    finish(NAME, options, runs, _summary(runs))


def _measure(name: str, sizes: Iterable[int], seconds: float) -> dict[str, Any]:
    study = Classes(name)
    alone = Alone(study)
    by_k = []
    for size in sizes:
        pairs = alternate(alone.step, Together(study, size).step, size, seconds)
        speedup, ci95 = ratio_with_ci95(pairs)
        processes_per_s, _ = _processes(name, size, seconds)
        fused_per_s = size / median(fused for _, fused in pairs)
        by_k.append(
            {
                "k": size,
                "speedup": 1 + speedup,
                "speedup_ci95": [1 + bound for bound in ci95],
                "trial_steps_per_s": fused_per_s,
                "speedup_over_processes": fused_per_s / processes_per_s,
                "pairs_s": [[round(x, 7) for x in pair] for pair in pairs],
            }
        )
        print(
            f"{name} K={size}: {1 + speedup:.2f}x one after another [{1 + ci95[0]:.2f}, {1 + ci95[1]:.2f}], "
            f"{by_k[-1]['speedup_over_processes']:.2f}x K processes",
            file=sys.stderr,
            flush=True,
        )
    size = planned_point(by_k)["k"]
    _, (fused_mib,) = _workers(name, 1, size, seconds / 2)
    _, processes_mib = _processes(name, size, seconds)
    print(f"{name}: K={size} is planned, {fused_mib:.0f} of {processes_mib:.0f} MiB", file=sys.stderr, flush=True)
    planned = {"planned_k": size, "fused_mib": fused_mib, "processes_mib": processes_mib}
    return {"scenario": name, "seconds": seconds, **planned, "by_k": by_k}


def _processes(name: str, size: int, seconds: float) -> tuple[float, float]:
    """Trial steps per second and MiB of `size` processes at once.

    At most two processes run per core, since more would only share it; memory is scaled to `size`.
    """
    count = min(size, 2 * len(os.sched_getaffinity(0)))
    rate, mib = _some_processes(name, count, seconds)
    return rate, mib * size / count


@cache
def _some_processes(name: str, count: int, seconds: float) -> tuple[float, float]:
    rates, mib = _workers(name, count, 0, seconds / 2)
    return sum(rates), sum(mib)


def _workers(name: str, count: int, size: int, seconds: float) -> tuple[list[float], list[float]]:
    """Train in `count` processes at the same time, and collect trial steps per second and peak MiB."""
    command = [sys.executable, "-m", "benchmarks.fusion", "worker", name, str(size), str(seconds)]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    for process in running:
        assert process.stdout is not None  # asked for above
        process.stdout.readline()  # ready
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    found = [json.loads(process.communicate()[0]) for process in running]
    return [one["steps_per_s"] for one in found], [one["mib"] for one in found]


def _work() -> None:
    """Run as `worker NAME K SECONDS`, with K = 0 for plain PyTorch: print a line when ready, then the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fusion worker")
    parser.add_argument("name")
    parser.add_argument("size", type=int)
    parser.add_argument("seconds", type=float)
    options = parser.parse_args(sys.argv[2:])
    torch.set_num_threads(1)
    study = Classes(options.name)
    trainer = Together(study, options.size) if options.size else Alone(study)
    trainer.step()
    print("ready", flush=True)
    sys.stdin.readline()
    steps, start_s = 0, time.monotonic()
    while steps < 2 or time.monotonic() < start_s + options.seconds:
        trainer.step()
        steps += 1
    rate = steps * max(1, options.size) / (time.monotonic() - start_s)
    print(json.dumps({"steps_per_s": rate, "mib": _peak_mib()}), flush=True)


def _peak_mib() -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The K that the planner would choose for each model, and the figures there.

    Every other pair of blocks decides the K, and `speedup` comes from the rest. Otherwise the luckiest of several equal
    K would be chosen for its luck. The choice compares ratios within pairs, because rates drift with the machine from
    one K to the next.

    `memory_ratio` is one process with K fused trials ÷ K processes, at the planned K: the worst over the smaller size
    of each model. A planned K of 1 means that fusing does not pay, and counts as about 1.
    """
    planned = {run["scenario"]: {**run, **planned_point(run["by_k"])} for run in runs}
    single = [point for run in runs for point in run["by_k"] if point["k"] == 1]
    small = {name.rpartition("_")[0]: planned[name] for name in reversed(MODELS) if name in planned}
    return {
        "best_speedup": max(point["speedup"] for run in runs for point in run["by_k"]),
        "worst_speedup_at_planned_k": min(point["speedup"] for point in planned.values()),
        "k1_overhead": max(1 / point["speedup"] - 1 for point in single),
        "memory_ratio": max(point["fused_mib"] / point["processes_mib"] for point in small.values()),
        "by_model": {
            run["scenario"]: {
                "planned_k": planned[run["scenario"]]["k"],
                **{
                    key: planned[run["scenario"]][key]
                    for key in ("speedup", "speedup_ci95", "speedup_over_processes", "fused_mib", "processes_mib")
                },
                "speedup_by_k": {str(point["k"]): point["speedup"] for point in run["by_k"]},
            }
            for run in runs
        },
    }


def planned_point(by_k: list[dict[str, Any]]) -> dict[str, Any]:
    """The best K by every other pair, with the speedup of the remaining pairs."""
    chosen = max(by_k, key=lambda point: ratio_with_ci95(point["pairs_s"][::2])[0])
    speedup, ci95 = ratio_with_ci95(chosen["pairs_s"][1::2])
    return {**chosen, "speedup": 1 + speedup, "speedup_ci95": [1 + bound for bound in ci95]}


if __name__ == "__main__":
    main()
