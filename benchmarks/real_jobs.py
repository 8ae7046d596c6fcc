"""What ordinary jobs pay, and what they yield: two unlike examples, trained in two stages by `ds_squeeze`.

    python -m benchmarks.real_jobs [--quick] [--json FILE] [--only SCENARIO]

Each job runs in several ways, beside a study that is searched and pruned, and never ends (`studies/many_digits.py`):

- *cost*: runs in rounds of six blocks of steps, in random order: *ours*; *stopped*, ours with `preemptive = "stop"`;
  *awake*, where on each core a process of the idle class spins and touches no memory; *alone*, where cores sleep
  through bubbles; and two placebos, in which our side task is stopped by its gate likewise, but its units only *spin*,
  or only run through a *buffer* as large as the core's own cache. The claim is ours ÷ awake, for a core that slept is
  slower afterwards. Ours ÷ alone is what a report shows. Spin ÷ awake is the gate's share, stopped ÷ spin that of the
  work, and buffer ÷ spin that of a cache that others have filled. If half of the claim's interval is more than 0.5%,
  another run follows, and a third.
- *baselines*: one run in such rounds of *awake*, *ours*, *stopped*, the kernel's *idle class* without a gate, and naive
  co-location at *niceness 19*: what each costs the job, and how much of what dedicated devices would do in the bubbles
  it does. Nothing is searched there, and no trial ends: all do the same work.
- *long*: one run in rounds of two long blocks, *ours* and *alone*. A step left alone among squeezed ones finds cores
  still awake, and the next squeezed ones find cores that slept. Long blocks show what a job that is never squeezed
  would gain.
- *yield*: several runs as a user would start them, with all defaults; their reports' yield, and what the rest of the
  bubble time went to.
- *steady*: the same in one run several times as long, of which starting and ending take a smaller part.
- *lasting*: the same beside a study whose trials train ten times as long: most like a job of days. What a trial costs
  besides its training counts for less there, too.

Each round gives one log ratio of mean step times over both ranks; their mean is the slowdown, with Student's t interval
over the rounds. The first step of a block does not count, for it still feels the block before; of a long one, the first
ten. Steps far from others of their round count as less far, as in a report (`squeezer.policy.slowdown`). FILE is
written after each run; if it was stopped, the same command at the same commit continues. Each run says which share of
the cores' time was *stolen*: their host ran others.
"""

import itertools
import math
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.shared.intervals import mean_and_ci95, round_log_ratios, winsorized
from benchmarks.shared.paths import ROOT
from benchmarks.shared.processes import environment, run_directories, start, wait_for_files
from benchmarks.shared.reported import reported
from benchmarks.shared.results import commit, finish, parse, stopped_runs, write
from benchmarks.shared.stolen import Stolen
from benchmarks.studies import ENDLESS_DIGITS, LASTING_DIGITS, MANY_DIGITS, PLACEBO_DIGITS
from benchmarks.utilization.figures import harvests, slowdowns
from benchmarks.utilization.ghost_run import WINDOWED_CONFIG, rank_logs
from benchmarks.windows.baselines import Baselines
from benchmarks.windows.figures import Window, collect
from benchmarks.windows.modes import (
    ALONE,
    AWAKE,
    CACHE_PLACEBO,
    DEDICATED,
    DEFAULTS,
    IDLE,
    NICENESS_19,
    PLACEBO,
    PREEMPTIVE,
    SCHED_IDLE,
    WINDOWED,
    Windows,
)
from benchmarks.windows.spinners import spinners
from squeezer.records.reader import load_run
from squeezer.reports.metrics import mean_over_ranks

NAME = "real_jobs"
JOBS = ("pretrain", "denoise")
BLOCK_STEPS, WASH_OUT_STEPS = 5, 1
WINDOWS = Windows(
    observe=6,
    warm_up=120,  # until the side task trains
    cycle=tuple((mode, BLOCK_STEPS) for mode in (ALONE, AWAKE, PLACEBO, CACHE_PLACEBO, PREEMPTIVE, IDLE)),
    shuffled=True,
)
ROUNDS, QUICK_ROUNDS = 120, 6
COST_RUNS, CLOSE_ENOUGH = 3, 0.005
"""Of so many rounds: at most this many runs, until half of the slowdown's interval is at most this."""
LONG_BLOCK_STEPS, LONG_WASH_OUT_STEPS = 40, 10
LONG_WINDOWS = replace(WINDOWS, cycle=((ALONE, LONG_BLOCK_STEPS), (IDLE, LONG_BLOCK_STEPS)))
LONG_ROUNDS, QUICK_LONG_ROUNDS = 40, 2
BASELINE_MODES = (IDLE, PREEMPTIVE, SCHED_IDLE, NICENESS_19)
BASELINE_WINDOWS = replace(WINDOWS, cycle=((DEDICATED, 2), *((mode, BLOCK_STEPS) for mode in (AWAKE, *BASELINE_MODES))))
BASELINE_ROUNDS, QUICK_BASELINE_ROUNDS = 100, 4
YIELD_RUNS, QUICK_YIELD_RUNS = 3, 1
YIELD_STEPS, QUICK_YIELD_STEPS = 500, 200
STEADY_STEPS, QUICK_STEADY_STEPS = 3000, 300


def main() -> int:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    runs = stopped_runs(options)
    plan = [(f"{job}_{kind}", 0) for job in JOBS for kind in ("baselines", "long", "steady", "lasting")]
    plan += [(f"{job}_cost", i) for job in JOBS for i in range(1 if options.quick else COST_RUNS)]
    repeats = range(QUICK_YIELD_RUNS if options.quick else YIELD_RUNS)
    plan += [(f"{job}_yield", i) for job in JOBS for i in repeats]
    for scenario, number in random.Random(0).sample(plan, len(plan)):
        is_done = any((run["scenario"], run["run"]) == (scenario, number) for run in runs)
        if options.only not in (None, scenario) or is_done:
            continue
        job, kind = scenario.split("_")
        if kind == "cost" and is_close(runs, job):
            continue
        watched = Stolen()
        measured = _measure(job, kind, options.quick)
        runs.append({"scenario": scenario, "run": number, "stolen": round(watched.share(), 5), **measured})
        print({key: value for key, value in runs[-1].items() if key != "steps_ms"}, file=sys.stderr, flush=True)
        if options.json:
            write(NAME, options, runs, summary(runs))
    finish(NAME, options, runs, summary(runs))
    return 0


def is_close(runs: Sequence[Mapping[str, Any]], job: str) -> bool:
    """Whether the slowdown of `job` is known so closely that no further run is needed."""
    interval = summary(runs).get(f"{job}_slowdown_ci95")
    return interval is not None and (interval[1] - interval[0]) / 2 <= CLOSE_ENOUGH


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per job: slowdowns with intervals and the number of rounds; mean yield over its runs, and where the rest went."""
    figures: dict[str, Any] = {}
    for job, kind in itertools.product(JOBS, COMPARED):
        in_blocks = [run["steps_ms"] for run in runs if run["scenario"] == f"{job}_{kind}"]
        for name, (of, over) in COMPARED[kind].items():
            ratios = [log for steps_ms in in_blocks for log in _log_ratios(steps_ms, of, over, *BLOCKS[kind])]
            figures |= _slowdown(f"{job}_{name}", ratios)
            if ratios:  # not a mode that these runs lack
                figures[f"{job}_{name}_rounds"] = len(ratios)
        for name, mode in FIRST_STEPS.items() if kind == "cost" else ():
            ratios = [log for steps_ms in in_blocks for log in _first_steps(steps_ms, mode)]
            figures |= _slowdown(f"{job}_{name}", ratios)
    for run in runs:
        if run["scenario"].endswith("_baselines"):
            windows = [Window(**raw) for raw in run["windows"]]
            pairs = {f"slowdown_{mode}": (mode, AWAKE) for mode in BASELINE_MODES}
            found = slowdowns(windows, pairs) | harvests(windows)
            figures |= {f"{run['scenario']}_{name}": value for name, value in found.items()}
    for job, kind in itertools.product(JOBS, WATERFALLS):
        own = [run for run in runs if run["scenario"] == f"{job}_{kind}" and run["yield"] is not None]
        if own:
            mean, interval = mean_and_ci95([run["yield"] for run in own])
            figures |= {f"{job}_{kind}": mean, f"{job}_{kind}_ci95": interval}
            figures[f"{job}_{kind}_runs"] = len(own)
            figures[f"{job}_{WATERFALLS[kind]}"] = {
                share: round(fmean(run["waterfall"][share] for run in own), 4) for share in own[0]["waterfall"]
            }
    return figures


WATERFALLS = {"yield": "waterfall", "steady": "steady_waterfall", "lasting": "lasting_waterfall"}
COMPARED = {
    "cost": {
        "slowdown": (IDLE, AWAKE),
        "slowdown_from_asleep": (IDLE, ALONE),
        "stopped": (PREEMPTIVE, AWAKE),
        "stopped_from_asleep": (PREEMPTIVE, ALONE),
        "ours_over_stopped": (IDLE, PREEMPTIVE),
        "awake_from_asleep": (AWAKE, ALONE),
        "gate": (PLACEBO, AWAKE),
        "caches": (CACHE_PLACEBO, PLACEBO),
        "work": (PREEMPTIVE, PLACEBO),
    },
    "long": {"slowdown_in_long_blocks": (IDLE, ALONE), "stopped_in_long_blocks": (PREEMPTIVE, ALONE)},
}
"""Kind of run -> name -> the mode that is judged, and the one that it is compared with."""
FIRST_STEPS = {"first_step": PREEMPTIVE, "first_step_alone": ALONE}
"""Name -> the mode of whose blocks the first step is compared with the others."""
BLOCKS = {"cost": (BLOCK_STEPS, WASH_OUT_STEPS), "long": (LONG_BLOCK_STEPS, LONG_WASH_OUT_STEPS)}
"""Kind of run -> the steps in a block, and how many of them do not count."""


def _slowdown(label: str, log_ratios: Sequence[float]) -> dict[str, Any]:
    if not log_ratios:
        return {}
    mean, interval = mean_and_ci95(log_ratios)
    return {label: math.expm1(mean), f"{label}_ci95": interval and [math.expm1(bound) for bound in interval]}


def _log_ratios(
    steps_ms: Sequence[Sequence[Any]], of: str, over: str, block_steps: int, wash_out_steps: int
) -> list[float]:
    """One log ratio per round. `steps_ms`: round, mode, number in its block, ms."""
    counted = ((round_, mode, ms) for round_, mode, at, ms in steps_ms if at >= wash_out_steps)
    return round_log_ratios(counted, of, over, block_steps - wash_out_steps)


def _first_steps(steps_ms: Sequence[Sequence[Any]], mode: str) -> list[float]:
    """One log ratio per block of that mode: its first step ÷ the others."""
    rounds: dict[int, list[tuple[str, int, float]]] = defaultdict(list)
    for round_, of, at, ms in steps_ms:
        rounds[round_].append((of, at, math.log(ms)))
    near = winsorized([[log for *_, log in own] for own in rounds.values()])
    ratios = []
    for own, logs in zip(rounds.values(), near, strict=True):
        block = {at: log for (of, at, _), log in zip(own, logs, strict=True) if of == mode}
        if len(block) == BLOCK_STEPS:
            ratios.append(block[0] - fmean(block[at] for at in range(1, BLOCK_STEPS)))
    return ratios


def _measure(job: str, kind: str, quick: bool) -> dict[str, Any]:
    if kind == "yield":
        return _yield(job, MANY_DIGITS, QUICK_YIELD_STEPS if quick else YIELD_STEPS)
    if kind in ("steady", "lasting"):
        study = MANY_DIGITS if kind == "steady" else LASTING_DIGITS
        return _yield(job, study, QUICK_STEADY_STEPS if quick else STEADY_STEPS)
    if kind == "long":
        return _in_blocks(job, LONG_WINDOWS, QUICK_LONG_ROUNDS if quick else LONG_ROUNDS)
    if kind == "baselines":
        return _beside_baselines(job, QUICK_BASELINE_ROUNDS if quick else BASELINE_ROUNDS)
    return _in_blocks(job, WINDOWS, QUICK_ROUNDS if quick else ROUNDS)


def _in_blocks(job: str, windows: Windows, rounds: int) -> dict[str, Any]:
    """One run in random blocks."""
    with run_directories() as (run, pages):
        steps = windows.first_step(rounds) - 1
        env = {**environment(pages), **windows.environment()}
        _train("benchmarks.windows.launcher", job, steps, _config(run, WINDOWED, PLACEBO_DIGITS), env, pages, windows)
        merged = mean_over_ranks([rank.step_times() for rank in load_run(run)])
        places = [(windows.locate(step.step), step.duration_ns / 1e6) for step in merged if len(step.ranks) == 2]
        counted = [[at.cycle, at.mode, at.at, round(ms, 3)] for at, ms in places if at.cycle >= 0]
        return {"commit": commit(), "steps_ms": counted}


def _beside_baselines(job: str, rounds: int) -> dict[str, Any]:
    """One run in random blocks, of which some belong to processes that train the same without our gate."""
    windows, study = BASELINE_WINDOWS, ENDLESS_DIGITS
    with run_directories() as (run, pages):
        steps = windows.first_step(rounds) - 1
        env = {**environment(pages), **windows.environment()}
        run.mkdir()
        baselines = Baselines(pages=pages, ranks=2, windows=windows, env=env, study=study, logs=run)
        try:
            wait_for_files(baselines.ready_files)
            baselines.start()
            config = _config(run, WINDOWED_CONFIG, study)
            _train("benchmarks.windows.launcher", job, steps, config, env, pages, windows)
            found = collect(windows, rank_logs(run, baselines))
        finally:
            baselines.close()
        return {"commit": commit(), "windows": [each.raw() for each in found if each.mode != DEDICATED]}


def _yield(job: str, study: Path, steps: int) -> dict[str, Any]:
    """One run as a user starts it."""
    with run_directories() as (run, pages):
        _train("launch.ds_squeeze", job, steps, _config(run, DEFAULTS, study), environment(pages))
        return {"commit": commit(), **reported(run)}


def _config(run: Path, text: str, study: Path) -> str:
    path = run.parent / "squeezer.toml"
    path.write_text(text.format(study=study, run=run), encoding="utf-8")
    return str(path)


def _train(
    launcher: str,
    job: str,
    steps: int,
    config: str,
    env: Mapping[str, str],
    pages: Path | None = None,
    windows: Windows = WINDOWS,
) -> None:
    """Run a job to its end; with `pages`, beside spinners."""
    command = [sys.executable, "-m", launcher, "--squeezer", config, "--num_accelerators", "2"]
    command += [str(ROOT / "examples" / f"{job}.py"), "--steps", str(steps)]
    with ExitStack() as ends:
        if pages is not None and AWAKE in windows.modes:
            ends.enter_context(spinners(pages, 2, windows))
        ended = start(command, env, ends).wait()
    if ended:
        raise RuntimeError(f"the job ended with status {ended}")


if __name__ == "__main__":
    sys.exit(main())
