"""What squeezing costs the main job and what the side task gets, beside its baselines, all in one run per scenario.

Windows alternate: squeezed, alone, naive co-location. Scenarios are stages of ghost pipelines, and a real two-rank job.
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.common import (
    ROOT,
    commit,
    environment,
    finish,
    kept_runs,
    parse,
    places,
    pooled_ratio_with_ci95,
    ratio_with_ci95,
)
from benchmarks.naive import NaiveWindows, Windows
from squeezer.report import build_report
from squeezer.trace import RankRun, load_run

NAME = "bubble_utilization"
STUDY = ROOT / "benchmarks" / "endless_digits.py"
GHOSTS = ((4, 0, 4), (4, 1, 4), (4, 2, 4), (4, 3, 4), (8, 3, 8))
"""(stages, stage, micro-batches)."""
COOPERATIVE = "_cooperative"
"""Ends the name of a scenario in which permits end at the forecast, as they must on a GPU; in the others the side task
is stopped at the bubble's true end."""
WINDOWS = Windows(observe=6, squeezed=10, alone=10, naive=4)
DEDICATED_S = 4.0


def main() -> None:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    ghosts, cycles = (GHOSTS[1:2], 3) if options.quick else (GHOSTS, 4)
    scenarios = {f"ghost_{p}_{k}_{m}": partial(_ghost, p, k, m, cycles=cycles) for p, k, m in ghosts}
    scenarios["real_two_ranks"] = partial(_real, cycles=cycles + 1 if options.quick else 2 * cycles)
    if not options.quick:
        scenarios |= {f"{name}{COOPERATIVE}": scenarios[name] for name in ("ghost_4_1_4", "real_two_ranks")}
    runs = kept_runs(options)
    runs += [measure(name) for name, measure in scenarios.items() if options.only in (None, name)]
    finish(NAME, options, runs, _summary(runs))


def _ghost(stages: int, stage: int, micro_batches: int, name: str, *, cycles: int) -> dict[str, Any]:
    with places() as (run, pages):
        env = environment(pages)
        config = _config(run, name)
        steps = WINDOWS.observe + cycles * WINDOWS.cycle
        command = [
            sys.executable,
            "-m",
            "benchmarks.ghost_job",
            "--steps",
            str(steps),
            "--core",
            "1",
            "--wait-for-side",
        ]
        command += ["--stages", str(stages), "--stage", str(stage), "--micro-batches", str(micro_batches)]
        naive = NaiveWindows(pages, 1, WINDOWS, env, STUDY)
        naive.start()
        try:
            job = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL)
            daemon = [sys.executable, "-m", "squeezer", "daemon", "--config", str(config), "--job-pid", str(job.pid)]
            squeezer = subprocess.Popen(["taskset", "-c", "1", *daemon], env=env, cwd=ROOT, stdout=subprocess.DEVNULL)
            if job.wait() != 0:
                raise RuntimeError(f"the ghost job ended with status {job.returncode}")
        finally:
            naive.close()
        squeezer.wait(120)
        return _result(name, run)


def _real(name: str, *, cycles: int) -> dict[str, Any]:
    with places() as (run, pages):
        env = environment(pages)
        steps = WINDOWS.observe + cycles * WINDOWS.cycle
        command = [
            sys.executable,
            "-m",
            "launch.ds_squeeze",
            "--squeezer",
            str(_config(run, name)),
            "--num_accelerators",
            "2",
        ]
        command += [str(ROOT / "examples" / "pretrain.py"), "--steps", str(steps)]
        naive = NaiveWindows(pages, 2, WINDOWS, env, STUDY)
        naive.start()
        try:
            subprocess.run(command, env=env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        finally:
            naive.close()
        return _result(name, run)


def _config(run: Path, name: str) -> Path:
    path = run.parent / "squeezer.toml"
    path.write_text(
        f"""
[squeeze]
observe_steps = {WINDOWS.observe}
squeezed_steps = {WINDOWS.squeezed}
alone_steps = {WINDOWS.alone + WINDOWS.naive}
preemptive = {str(not name.endswith(COOPERATIVE)).lower()}
[side]
study = "{STUDY}"
[run]
directory = "{run}"
calibrate_s = {DEDICATED_S}
""",
        encoding="utf-8",
    )
    return path


def _result(scenario: str, run: Path) -> dict[str, Any]:
    """The figures of one run, from its records."""
    by_window: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    steps_ms: dict[int, list[float]] = defaultdict(list)
    ranks = load_run(run)
    for rank in ranks:
        for step in rank.step_times():
            steps_ms[step.step].append(step.duration_ns / 1e6)
    for number, durations in sorted(steps_ms.items()):
        cycle, window, place = WINDOWS.place(number)
        if place > 0:  # the first step of a window still feels the one before it
            by_window[cycle][window].append(fmean(durations))
    # the first cycle belongs to warming up: the side task asks for its trials and builds them in it
    cycles = [by_window[cycle] for cycle in sorted(by_window) if cycle >= 1 and len(by_window[cycle]) == 3]
    report = build_report(run)
    result: dict[str, Any] = {"scenario": scenario, "commit": commit()}
    for name, window in (("slowdown", "squeezed"), ("naive_slowdown", "naive")):
        pairs = [(fmean(cycle[window]), fmean(cycle["alone"])) for cycle in cycles]
        result[name], result[f"{name}_ci95"] = ratio_with_ci95(pairs)
    result["step_ms_alone"] = fmean(ms for cycle in cycles for ms in cycle["alone"])
    result["bubble_ratio"] = report["bubbles"]["ratio"]
    side = report["side"]
    result |= {"fill": side["fill"], "harvest": _harvest(ranks)}
    result |= {"overrun_us_p50": side["overrun_us"]["p50"], "overrun_us_p99": side["overrun_us"]["p99"]}
    result |= {"resume_us_p50": side["resume_us"]["p50"], "resume_us_p99": side["resume_us"]["p99"]}
    result["faults"] = report["faults"]
    result["windows_ms"] = [{name: [round(ms, 3) for ms in times] for name, times in c.items()} for c in cycles]
    shown = {key: result[key] for key in ("slowdown", "slowdown_ci95", "harvest", "fill", "naive_slowdown")}
    print(f"{scenario}: {json.dumps(shown)}", file=sys.stderr, flush=True)
    return result


def _harvest(ranks: Sequence[RankRun]) -> float:
    """Work done after the first cycle, over what the same side task does alone in the time of all bubbles then."""
    dedicated = [end["dedicated"] for rank in ranks if (end := rank.records["end"][-1])["dedicated"]]
    usual_per_s = fmean(rate["work_per_s"] for rate in dedicated)  # for a rank whose side task never came to work
    work = capacity = 0.0
    for rank in ranks:
        steps = [s for s in rank.records["step"] if WINDOWS.place(s["step"])[0] >= 1]
        numbers = {s["step"] for s in steps}
        bubble_ns = sum(
            b["end_ns"] - b["start_ns"] for b in rank.records["bubble"] if b["squeezed"] and b["step"] in numbers
        )
        work += steps[-1]["work"] - steps[0]["work"]
        rate = rank.records["end"][-1]["dedicated"] or {"work_per_s": usual_per_s}
        capacity += rate["work_per_s"] * bubble_ns / 1e9
    return work / capacity


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all scenarios of one mode: pooled ratios, medians of the rest. The cooperative mode's keys begin with it."""
    summary: dict[str, Any] = {}
    for prefix in ("", "cooperative_"):
        chosen = [run for run in runs if run["scenario"].endswith(COOPERATIVE) == bool(prefix)]
        if not chosen:
            continue
        for name, window in (("slowdown", "squeezed"), ("naive_slowdown", "naive")):
            scenarios = [[(fmean(c[window]), fmean(c["alone"])) for c in run["windows_ms"]] for run in chosen]
            summary[prefix + name], summary[f"{prefix}{name}_ci95"] = pooled_ratio_with_ci95(scenarios)
        for key in ("harvest", "fill", "overrun_us_p99", "resume_us_p50"):
            found = [run[key] for run in chosen if run[key] is not None]
            summary[prefix + key] = median(found) if found else None
    for run in runs:
        summary |= {f"{key}_{run['scenario']}": run[key] for key in ("slowdown", "harvest")}
    return summary


if __name__ == "__main__":
    main()
