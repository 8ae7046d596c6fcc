"""Whether ghost stages idle, and are filled, as real ones: ghost twins of both stages of two real jobs.

    python -m benchmarks.ghost_twins [--quick] [--json FILE] [--only JOB]

In each round an example trains in two stages beside our side tasks, with the defaults. Then each of its stages trains
once more as a ghost stage: the same layers, batches and micro-batches in DeepSpeed's own engine, while the other stage
is only modelled, with the times that its own calibration measured. Both twins run at once, as do their calibrations,
each on a core, for cores that share memory and clock slow each other. Of real stage and twin are compared: the length
of each slot's bubble, the bubble time of a step, fill and harvest.

What a ghost cannot show is a slowdown: its other stages are never late because of ours, and its messages cost no CPU
time.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.ghost.network import EXAMPLES
from benchmarks.shared.intervals import mean_and_ci95
from benchmarks.shared.paths import ROOT
from benchmarks.shared.processes import environment, run_directories, start
from benchmarks.shared.results import commit, finish, kept_runs, parse, write
from benchmarks.studies import ENDLESS_DIGITS
from squeezer.records.reader import RankRun, load_run
from squeezer.reports.report import build_report

NAME = "ghost_twins"
STAGES = 2
ROUNDS, QUICK_ROUNDS = 3, 1
STEPS, QUICK_STEPS = 300, 160
SETTLED_STEP = 10
"""Steps before it are still slow, or learn their bubbles."""
CONFIG = """
[side]
study = "{study}"
[run]
directory = "{run}"
"""
Process = subprocess.Popen[bytes]
MODULE = [sys.executable, "-m"]


def main() -> int:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    runs = kept_runs(options)
    steps = QUICK_STEPS if options.quick else STEPS
    for number in range(QUICK_ROUNDS if options.quick else ROUNDS):
        for job in EXAMPLES:
            if options.only in (None, job):
                runs.append({"scenario": job, "round": number, "commit": commit(), **measure(job, steps)})
                print(job, summary(runs[-1:]), file=sys.stderr, flush=True)
                if options.json:  # a run that is cut short keeps its results
                    write(NAME, options, runs, summary(runs))
    finish(NAME, options, runs, summary(runs))
    return 0


def measure(job: str, steps: int) -> dict[str, Any]:
    """One round: the real job, and then the twin of each stage. Per stage its figures, see `_figures`."""
    real = _real(job, steps)
    with ExitStack() as folders:
        runs = [folders.enter_context(run_directories()) for _ in range(STAGES)]
        paces = [pages.parent / "pace.json" for _, pages in runs]
        with ExitStack() as ends:
            calibrations = [
                start([*_ghost_job(job, stage), "--calibrate", str(pace)], environment(pages), ends)
                for stage, (pace, (_, pages)) in enumerate(zip(paces, runs, strict=True))
            ]
            for process in calibrations:
                _end_well(process)
        with ExitStack() as ends:
            twins = [_start_twin(job, stage, steps, paces, *runs[stage], ends) for stage in range(STAGES)]
            for main, daemon in twins:
                _end_well(main)
                daemon.wait(120)
        found = [_figures(run, rank) for run, _ in runs for rank in load_run(run)]
    return {"real": real, "twin": found}


def _real(job: str, steps: int) -> list[dict[str, Any]]:
    with run_directories() as (run, pages):
        command = [*MODULE, "launch.ds_squeeze", "--squeezer", _config(run), "--num_accelerators", str(STAGES)]
        command += [str(ROOT / "examples" / f"{job}.py"), "--steps", str(steps)]
        with ExitStack() as ends:
            _end_well(start(command, environment(pages), ends))
        return [_figures(run, rank) for rank in load_run(run)]


def _start_twin(
    job: str, stage: int, steps: int, paces: Sequence[Path], run: Path, pages: Path, ends: ExitStack
) -> tuple[Process, Process]:
    """The ghost and its daemon."""
    run.mkdir()
    env = environment(pages)
    command = [*_ghost_job(job, stage), "--steps", str(steps), "--wait-for-side", "--pace", *map(str, paces)]
    main = start(command, env, ends)
    daemon = [*MODULE, "squeezer", "daemon", "--config", _config(run), "--job-pid", str(main.pid)]
    return main, start(["taskset", "-c", str(_core(stage)), *daemon], env, ends)


def _core(stage: int) -> int:
    """The core of a stage's twin."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[stage - STAGES]


def _ghost_job(job: str, stage: int) -> list[str]:
    return [*MODULE, "benchmarks.ghost.job", "--example", job, "--stage", str(stage), "--core", str(_core(stage))]


def _end_well(process: Process) -> None:
    if process.wait():
        raise RuntimeError(f"{process.args!r} ended with status {process.returncode}")


def _config(run: Path) -> str:
    path = run.parent / "squeezer.toml"
    path.write_text(CONFIG.format(study=ENDLESS_DIGITS, run=run), encoding="utf-8")
    return str(path)


def _figures(run: Path, rank: RankRun) -> dict[str, Any]:
    """Of one stage: median step and bubble lengths in ms, by slot; fill and harvest.

    Raises:
        RuntimeError: the side task was not ready before the job ended.
    """
    report = build_report(run)
    side = report["ranks"][rank.rank if rank.rank in report["ranks"] else str(rank.rank)]["side"]
    if side["fill"] is None or side["harvest"] is None:
        raise RuntimeError("the side task has trained nothing: the job needs more steps, or a machine that is not busy")
    settled = {step["step"]: step for step in rank.records["step"] if step["step"] >= SETTLED_STEP}
    by_slot: dict[int, list[float]] = {}
    for bubble in rank.records["bubble"]:
        if bubble["step"] in settled:
            by_slot.setdefault(bubble["slot"], []).append((bubble["end_ns"] - bubble["start_ns"]) / 1e6)
    # a slot that seldom waits has a median of 0
    lengths = {slot: ms + [0.0] * (len(settled) - len(ms)) for slot, ms in sorted(by_slot.items())}
    return {
        "fill": side["fill"],
        "harvest": side["harvest"],
        "steps": len(settled),
        "step_ms": median((step["end_ns"] - step["start_ns"]) / 1e6 for step in settled.values()),
        "slots_ms": {str(slot): round(median(ms), 4) for slot, ms in lengths.items()},
        "bubble_ms": sum(map(sum, lengths.values())) / len(settled),
    }


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per job and stage: twin against real stage, means over the rounds with 95% intervals.

    `_bubble` is the ratio of bubble times per step, less 1; `_slots` the sum of what the bubbles of single
    slots differ by, as a share of the real bubble time; `_fill` and `_harvest` are differences.
    """
    figures: dict[str, Any] = {"rounds": len({run["round"] for run in runs})}
    for job in EXAMPLES:
        for stage in range(STAGES):
            pairs = [(run["real"][stage], run["twin"][stage]) for run in runs if run["scenario"] == job]
            if not pairs:
                continue
            found = [_compared(real, twin) for real, twin in pairs]
            for name in found[0]:
                mean, interval = mean_and_ci95([each[name] for each in found])
                figures |= {f"{job}_{stage}_{name}": mean, f"{job}_{stage}_{name}_ci95": interval}
            for name in ("fill", "harvest"):
                figures[f"{job}_{stage}_real_{name}"] = fmean(real[name] for real, _ in pairs)
    return figures


def table(figures: Mapping[str, Any]) -> str:
    """The summary in Markdown."""
    lines = ["| twin of | bubble time of a step | single slots | fill: real, twin less real | harvest: the same |"]
    lines.append("|---" * 5 + "|")
    for job in EXAMPLES:
        for stage in range(STAGES):
            key = f"{job}_{stage}"
            cells = [f"stage {stage} of `{job}.py`", _signed(figures, f"{key}_bubble")]
            cells.append(f"{figures[f'{key}_slots']:.0%}")
            for name in ("fill", "harvest"):
                cells.append(f"{figures[f'{key}_real_{name}']:.0%}, {_signed(figures, f'{key}_{name}')}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _signed(figures: Mapping[str, Any], key: str) -> str:
    interval = figures[f"{key}_ci95"]
    bounds = f" ({interval[0]:+.0%} to {interval[1]:+.0%})" if interval else ""
    return f"{figures[key]:+.0%}{bounds}".replace("-", "−")


def _compared(real: Mapping[str, Any], twin: Mapping[str, Any]) -> dict[str, float]:
    ours_ms, theirs_ms = real["slots_ms"], twin["slots_ms"]
    apart_ms = sum(abs(ours_ms.get(slot, 0.0) - theirs_ms.get(slot, 0.0)) for slot in {*ours_ms, *theirs_ms})
    return {
        "bubble": twin["bubble_ms"] / real["bubble_ms"] - 1,
        "slots": apart_ms / sum(ours_ms.values()),
        "step": twin["step_ms"] / real["step_ms"] - 1,
        "fill": twin["fill"] - real["fill"],
        "harvest": twin["harvest"] - real["harvest"],
    }


if __name__ == "__main__":
    sys.exit(main())
