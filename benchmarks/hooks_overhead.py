"""Slowdown of the main job by the hooks alone, with no side task.

Hooks are attached in one window of each pair in a run, the first or the second at random, on ghost stages and on a real
two-rank job. A daemon receives and records, as in use.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.shared.intervals import ratio_with_ci95, winsorized
from benchmarks.shared.paths import ROOT
from benchmarks.shared.processes import environment, run_directories
from benchmarks.shared.results import commit, finish, kept_runs, parse
from launch.ports import free_port

NAME = "hooks_overhead"
GHOSTS = ((4, 0, 4), (4, 1, 4))
"""(stages, stage, micro-batches)."""
WINDOW_STEPS = 8
GHOST_STEPS, REAL_STEPS = 1600, 4896


def main() -> None:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    ghosts, ghost_steps, real_steps = (GHOSTS[1:2], 120, 120) if options.quick else (GHOSTS, GHOST_STEPS, REAL_STEPS)
    scenarios = {f"ghost_{p}_{k}_{m}": partial(_ghost, p, k, m, steps=ghost_steps) for p, k, m in ghosts}
    scenarios["real_two_ranks"] = partial(_real, real_steps)
    runs = kept_runs(options)
    runs += [measure() for name, measure in scenarios.items() if options.only in (None, name)]
    finish(NAME, options, runs, summary(runs))


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The slowdown of each scenario with its interval. Not pooled: one quiet scenario would outweigh the rest."""
    figures: dict[str, Any] = {}
    for run in runs:
        slowdown, ci95 = ratio_with_ci95(run["pairs_ms"])
        figures |= {f"{run['scenario']}_slowdown": slowdown, f"{run['scenario']}_slowdown_ci95": ci95}
    return figures


def _ghost(stages: int, stage: int, micro_batches: int, *, steps: int) -> dict[str, Any]:
    scenario = f"ghost_{stages}_{stage}_{micro_batches}"
    with run_directories() as (run, pages):
        run.mkdir()
        times = run / "times"
        command = [sys.executable, "-m", "benchmarks.ghost.job", "--steps", str(steps), "--core", str(_last_core())]
        command += ["--stages", str(stages), "--stage", str(stage), "--micro-batches", str(micro_batches)]
        command += ["--toggle", str(WINDOW_STEPS), "--times", str(times)]
        with _daemons(run, pages, 1):
            subprocess.run(command, env=environment(pages), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return _result(scenario, [json.loads(times.read_text())])


def _real(steps: int) -> dict[str, Any]:
    with run_directories() as (run, pages):
        run.mkdir()
        times = run / "times"
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
        launcher += ["--master_port", str(free_port()), "--module", "benchmarks.shared.toggle"]
        job = [str(WINDOW_STEPS), str(times), str(ROOT / "examples" / "pretrain.py"), "--steps", str(steps)]
        with _daemons(run, pages, 2):
            subprocess.run([*launcher, *job], env=environment(pages), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return _result("real_two_ranks", [json.loads(Path(f"{times}.{rank}").read_text()) for rank in (0, 1)])


def _result(scenario: str, ranks: list[list[tuple[bool, float]]]) -> dict[str, Any]:
    """Pairs of neighbouring windows (with hooks, without), by each step's mean over the ranks.

    Warm-up takes the first pair; attaching takes the first step of each window. Each mean is geometric, and steps far
    from their pair's others count as less far.
    """
    steps = [(on, fmean(rank[i][1] for rank in ranks)) for i, (on, _) in enumerate(ranks[0])]
    size = 2 * WINDOW_STEPS
    begins = range(size, len(steps) - size + 1, size)
    counted = [[step for at, step in enumerate(steps[begin : begin + size]) if at % WINDOW_STEPS] for begin in begins]
    near = winsorized([[math.log(ms) for _, ms in pair] for pair in counted])
    pairs = []
    for pair, logs in zip(counted, near, strict=True):
        own: dict[bool, list[float]] = {True: [], False: []}
        for (on, _), log in zip(pair, logs, strict=True):
            own[on].append(log)
        pairs.append((math.exp(fmean(own[True])), math.exp(fmean(own[False]))))
    slowdown, ci95 = ratio_with_ci95(pairs)
    print(f"{scenario}: {slowdown:+.3%}, 95% CI {ci95[0]:+.3%} to {ci95[1]:+.3%}", file=sys.stderr, flush=True)
    return {
        "scenario": scenario,
        "commit": commit(),
        "hooks_slowdown": slowdown,
        "hooks_slowdown_ci95": ci95,
        "pairs_ms": pairs,
        "steps_ms": [[round(ms, 3) for _, ms in rank] for rank in ranks],
    }


class _daemons:
    """Daemons without a side task, one per rank, for as long as the block runs."""

    def __init__(self, run: Path, pages: Path, ranks: int) -> None:
        config = run / "squeezer.toml"
        config.write_text(f'[run]\ndirectory = "{run}"\n')
        command = [sys.executable, "-m", "squeezer", "daemon", "--config", str(config), "--local-rank"]
        self._commands = [[*command, str(rank)] for rank in range(ranks)]
        self._environment = environment(pages)
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> None:
        for command in self._commands:
            self._running.append(subprocess.Popen(command, env=self._environment, cwd=ROOT, stdout=subprocess.DEVNULL))

    def __exit__(self, *_: object) -> None:
        for daemon in self._running:
            daemon.terminate()
            daemon.wait(30)


def _last_core() -> int:
    """A core for the ghost stage other than the first, which the rest of the machine prefers."""
    return max(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
