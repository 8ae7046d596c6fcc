"""Slowdown of the main job and harvest of the side task, beside six other modes, for many scenarios.

Each scenario is one run in which windows alternate (`windows/modes.py`): nothing; ours, preemptive and
cooperative; an oracle that knows each bubble's true end; and three baselines (`windows/baselines.py`): naive
co-location, the kernel's idle class, and gating by whole steps as FreeRide does. Scenarios are a real two-rank job and
stages of ghost pipelines: balanced, unbalanced, disturbed, and with several side tasks. Two of them are repeated beside
one other mode. Ghosts show no delays that compound over ranks, and no CPU time of gloo's (`benchmarks.ghost_twins`).

Keys of the summary without a mode's name are those of the preemptive mode, the default.
"""

import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.shared.paths import ROOT
from benchmarks.shared.processes import environment, last_core, run_directories, start
from benchmarks.shared.results import commit, finish, kept_runs, parse, write
from benchmarks.studies import ENDLESS_DIGITS, VARIANT_DIGITS, variant_digits
from benchmarks.utilization import guarded
from benchmarks.utilization.harvest_ratio import COMPARED, harvest_ratios
from benchmarks.utilization.picture import write_figures
from benchmarks.windows.baselines import Baselines
from benchmarks.windows.figures import (
    RankLog,
    Window,
    collect,
    gate_figures,
    mode_figures,
    recovery,
)
from benchmarks.windows.modes import (
    ALONE,
    BASELINES,
    COOPERATIVE,
    GATED,
    NAIVE,
    ORACLE,
    PREEMPTIVE,
    SCHED_IDLE,
    STEP_GRAIN,
    Windows,
)
from squeezer.records.reader import load_run
from squeezer.reports.report import build_report

NAME = "bubble_utilization"
CONFIG = """
[squeeze]
preemptive = true  # the windows decide (benchmarks/windows/daemon.py)
[side]
study = "{study}"
[run]
directory = "{run}"
keep_mb = 4096
calibrate_s = 0.0  # the baselines measure the dedicated rate
[guard]
enabled = false
"""
"""The configuration of every measured run. It switches off whatever could end squeezing in mid-run."""

WINDOWS = Windows(
    observe=6,
    warm_up=32,
    cycle=(
        # ungated modes upset the forecasts, so the preemptive mode follows them: it needs none
        *((ALONE, 4), (PREEMPTIVE, 4), (ALONE, 3), (COOPERATIVE, 6), (ALONE, 3), (ORACLE, 6)),
        *((STEP_GRAIN, 4), (SCHED_IDLE, 3), (NAIVE, 2)),
    ),
)
REAL_WINDOWS = Windows(
    observe=6,
    warm_up=80,  # its bubbles are short
    cycle=(
        # its steps vary most, so more of them are ours
        *((ALONE, 5), *((PREEMPTIVE, 4), (ALONE, 3), (COOPERATIVE, 4), (ALONE, 3)) * 3),
        *((STEP_GRAIN, 4), (SCHED_IDLE, 4), (NAIVE, 3)),
    ),
)
REAL_CYCLES = 30
GHOST_CYCLES = 8
"""The least number, however long a step is."""
DISTURBED_WINDOWS = Windows(observe=6, warm_up=32, cycle=((PREEMPTIVE, 3), (ALONE, 2), (COOPERATIVE, 3), (ALONE, 2)))
"""Ten steps each, so that the first cycle after a disturbance is its first ten steps."""
BESIDE_WINDOWS = {
    other: Windows(
        observe=6,
        warm_up=32,
        cycle=((PREEMPTIVE, 6), (ALONE, 2), (COOPERATIVE, 6), (ALONE, 2), (other, 6), (ALONE, 2)),
    )
    for other in (ORACLE, STEP_GRAIN)
}
"""Ours beside one other mode, for close calls: more windows, and no ungated baselines that upset forecasts."""
DISTURBED_AT_CYCLE = 3
CYCLES_AFTER = 5
"""50 steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ghost:
    """A ghost stage as main job; `rows` is its micro-batch size, chosen so that a step takes well below a second."""

    stages: int
    stage: int
    micro_batches: int
    rows: int
    slow_last: float = 1.0
    jitter: float = 0.0
    stalls: bool = False
    resizes: bool = False
    dualpipev: bool = False
    beside: str | None = None
    side: str | None = None

    @property
    def name(self) -> str:
        """The scenario's name."""
        kinds = {
            "slow_last": self.slow_last != 1.0,
            "jitter": self.jitter,
            "stall": self.stalls,
            "resize": self.resizes,
            self.beside: self.beside,
            self.side: self.side,
        }
        kind = "ghost_dualpipev" if self.dualpipev else "ghost"
        shape = f"{kind}_{self.stages}_{self.stage}_{self.micro_batches}"
        return "_".join([shape, *(str(kind) for kind, chosen in kinds.items() if chosen)])

    @property
    def is_disturbed(self) -> bool:
        """Whether the run is disturbed half-way."""
        return self.stalls or self.resizes

    @property
    def windows(self) -> Windows:
        """The windows of its run."""
        if self.beside is not None:
            return BESIDE_WINDOWS[self.beside]
        return DISTURBED_WINDOWS if self.is_disturbed else WINDOWS

    @property
    def seconds(self) -> float:
        """The least time for its windows."""
        if self.beside is not None:
            return 240.0
        return 75.0 if self.side else 110.0

    def arguments(self) -> list[str]:
        """Options for `benchmarks.ghost.job`."""
        shape = ["--stages", self.stages, "--stage", self.stage, "--micro-batches", self.micro_batches]
        more = ["--micro-batch-size", self.rows, "--slow-last", self.slow_last, "--jitter", self.jitter]
        disturbed_step = self.windows.first_step(DISTURBED_AT_CYCLE) - 1  # counted from 0
        more += ["--dualpipev"] if self.dualpipev else []
        more += ["--stall-step", disturbed_step] if self.stalls else []
        more += ["--resize-step", disturbed_step] if self.resizes else []
        if self.is_disturbed:
            more += ["--steps", self.windows.first_step(DISTURBED_AT_CYCLE + 1 + CYCLES_AFTER) - 1]
        return [str(word) for word in (*shape, *more)]


SHAPES = (
    *((4, stage, 4, 512) for stage in range(4)),
    *((8, 3, 8, 256), (16, 8, 16, 128), (16, 0, 64, 48)),
)
"""(stages, stage, micro-batches, rows)."""
REAL = "real_two_ranks"


def _ghosts() -> list[Ghost]:
    ghosts = [
        Ghost(stages=p, stage=k, micro_batches=m, rows=rows, slow_last=slow)
        for slow in (1.0, 1.3)
        for p, k, m, rows in SHAPES
    ]
    ghosts += [
        Ghost(stages=4, stage=1, micro_batches=8, rows=512, slow_last=slow, dualpipev=True) for slow in (1.0, 1.3)
    ]
    # the shortest bubbles, and the longest: one in each step
    for (p, k, m, rows), other in ((SHAPES[-1], ORACLE), (SHAPES[3], STEP_GRAIN)):
        ghosts.append(Ghost(stages=p, stage=k, micro_batches=m, rows=rows, beside=other))
    p, k, m, rows = SHAPES[1]
    ghosts.append(Ghost(stages=p, stage=k, micro_batches=m, rows=rows, jitter=0.2))
    ghosts.append(Ghost(stages=p, stage=k, micro_batches=m, rows=rows, stalls=True))
    ghosts.append(Ghost(stages=p, stage=k, micro_batches=m, rows=rows, resizes=True))
    ghosts += [Ghost(stages=p, stage=k, micro_batches=m, rows=rows, side=side) for side in variant_digits.VARIANTS]
    return ghosts


def main() -> None:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leaves nothing running
    ghosts = {ghost.name: ghost for ghost in _ghosts()}
    names = [REAL, *ghosts, *guarded.SCENARIOS]
    if options.only not in (None, *names):
        raise SystemExit(f"--only {options.only}: no such scenario; allowed: {', '.join(names)}")
    if options.quick and not options.only:
        names = [REAL, "ghost_4_1_4"]
    runs = kept_runs(options)
    for name in names if options.only is None else [options.only]:
        if name == REAL:
            runs.append(_real(cycles=1 if options.quick else REAL_CYCLES))
        elif name in guarded.SCENARIOS:
            runs.append(guarded.measure(guarded.SCENARIOS[name]))
        else:
            least = (30.0, 3) if options.quick else (ghosts[name].seconds, GHOST_CYCLES)
            runs.append(_ghost(ghosts[name], *least))
        if options.json:  # a run that is cut short keeps its results
            write(NAME, options, runs, _summary(runs))
    finish(NAME, options, runs, _summary(runs))
    if options.json:
        write_figures(options.json)


def _ghost(ghost: Ghost, seconds: float, cycles: int) -> dict[str, Any]:
    """Run a ghost scenario for at least `seconds` and `cycles`."""
    core = last_core()
    with run_directories() as (run, pages):
        study = VARIANT_DIGITS if ghost.side else ENDLESS_DIGITS
        env = {**environment(pages), **ghost.windows.environment(), variant_digits.ENVIRONMENT: ghost.side or ""}
        config = _config(run, study)
        run.mkdir()
        baselines = Baselines(pages=pages, ranks=1, windows=ghost.windows, env=env, study=study, logs=run)
        command = [sys.executable, "-m", "benchmarks.ghost.job", *ghost.arguments(), "--core", core]
        command += ["--seconds", str(seconds), "--least-cycles", str(cycles)]
        command += ["--wait-for-side", "--wait-for", *map(str, baselines.ready_files)]
        baselines.start()
        with ExitStack() as ends:
            ends.callback(baselines.close)
            job = start(command, env, ends)
            daemon = [sys.executable, "-m", "benchmarks.windows.daemon", "squeezer", "daemon"]
            daemon += ["--config", str(config), "--job-pid", str(job.pid)]
            squeezer = start(["taskset", "-c", core, *daemon], env, ends)
            if job.wait() != 0:
                raise RuntimeError(f"the ghost job ended with status {job.returncode}")
            squeezer.wait(120)
            ranks = _ranks(run, baselines, baselines.finish())
        return _result(ghost.name, ghost.windows, run, ranks, disturbed=ghost.is_disturbed)


def _real(*, cycles: int) -> dict[str, Any]:
    with run_directories() as (run, pages):
        env = {**environment(pages), **REAL_WINDOWS.environment()}
        steps = REAL_WINDOWS.first_step(cycles) - 1
        logs = run.parent / "baselines"  # the launcher would move unknown files out of the run's directory
        logs.mkdir()
        command = [
            sys.executable,
            "-m",
            "benchmarks.windows.launcher",
            "--squeezer",
            str(_config(run, ENDLESS_DIGITS)),
        ]
        command += ["--num_accelerators", "2", str(ROOT / "examples" / "pretrain.py"), "--steps", str(steps)]
        baselines = Baselines(pages=pages, ranks=2, windows=REAL_WINDOWS, env=env, study=ENDLESS_DIGITS, logs=logs)
        baselines.start()
        with ExitStack() as ends:
            ends.callback(baselines.close)
            job = start(command, env, ends)
            if job.wait() != 0:
                raise RuntimeError(f"the job ended with status {job.returncode}")
            ranks = _ranks(run, baselines, baselines.finish())
        return _result(REAL, REAL_WINDOWS, run, ranks, disturbed=False)


def _config(run: Path, study: Path) -> Path:
    path = run.parent / "squeezer.toml"
    path.write_text(CONFIG.format(study=study, run=run), encoding="utf-8")
    return path


def _ranks(run: Path, baselines: Baselines, rates: Sequence[Mapping[int, float]]) -> list[RankLog]:
    return [
        RankLog(run=rank, baselines={name: baselines.steps(i, name) for name in BASELINES}, work_per_s=rates[i])
        for i, rank in enumerate(load_run(run))
    ]


def _result(scenario: str, windows: Windows, run: Path, ranks: Sequence[RankLog], *, disturbed: bool) -> dict[str, Any]:
    """The figures of one run, from its records."""
    found = collect(windows, ranks)
    chosen = _after(found) if disturbed else found
    report = build_report(run)
    figures = mode_figures(chosen)
    for mode in GATED:
        own = figures[mode]
        if own is not None:
            own |= harvest_ratios(chosen, mode) | gate_figures(windows, ranks, mode)
    alone_ms = [ms for window in chosen if window.mode == ALONE for ms in window.step_ms]
    ours = figures[PREEMPTIVE]
    if ours is None or not alone_ms:
        raise RuntimeError(f"{scenario}: the run has no whole cycle")
    result: dict[str, Any] = {
        "scenario": scenario,
        "commit": commit(),
        "step_ms_alone": float(np.mean(alone_ms)),
        "bubble_ratio": report["bubbles"]["ratio"],
        "dedicated_work_per_s": [rank.work_per_s for rank in ranks],
        "faults": report["faults"],
        "baselines": figures,
    }
    if disturbed:
        steps = CYCLES_AFTER * windows.length
        result["disturbance"] = {
            "step": windows.first_step(DISTURBED_AT_CYCLE),
            "steps_left_out": windows.length,
            "steps_reported": steps,
            "harvest": recovery(found, DISTURBED_AT_CYCLE, CYCLES_AFTER, resized=scenario.endswith("_resize")),
        }
    result["windows"] = [window.raw() for window in chosen]
    shown = {mode: _shown(own) for mode, own in figures.items() if own is not None}
    print(f"{scenario} ({result['step_ms_alone']:.0f} ms a step): {shown}", file=sys.stderr, flush=True)
    return result


def _after(found: Sequence[Window]) -> list[Window]:
    return [w for w in found if DISTURBED_AT_CYCLE < w.cycle <= DISTURBED_AT_CYCLE + CYCLES_AFTER]


def _shown(own: Mapping[str, Any]) -> str:
    harvest = "n/a" if own["harvest"] is None else f"{own['harvest']:.0%}"
    return f"slowdown {own['slowdown']:+.2%}, harvest {harvest}"


def _summary(all_runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the scenarios, and each scenario by itself.

    A scenario that is measured again beside one other mode counts once. Slowdowns have no figure over all scenarios:
    `utilization/class_figures.py` has them by class.
    """
    summary: dict[str, Any] = {"plain_keys_are": PREEMPTIVE}
    guards = [run for run in all_runs if "guarded" in run]
    if guards:
        summary["guarded"] = {run["scenario"]: _guarded(run) for run in guards}
    measured = [run for run in all_runs if "baselines" in run]
    runs = [run for run in measured if not run["scenario"].endswith(tuple(BESIDE_WINDOWS))]
    if not runs:
        return summary
    for mode in (PREEMPTIVE, COOPERATIVE, ORACLE, STEP_GRAIN, SCHED_IDLE, NAIVE):
        own = [run["baselines"][mode] for run in runs if run["baselines"][mode] is not None]
        if not own:
            continue
        keys = {
            "harvest": mode,
            "fill": mode if mode == COOPERATIVE else None,
            "overrun_us_p99": mode if mode == COOPERATIVE else None,
            "resume_us_p50": mode if mode == COOPERATIVE else None,
        }
        for key, prefix_of in keys.items():
            values = [figures[key] for figures in own if figures.get(key) is not None]
            if not values:
                continue
            if prefix_of is not None:
                summary[f"{prefix_of}_{key}"] = median(values)
            if mode == PREEMPTIVE:
                summary[key] = median(values)
    ratios = [f"harvest_over_{name}" for name in COMPARED]
    shown = ("slowdown", "slowdown_ci95", "harvest", *ratios)
    summary["by_scenario"] = {
        run["scenario"]: {
            mode: None if own is None else {key: own[key] for key in shown if key in own}
            for mode, own in run["baselines"].items()
        }
        for run in measured
    }
    return summary


def _guarded(run: Mapping[str, Any]) -> dict[str, Any]:
    found = run["guarded"]
    return {
        "held": found["held"],
        "worst_cost": found["worst"]["cost"],
        "worst_cost_ci95": found["worst"]["cost_ci95"],
        "worst_overrun_share": found["worst_overrun_share"],
        "recovered": run["recovered"],
    }


if __name__ == "__main__":
    main()
