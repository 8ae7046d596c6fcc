"""Whether ghost stages idle, and are filled, as real ones: ghost twins of both stages of two real jobs.

    python -m benchmarks.ghost_twins [--quick] [--json FILE] [--only JOB]

In each round an example trains in two stages beside our side tasks, with the defaults. Then each of its stages trains
once more as a ghost stage: the same layers, batches and micro-batches in DeepSpeed's own engine, while the other stage
is only modelled. It repeats, step by step, what it did in the real job: its work between two messages, and how long
each message took once both ends were there (`benchmarks/ghost/recording.py`). Both twins run at once, each on its core,
once both side tasks are ready, so each has a busy neighbour, as the real stages have. While a message is handed over, a
twin copies memory, as gloo does.

The machine's speed drifts, so the ghost's times are scaled by those of the twin's own work, now and when the real job
ran, and a twin's bubbles are divided by that ratio (*pace*) before they are compared. A harvest rests on a dedicated
rate that each run measures in two seconds.

Compared are squeezed steps only: the median and the 90th percentile of the bubble in each slot, the share of bubbles in
the time, fill and harvest. A figure *agrees* if the 95% interval of the twins' differences, over the rounds, lies
within its bound (`BOUNDS`); it *differs* if it lies wholly outside; else the question is *open*.

What a ghost cannot show is a slowdown: its peers are never late because of ours, so delays cannot compound over ranks.
Nor does what slows both cores at once slow twin and ghost together, so waits between stages of nearly equal work come
out longer. *Out of step* shows how much that is: the recording alone is replayed, with the peer's steps moved in time.

FILE is written after each round; if it was stopped, the same command at the same commit continues.
"""

import itertools
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.ghost.model import Timing, replay
from benchmarks.ghost.network import EXAMPLES, of_example
from benchmarks.ghost.program import Op, programs_of
from benchmarks.ghost.recording import Recording, out_of_step, read_recordings
from benchmarks.shared.intervals import mean_and_ci95
from benchmarks.shared.paths import ROOT
from benchmarks.shared.processes import environment, run_directories, start
from benchmarks.shared.results import finish, parse, stopped_runs, write
from benchmarks.studies import ENDLESS_DIGITS
from squeezer.records.reader import RankRun, load_run
from squeezer.reports.report import build_report

NAME = "ghost_twins"
STAGES = 2
ROUNDS, QUICK_ROUNDS = 5, 1
STEPS, QUICK_STEPS = (200, 150), (120, 80)
"""Of the real job, and of a twin: it waits for its side task, while the real job takes some 40 steps until then."""
SETTLED_STEP = 10
"""Steps before it are still slow, or learn their bubbles."""
FIGURES = {
    "median": "single bubbles: their median",
    "p90": "their 90th percentile",
    "share": "share of bubbles in the time",
    "fill": "fill",
    "harvest": "harvest",
}
ERRORS = ("median", "p90")
"""Of the figures, those that are relative errors, weighted by time. The others are differences."""
BOUNDS = {"median": 0.1, "p90": 0.2, "share": 0.02, "fill": 0.05, "harvest": 0.1}
"""How far twins may be off."""
CONFIG = """
[side]
study = "{study}"
[run]
directory = "{run}"
"""
NONE = (0.0, 0.0)
Slots = Mapping[str, Sequence[float]]
"""Slot -> median and 90th percentile in ms."""
Process = subprocess.Popen[bytes]
MODULE = [sys.executable, "-m"]


def main() -> int:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    runs = stopped_runs(options)
    for number in range(QUICK_ROUNDS if options.quick else ROUNDS):
        for job in EXAMPLES:
            is_done = any((run["scenario"], run["round"]) == (job, number) for run in runs)
            if options.only not in (None, job) or is_done:
                continue
            runs.append({"scenario": job, "round": number, **measure(job, *(QUICK_STEPS if options.quick else STEPS))})
            print(f"round {number + 1}: {job}", table(summary(runs[-1:])), sep="\n", file=sys.stderr, flush=True)
            if options.json:
                write(NAME, options, runs, summary(runs))
    finish(NAME, options, runs, summary(runs))
    print(table(summary(runs)))
    return 0


def measure(job: str, real_steps: int, twin_steps: int) -> dict[str, Any]:
    """One round: the real job, and then the twins of its stages. Per stage its figures, see `_figures`."""
    with ExitStack() as folders:
        real, *twins = (folders.enter_context(run_directories()) for _ in range(1 + STAGES))
        _train(job, real_steps, *real)
        with ExitStack() as ends:
            ready = [pages.parent / "ready" for _, pages in twins]
            options = ["--steps", str(twin_steps), "--recorded", str(real[0]), "--wait-for", *map(str, ready)]
            pairs = [_start_twin(job, stage, options, *twins[stage], ends) for stage in range(STAGES)]
            for main, daemon in pairs:
                _end_well(main)
                daemon.wait(120)
        found = [figures for run, _ in twins for figures in _figures_of(run)]
        shape, _ = of_example(job, 0)
        programs = programs_of(shape)
        recordings = read_recordings(real[0], programs)
        errors = [_out_of_step_errors(programs, recordings, stage) for stage in range(STAGES)]
        return {"real": _figures_of(real[0]), "twin": found, "out_of_step": errors}


def _out_of_step_errors(
    programs: Sequence[Sequence[Op]], recordings: Sequence[Recording], stage: int
) -> dict[str, float]:
    """By how much the waits of a replay change if only the peers' steps are those of another time."""
    waits_ms = []
    for each in (recordings, out_of_step(recordings, stage)):
        timing = Timing(forward_ns=0, backward_ns=0, meets=True, recorded=tuple(each))
        by_slot = defaultdict[int, list[float]](list)
        for wait in replay(programs, timing, steps=len(each[stage].steps))[stage].waits:
            by_slot[wait.slot].append((wait.end_ns - wait.start_ns) / 1e6)
        waits_ms.append({str(slot): _middle_and_p90(ms) for slot, ms in by_slot.items()})
    return _slot_errors(*waits_ms)


def _middle_and_p90(ms: Any) -> list[float]:
    middle, p90 = np.quantile(ms, (0.5, 0.9)).round(4).tolist()
    return [middle, p90]


def _slot_errors(real_ms: Slots, twin_ms: Slots) -> dict[str, float]:
    """Errors of the medians and of the 90th percentiles, relative to the sum over the slots."""
    slots = {*real_ms, *twin_ms}
    errors = {}
    for index, name in enumerate(ERRORS):
        pairs_ms = [(real_ms.get(slot, NONE)[index], twin_ms.get(slot, NONE)[index]) for slot in slots]
        errors[name] = sum(abs(real - twin) for real, twin in pairs_ms) / sum(real for real, _ in pairs_ms)
    return errors


def _train(job: str, steps: int, run: Path, pages: Path) -> None:
    """The real job."""
    command = [*MODULE, "launch.ds_squeeze", "--squeezer", _config(run), "--num_accelerators", str(STAGES)]
    command += [str(ROOT / "examples" / f"{job}.py"), "--steps", str(steps)]
    with ExitStack() as ends:
        _end_well(start(command, environment(pages), ends))


def _start_twin(
    job: str, stage: int, options: Sequence[str], run: Path, pages: Path, ends: ExitStack
) -> tuple[Process, Process]:
    """The ghost and its daemon."""
    run.mkdir()
    env, core = environment(pages), str(_core(stage))
    command = [*MODULE, "benchmarks.ghost.job", "--example", job, "--stage", str(stage), "--core", core, *options]
    command += ["--wait-for-side", "--ready", str(pages.parent / "ready")]
    main = start(command, env, ends)
    daemon = [*MODULE, "squeezer", "daemon", "--config", _config(run), "--job-pid", str(main.pid)]
    return main, start(["taskset", "-c", core, *daemon], env, ends)


def _core(stage: int) -> int:
    """The core of a stage's twin."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[stage - STAGES]


def _end_well(process: Process) -> None:
    if process.wait():
        raise RuntimeError(f"{process.args!r} ended with status {process.returncode}")


def _config(run: Path) -> str:
    path = run.parent / "squeezer.toml"
    path.write_text(CONFIG.format(study=ENDLESS_DIGITS, run=run), encoding="utf-8")
    return str(path)


def _figures_of(run: Path) -> list[dict[str, Any]]:
    """Of each stage that ran there, over squeezed steps.

    `compute_ms` is the median of a step without its bubbles, `share` the bubbles' share in the time, and `slots_ms` has
    the median and the 90th percentile of the bubble in each slot.

    Raises:
        RuntimeError: the side task was not ready before the job ended.
    """
    sides = build_report(run)["ranks"]
    return [_figures(rank, sides[str(rank.rank)]["side"]) for rank in load_run(run)]


def _figures(rank: RankRun, side: Mapping[str, Any]) -> dict[str, Any]:
    steps = [step for step in rank.records["step"] if step["squeezed"] and step["step"] >= SETTLED_STEP]
    if side["fill"] is None or side["harvest"] is None or len(steps) < 2:
        raise RuntimeError("the side task has trained nothing: the job needs more steps, or a machine that is not busy")
    place = {step["step"]: index for index, step in enumerate(steps)}
    steps_ms = np.array([step["end_ns"] - step["start_ns"] for step in steps]) / 1e6
    slots_ms: defaultdict[int, Any] = defaultdict(lambda: np.zeros(len(steps)))  # a slot may do without a wait
    for bubble in rank.records["bubble"]:
        if bubble["step"] in place:
            slots_ms[bubble["slot"]][place[bubble["step"]]] = (bubble["end_ns"] - bubble["start_ns"]) / 1e6
    bubbles_ms = sum(slots_ms.values())
    return {
        "steps": len(steps),
        "compute_ms": float(np.median(steps_ms - bubbles_ms)),
        "share": float(np.sum(bubbles_ms) / np.sum(steps_ms)),
        "slots_ms": {str(slot): _middle_and_p90(ms) for slot, ms in sorted(slots_ms.items())},
        "fill": side["fill"],
        "harvest": side["harvest"],
    }


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per job and stage: twin against real stage, means over the rounds with 95% intervals, and the verdict on each.

    `_pace` is the ratio of their own work; `FIGURES` names the others, and `BOUNDS` says what they are. `_out_of_step`
    are the first two for a replay of the recording, in which only the peers' steps are those of another time.
    """
    figures: dict[str, Any] = {"rounds": len({run["round"] for run in runs})}
    for job, stage in itertools.product(EXAMPLES, range(STAGES)):
        pairs = [(run["real"][stage], run["twin"][stage]) for run in runs if run["scenario"] == job]
        if not pairs:
            continue
        found = [_compared(real, twin) for real, twin in pairs]
        for name in ("pace", *FIGURES):
            mean, interval = mean_and_ci95([each[name] for each in found])
            figures |= {f"{job}_{stage}_{name}": mean, f"{job}_{stage}_{name}_ci95": interval}
            if name in BOUNDS:
                figures[f"{job}_{stage}_{name}_verdict"] = _verdict(interval, BOUNDS[name])
        for name in ERRORS:
            errors = [run["out_of_step"][stage][name] for run in runs if run["scenario"] == job]
            figures[f"{job}_{stage}_out_of_step_{name}"] = fmean(errors)
        for name in ("share", "fill", "harvest"):
            figures[f"{job}_{stage}_real_{name}"] = fmean(real[name] for real, _ in pairs)
    return figures


def _compared(real: Mapping[str, Any], twin: Mapping[str, Any]) -> dict[str, float]:
    pace = twin["compute_ms"] / real["compute_ms"]
    twin_ms = {slot: [ms / pace for ms in lengths] for slot, lengths in twin["slots_ms"].items()}
    differences = {name: twin[name] - real[name] for name in ("share", "fill", "harvest")}
    return {"pace": pace, **_slot_errors(real["slots_ms"], twin_ms), **differences}


def _verdict(interval: Sequence[float] | None, bound: float) -> str:
    if interval is None:
        return "open"
    low, high = interval
    if -bound <= low and high <= bound:
        return "agrees"
    return "differs" if low > bound or high < -bound else "open"


def table(figures: Mapping[str, Any]) -> str:
    """The summary in Markdown: a row per figure, a column per stage."""
    stages = [
        (job, stage) for job, stage in itertools.product(EXAMPLES, range(STAGES)) if f"{job}_{stage}_pace" in figures
    ]
    lines = [
        f"| twin, less the real stage | bound | {' | '.join(f'`{job}.py`, stage {stage}' for job, stage in stages)} |"
    ]
    lines.append("|---" * (2 + len(stages)) + "|")
    for name, title in FIGURES.items():
        cells = [_cell(figures, f"{job}_{stage}", name) for job, stage in stages]
        unit = "%" if name in ERRORS else " points"
        lines.append(f"| {title} | {100 * BOUNDS[name]:.0f}{unit} | {' | '.join(cells)} |")
    for name in ERRORS:
        cells = [f"{figures[f'{job}_{stage}_out_of_step_{name}']:.0%}" for job, stage in stages]
        lines.append(f"| {FIGURES[name]}, replayed out of step | | {' | '.join(cells)} |")
    cells = [f"{figures[f'{job}_{stage}_pace']:.2f}" for job, stage in stages]
    lines.append(f"| pace: the twin's own work ÷ the real stage's | | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(figures: Mapping[str, Any], stage: str, name: str) -> str:
    key = f"{stage}_{name}"
    shown = "{:.0%}" if name in ERRORS else "{:+.0f}"
    values = [figures[key], *(figures[f"{key}_ci95"] or ())]
    value, *bounds = (shown.format(value if name in ERRORS else 100 * value).replace("-", "−") for value in values)
    real = "" if name in ERRORS else f"{figures[f'{stage}_real_{name}']:.0%}, "
    return f"{real}{value}{f' ({bounds[0]} to {bounds[1]})' if bounds else ''}: {figures[f'{key}_verdict']}"


if __name__ == "__main__":
    sys.exit(main())
