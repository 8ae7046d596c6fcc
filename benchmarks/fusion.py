"""Speedup and memory of K fused trials, against four other ways to train the same K trials on the same core.

Every model in two sizes, with AdamW. All ways take turns in random order on one core: ours; one trial after another in
plain PyTorch, with its usual AdamW and with its fused one; `torch.func.vmap` over stacked parameters; and K processes.
Memory is a process's peak resident set, torch included, at the K that is best.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from math import exp, log
from statistics import fmean
from typing import Any

import torch

from benchmarks.shared.fused_models import MODELS, QUICK_MODELS, Alone, Classes, Together
from benchmarks.shared.fusion_baselines import (
    ALONE,
    BASELINES,
    FUSED,
    FUSED_ADAMW,
    MOST_PROCESSES,
    PROCESSES,
    VMAP,
    Processes,
    Stacked,
    Timed,
    on_one_core,
    rounds,
    timed_processes,
    timed_steps,
)
from benchmarks.shared.intervals import ratio_with_ci95
from benchmarks.shared.paths import ROOT
from benchmarks.shared.results import finish, kept_runs, parse, write

NAME = "fusion"
KS = (1, 4, 16, 64)
QUICK_KS = (1, 16)
SECONDS, QUICK_SECONDS = 3.0, 1.0
"""The least time for each K."""
MEMORY_STEPS = 3


def main() -> None:
    """Measure, print, write."""
    if sys.argv[1:2] == ["memory"]:
        _show_peak()
        return
    options = parse(NAME, __doc__ or "")
    names = [name for name in MODELS if not options.quick or name in QUICK_MODELS]
    runs = kept_runs(options)
    for name in names:
        if options.only in (None, name):
            runs.append(measure(name, QUICK_KS, QUICK_SECONDS) if options.quick else measure(name, KS, SECONDS))
            if options.json:  # a run that is cut short keeps its results
                write(NAME, options, runs, summary(runs))
    finish(NAME, options, runs, summary(runs))


def measure(name: str, sizes: Iterable[int], seconds: float) -> dict[str, Any]:
    """Time all ways to train a model at each K for `seconds`, and find the peak memory at the best."""
    by_k: list[dict[str, Any]] = []
    unable: dict[str, str] = {}
    with on_one_core():
        study = Classes(name)
        for size in sizes:
            with ExitStack() as ends:
                arms = _arms(study, size, ends, unable)
                by_k.append({"k": size, "rounds_s": rounds(arms, seconds)})
            print(f"{name} K={size}: {_shown(by_k[-1])}", file=sys.stderr, flush=True)
    size = best_k(by_k)["k"]
    run = {"scenario": name, "seconds": seconds, "best_k": size, "unable": unable, "by_k": by_k}
    run |= {"fused_mib": _peak_mib(name, size), "processes_mib": size * _peak_mib(name, 0)}
    print(f"{name}: best at K={size}, {run['fused_mib']:.0f} of {run['processes_mib']:.0f} MiB", file=sys.stderr)
    return run


def _arms(study: Classes, size: int, ends: ExitStack, unable: dict[str, str]) -> dict[str, Timed]:
    """All ways that can train `size` trials. Why one cannot is noted in `unable`."""
    processes = Processes(study, min(size, MOST_PROCESSES), ends)  # forked before anything large is made
    alone = Alone(study)
    arms = {
        FUSED: timed_steps(Together(study, size).step),
        ALONE: timed_steps(alone.step, times=size),
        FUSED_ADAMW: timed_steps(Alone(study, fused_optimizer=True).step, times=size),
    }
    try:
        arms[VMAP] = timed_steps(Stacked(study, size).step)
    except RuntimeError as error:
        unable[VMAP] = str(error).partition("\n")[0]
    arms[PROCESSES] = timed_processes(processes, arms[ALONE]() / size, size)
    return arms


def _shown(point: Mapping[str, Any]) -> str:
    found = {
        baseline: speedup(point["rounds_s"], baseline) for baseline in BASELINES if baseline in point["rounds_s"][0]
    }
    return ", ".join(
        f"{ratio:.2f}x {baseline} [{low:.2f}, {high:.2f}]" for baseline, (ratio, (low, high)) in found.items()
    )


def speedup(rounds_s: Sequence[Mapping[str, float]], baseline: str) -> tuple[float, tuple[float, float]]:
    """(speed of fused trials ÷ that of a baseline, its 95% interval)."""
    ratio, (low, high) = ratio_with_ci95([(each[baseline], each[FUSED]) for each in rounds_s])
    return 1 + ratio, (1 + low, 1 + high)


def best_k(by_k: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The K that is fastest against one trial after another in every other round, with the remaining rounds.

    So figures at that K come from rounds that have not chosen it. Otherwise the luckiest of several equal K would be
    chosen for its luck. Ratios within rounds are compared, because rates drift with the machine from one K to the next.
    """
    chosen = max(by_k, key=lambda point: speedup(point["rounds_s"][::2], ALONE)[0])
    return {**chosen, "rounds_s": chosen["rounds_s"][1::2]}


def geometric_mean(ratios: Iterable[float]) -> float:
    """Of speedups, where a half and a double cancel."""
    return exp(fmean(map(log, ratios)))


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The speedups at each model's best K, and their geometric means over the models.

    `geometric_mean` is that against one trial after another; `geometric_mean_over_the_best`, against the fastest
    baseline of each model. `vmap_models` is the number of models that can be mapped. `memory_ratio` is one process with
    K fused trials ÷ K processes, at the best K: the worst over the smaller size of each model. A best K of 1 means that
    fusing does not pay, and counts as about 1.
    """
    if not runs:
        return {}
    by_model = {run["scenario"]: _at_best(run) for run in runs}
    against = {
        baseline: [of[baseline] for of in by_model.values() if baseline in of]
        for baseline in BASELINES
        if baseline != ALONE
    }
    means = {f"geometric_mean_over_{baseline}": geometric_mean(own) for baseline, own in against.items() if own}
    single = [point for run in runs for point in run["by_k"] if point["k"] == 1]
    small = {name.rpartition("_")[0]: by_model[name] for name in reversed(MODELS) if name in by_model}
    return {
        "geometric_mean": geometric_mean(of[ALONE] for of in by_model.values()),
        **means,
        "geometric_mean_over_the_best": geometric_mean(
            min(of[baseline] for baseline in BASELINES if baseline in of) for of in by_model.values()
        ),
        "models": len(runs),
        "vmap_models": len(against[VMAP]),
        "k1_overhead": max(1 / speedup(point["rounds_s"], ALONE)[0] - 1 for point in single),
        "memory_ratio": max(of["fused_mib"] / of["processes_mib"] for of in small.values()),
        "by_model": by_model,
    }


def _at_best(run: Mapping[str, Any]) -> dict[str, Any]:
    best = best_k(run["by_k"])
    figures: dict[str, Any] = {"best_k": best["k"], **{key: run[key] for key in ("fused_mib", "processes_mib")}}
    for baseline in BASELINES:
        if baseline in best["rounds_s"][0]:
            figures[baseline], figures[f"{baseline}_ci95"] = speedup(best["rounds_s"], baseline)
    figures["speedup_by_k"] = {str(point["k"]): speedup(point["rounds_s"], ALONE)[0] for point in run["by_k"]}
    return figures


def _peak_mib(name: str, size: int) -> float:
    command = [sys.executable, "-m", "benchmarks.fusion", "memory", name, str(size)]
    return float(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)


def _show_peak() -> None:
    """Run as `memory NAME K`, with K = 0 for one trial in plain PyTorch: print this process's peak in MiB."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fusion memory")
    parser.add_argument("name")
    parser.add_argument("size", type=int)
    options = parser.parse_args(sys.argv[2:])
    torch.set_num_threads(1)
    study = Classes(options.name)
    trainer = Together(study, options.size) if options.size else Alone(study)
    for _ in range(MEMORY_STEPS):
        trainer.step()
    with open("/proc/self/status", encoding="ascii") as status:
        peak = next(line for line in status if line.startswith("VmHWM"))
    print(int(peak.split()[1]) / 1024)


if __name__ == "__main__":
    main()
