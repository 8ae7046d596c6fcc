"""What squeezing costs ghost stages, and what it yields, by class of pipeline and beside baselines.

    python -m benchmarks.bubble_utilization [--quick] [--json FILE] [--only SCENARIO]

The classes are *long* bubbles, *many* micro-batches (twice as many as stages) and *dualpipev*. Each has a ghost stage,
which is squeezed in several ways:

- `…_arms`: one run in rounds of short blocks, in random order: *alone*, where the core sleeps through bubbles; *awake*,
  where a process of the idle class spins and touches no memory; *placebos*, in which our side task goes through its
  gate, but its units only spin, or (`long` only) only run through a buffer as large as the core's own cache; *ours*,
  preemptive and cooperative; the kernel's *idle class* without our gate; *step grain*, as FreeRide gates, in the idle
  class and woken by bubbles, with as many fused trials as ours and with fewer (`windows/baselines.py`).
- `…_naive`: the same beside naive co-location at niceness 19, and in a control group of the least weight. Both upset
  the forecasts, which cooperative gates and step grain need, so these are not among them.
- `…_yield`: runs with all defaults, beside a study that is searched and pruned; their reports' yield, and what the rest
  of the bubble time went to. `many_cooperative` is the same without preemption, as on a GPU.

In blocks nothing is searched, and no trial ends: all do the same work. FILE is written after each run; if it was
stopped, the same command at the same commit and on the same machine continues. Each run says which share of the cores'
time was *stolen*: their host ran others. Ghosts show no delays that compound over ranks, and no CPU time of gloo's
(`benchmarks.ghost_twins`); real jobs are for `benchmarks.real_jobs`.

Further scenarios run with `--only` alone. In them windows come in a fixed order (`utilization/ghosts.py`): ours, an
oracle that knows each bubble's true end, and baselines, beside a real job of two ranks and many ghost stages: balanced,
unbalanced, disturbed, with several side tasks, with the guard on. Keys of their summary without a mode's name are those
of the preemptive mode.
"""

import random
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.shared.paths import ROOT
from benchmarks.shared.processes import environment, run_directories, start
from benchmarks.shared.results import commit, finish, parse, stopped_runs, write
from benchmarks.shared.stolen import Stolen
from benchmarks.studies import ENDLESS_DIGITS, VARIANT_DIGITS
from benchmarks.utilization import arm_figures, arms, guarded
from benchmarks.utilization.ghost_run import WINDOWED_CONFIG, rank_logs, train_in_windows, write_config
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
    COOPERATIVE,
    GATED,
    NAIVE,
    ORACLE,
    PREEMPTIVE,
    SCHED_IDLE,
    STEP_GRAIN,
    Windows,
)
from squeezer.reports.report import build_report

NAME = "bubble_utilization"
GHOSTS = {ghost.name: ghost for ghost in all_ghosts()}
IN_WINDOWS = (REAL, *GHOSTS, *guarded.SCENARIOS)


def main() -> None:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    planned = _plan(options.only, quick=options.quick)
    runs = stopped_runs(options)
    for scenario, number in random.Random(0).sample(planned, len(planned)):
        if any((run["scenario"], run.get("run", 0)) == (scenario, number) for run in runs):
            continue
        watched = Stolen()
        measured = _measure(scenario, quick=options.quick)
        runs.append({"scenario": scenario, "run": number, "stolen": round(watched.share(), 5), **measured})
        if options.json:  # a run that is cut short keeps its results
            write(NAME, options, runs, _summary(runs))
    finish(NAME, options, runs, _summary(runs))
    if options.only not in IN_WINDOWS:
        print(arm_figures.table(_summary(runs)))
    elif options.json:
        write_figures(options.json)


def _plan(only: str | None, *, quick: bool) -> list[tuple[str, int]]:
    """(scenario, number of the run) of all that are to be measured."""
    planned = arms.plan(quick=quick)
    names = [*dict.fromkeys(scenario for scenario, _ in planned), *IN_WINDOWS]
    if only not in (None, *names):
        raise SystemExit(f"--only {only}: no such scenario; allowed: {', '.join(names)}")
    if only in IN_WINDOWS:
        return [(only, 0)]
    return [each for each in planned if each[0] == only or (not only and (not quick or each[0].startswith(arms.LONG)))]


def _measure(scenario: str, *, quick: bool) -> dict[str, Any]:
    if scenario == REAL:
        return _real(cycles=1 if quick else REAL_CYCLES)
    if scenario in guarded.SCENARIOS:
        return guarded.measure(guarded.SCENARIOS[scenario])
    if scenario in GHOSTS:
        least = (30.0, 3) if quick else (GHOSTS[scenario].seconds, GHOST_CYCLES)
        return _ghost(GHOSTS[scenario], *least)
    measured = arms.measure(scenario, quick=quick)
    print(scenario, arm_figures.summary([{"scenario": scenario, **measured}]), file=sys.stderr, flush=True)
    return measured


def _ghost(ghost: Ghost, seconds: float, cycles: int) -> dict[str, Any]:
    """Run a ghost scenario for at least `seconds` and `cycles`."""
    with run_directories() as (run, pages):
        study = VARIANT_DIGITS if ghost.side else ENDLESS_DIGITS
        windows = ghost.windows
        ranks = train_in_windows(ghost, windows, run, pages, study=study, seconds=seconds, cycles=cycles)
        return _result(ghost.name, windows, run, ranks, disturbed=ghost.is_disturbed)


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
            str(write_config(WINDOWED_CONFIG, run, ENDLESS_DIGITS)),
        ]
        command += ["--num_accelerators", "2", str(ROOT / "examples" / "pretrain.py"), "--steps", str(steps)]
        baselines = Baselines(pages=pages, ranks=2, windows=REAL_WINDOWS, env=env, study=ENDLESS_DIGITS, logs=logs)
        baselines.start()
        with ExitStack() as ends:
            ends.callback(baselines.close)
            job = start(command, env, ends)
            if job.wait() != 0:
                raise RuntimeError(f"the job ended with status {job.returncode}")
            ranks = rank_logs(run, baselines)
        return _result(REAL, REAL_WINDOWS, run, ranks, disturbed=False)


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
    summary: dict[str, Any] = {"plain_keys_are": PREEMPTIVE, **arm_figures.summary(all_runs)}
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
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leaves nothing running
    main()
