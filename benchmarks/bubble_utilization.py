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
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.shared.paths import ROOT
from benchmarks.shared.processes import environment, last_core, run_directories, start
from benchmarks.shared.results import commit, finish, kept_runs, parse, write
from benchmarks.studies import ENDLESS_DIGITS, VARIANT_DIGITS, variant_digits
from benchmarks.utilization import guarded
from benchmarks.utilization.ghosts import (
    BESIDE_WINDOWS,
    CYCLES_AFTER,
    DISTURBED_AT_CYCLE,
    GHOST_CYCLES,
    REAL,
    REAL_CYCLES,
    REAL_WINDOWS,
    Ghost,
    all_ghosts,
)
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


def main() -> None:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leaves nothing running
    ghosts = {ghost.name: ghost for ghost in all_ghosts()}
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
