"""Prints the figures on speed of README.md and docs/benchmarks.md, recomputed from benchmarks/results/.

It measures nothing. A test compares the tables in the documents with this output.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, variance
from typing import Any

from benchmarks import bubble_utilization, fusion, ghost_twins, real_jobs
from benchmarks.shared.fusion_baselines import ALONE as ONE_AFTER_ANOTHER
from benchmarks.shared.fusion_baselines import FUSED, FUSED_ADAMW, PROCESSES, VMAP
from benchmarks.shared.intervals import ratio_with_ci95
from benchmarks.shared.paths import RESULTS
from benchmarks.utilization import figures as utilization
from benchmarks.windows.modes import IDLE, NICENESS_19, PREEMPTIVE, SCHED_IDLE
from squeezer.reports.student_t import t_quantile_975

HOOKED = {"real_two_ranks": "real job", "ghost_4_0_4": "first of 4 stages", "ghost_4_1_4": "second of 4 stages"}
SMALL_MLP = "mlp_32"
MEANS = "÷ one trial after another; with `AdamW(fused=True)`; by `vmap`; in K processes on one core"
"""What the geometric means of the gains by fusing are ratios to, in order."""
FUSION_COLUMNS = {
    ONE_AFTER_ANOTHER: "over one after another (95% CI)",
    FUSED_ADAMW: "the same, `AdamW(fused=True)`",
    VMAP: "over `vmap`",
    PROCESSES: "over K processes",
}
"""Baseline -> the head of its column."""
REAL_JOBS = {"pretrain": "a Transformer, `examples/pretrain.py`", "denoise": "convolutions, `examples/denoise.py`"}
REAL_JOB_ROWS = {
    "slowdown, against cores that are kept awake": "slowdown",
    "the same, against cores that sleep, as in a report": "slowdown_from_asleep",
}
"""Row of the table -> the figure in the summary of `benchmarks.real_jobs`."""
REAL_JOB_YIELDS = {
    "yield, of all bubble time in runs of 500 steps with the defaults": "yield",
    "yield of 3,000 steps, beside trials that train ten times as long": "lasting",
}
REAL_JOB_PARTS = {
    'ours ÷ ours with `preemptive = "stop"`': "ours_over_stopped",
    'ours with "stop" ÷ cores that are kept awake': "stopped",
    'the gate: a placebo with "stop" that only spins ÷ cores that are kept awake': "gate",
    'the work: ours with "stop" ÷ that placebo': "work",
    "the caches: a placebo that runs through a buffer ÷ the one that only spins": "caches",
}
"""What the slowdown consists of."""
BASELINES = {
    "ours": IDLE,
    'ours, `preemptive = "stop"`': PREEMPTIVE,
    "the kernel's idle class, without a gate": SCHED_IDLE,
    "naive, at niceness 19": NICENESS_19,
}
"""Row of the table of a job beside baselines -> the mode."""


def main() -> None:
    """Print the tables."""
    real = raw_runs(real_jobs.NAME)
    real_tables = real_jobs_table(real), real_job_parts(real), real_job_baselines(real), real_job_waterfalls(real)
    ghosts = utilization.summary(raw_runs(bubble_utilization.NAME))
    ghost_tables = utilization.short_table(ghosts), utilization.table(ghosts)
    tables = *real_tables, short_table(), *ghost_tables, other_table(), twins_table()
    print(*tables, fusion_table(raw_runs("fusion")), sep="\n\n")


def raw_runs(benchmark: str) -> list[dict[str, Any]]:
    """The committed raw runs of a benchmark."""
    runs: list[dict[str, Any]] = json.loads((RESULTS / f"{benchmark}.json").read_text(encoding="utf-8"))["runs"]
    return runs


def real_jobs_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """What two real jobs pay and yield, in Markdown."""
    figures = real_jobs.summary(runs)
    lines = _real_job_lines(figures, REAL_JOB_ROWS)
    for name, key in REAL_JOB_YIELDS.items():
        cells = []
        for job in REAL_JOBS:
            if f"{job}_{key}" not in figures:
                cells.append("not measured")
                continue
            interval, about = figures[f"{job}_{key}_ci95"], "one run"
            if interval is not None:
                about = " to ".join(f"{100 * bound:.0f}" for bound in interval)
            cells.append(f"{100 * figures[f'{job}_{key}']:.0f}% ({about})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def real_job_parts(runs: Sequence[Mapping[str, Any]]) -> str:
    """What the slowdown of two real jobs consists of, in Markdown."""
    return "\n".join(_real_job_lines(real_jobs.summary(runs), REAL_JOB_PARTS))


def real_job_baselines(runs: Sequence[Mapping[str, Any]]) -> str:
    """What a real job pays beside ours and beside baselines, and how much they do, in Markdown."""
    figures = real_jobs.summary(runs)
    lines = ["| a Transformer (95% interval) | slowdown | harvest |", "|---|---|---|"]
    for title, mode in BASELINES.items():
        slowdown, harvest = (f"pretrain_baselines_{what}_{mode}" for what in ("slowdown", "harvest"))
        low, high = (_percent(bound, 1) for bound in figures[f"{slowdown}_ci95"])
        least, most = (f"{100 * bound:.0f}" for bound in figures[f"{harvest}_ci95"])
        done = f"{100 * figures[harvest]:.0f}% ({least} to {most})"
        lines.append(f"| {title} | {_percent(figures[slowdown], 1)} ({low} to {high}) | {done} |")
    return "\n".join(lines)


def real_job_waterfalls(runs: Sequence[Mapping[str, Any]]) -> str:
    """What became of the bubble time that real jobs' runs did not yield, in Markdown."""
    figures = real_jobs.summary(runs)
    titles = {"waterfall": "", "lasting_waterfall": ", 3,000 steps beside long trials"}
    of = {
        job_title + title: figures[f"{job}_{kind}"]
        for job, job_title in REAL_JOBS.items()
        for kind, title in titles.items()
        if f"{job}_{kind}" in figures
    }
    lines = [f"| not yielded | {' | '.join(of)} |", "|---" * (1 + len(of)) + "|"]
    for share in next(iter(of.values())):
        cells = (f"{waterfall[share]:.0%}".replace("-", "−") for waterfall in of.values())
        lines.append(f"| {share.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _real_job_lines(figures: Mapping[str, Any], rows: Mapping[str, str]) -> list[str]:
    lines = [f"| figure (95% interval) | {' | '.join(REAL_JOBS.values())} |", "|---" * (1 + len(REAL_JOBS)) + "|"]
    for name, key in rows.items():
        cells = []
        for job in REAL_JOBS:
            if f"{job}_{key}" not in figures:
                cells.append("not measured")
                continue
            low, high = (_percent(bound, 1) for bound in figures[f"{job}_{key}_ci95"])
            cells.append(f"{_percent(figures[f'{job}_{key}'], 1)} ({low} to {high})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def short_table() -> str:
    """What the README has of `other_table`."""
    hooks, *_, fused, _ = _other_figures()
    named = (("slowdown by the hooks alone, real job", hooks), (f"speed of fused trials, {MEANS}", fused))
    lines = ["| figure (95% interval) | value |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, (_, value, _) in named)])


def twins_table() -> str:
    """How near ghost stages come to real ones."""
    return ghost_twins.table(ghost_twins.summary(raw_runs(ghost_twins.NAME)))


def other_table() -> str:
    """Hooks alone, and fused training, in Markdown."""
    lines = ["| figure | value (95% CI) | measured by |", "|---|---|---|"]
    lines += [f"| {name} | {value} | `python -m benchmarks.{of}` |" for name, value, of in _other_figures()]
    return "\n".join(lines)


def _other_figures() -> Iterator[tuple[str, str, str]]:
    pairs_ms = {run["scenario"]: run["pairs_ms"] for run in raw_runs("hooks_overhead")}
    for scenario, name in HOOKED.items():
        slowdown, interval = ratio_with_ci95(pairs_ms[scenario])
        bounds = " to ".join(_percent(bound, 2) for bound in interval)
        yield f"hooks alone, {name}: slowdown", f"{_percent(slowdown, 2)} ({bounds})", "hooks_overhead"
    of = fusion.summary(raw_runs("fusion"))
    yield f"fused training {MEANS}: geometric mean of {of['models']} models at their best K", _means(of), "fusion"
    (small,) = (run for run in raw_runs("fusion") if run["scenario"] == SMALL_MLP)
    gain, (low, high) = over_own_single(small)
    yield "the most: a small MLP, against itself fused with K = 1", f"{gain:.0f}× ({low:.1f} to {high:.1f})", "fusion"


def _means(of: Mapping[str, Any]) -> str:
    against = ["geometric_mean", *(f"geometric_mean_over_{baseline}" for baseline in (FUSED_ADAMW, VMAP, PROCESSES))]
    return "; ".join(f"{of[key]:.1f}×" for key in against)


def fusion_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """What fusing gains over each baseline at each model's best K, with intervals, in Markdown."""
    heads = ["model, width", "K = 1", "K = 16", "best K", *FUSION_COLUMNS.values(), "MiB, fused / processes"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    summary = fusion.summary(runs)
    by_gain = sorted(summary["by_model"].items(), key=lambda item: -item[1][ONE_AFTER_ANOTHER])
    for model, of in by_gain:
        cells = [model, *(f"{of['speedup_by_k'][k]:.2f}" for k in ("1", "16")), str(of["best_k"])]
        cells += [_gain(of, baseline) for baseline in FUSION_COLUMNS]
        lines.append(f"| {' | '.join(cells)} | {of['fused_mib']:.0f} / {of['processes_mib']:.0f} |")
    means = [
        "geometric_mean",
        *(f"geometric_mean_over_{baseline}" for baseline in FUSION_COLUMNS if baseline != ONE_AFTER_ANOTHER),
    ]
    lines.append(f"| geometric mean | | | | {' | '.join(f'{summary[key]:.2f}' for key in means)} | |")
    return "\n".join(lines)


def _gain(of: Mapping[str, Any], baseline: str) -> str:
    if baseline not in of:
        return "cannot"
    low, high = of[f"{baseline}_ci95"]
    return f"{of[baseline]:.2f} ({low:.2f} to {high:.2f})"


def over_own_single(run: Mapping[str, Any]) -> tuple[float, tuple[float, float]]:
    """(speedup at the best K ÷ speedup at K = 1, its 95% interval): what fusing gains, without what else is faster.

    The fused code with K = 1 is not plain PyTorch: its optimizer, for one, is faster. Welch's interval, of log ratios.
    """
    best = fusion.best_k(run["by_k"])
    (single,) = (point for point in run["by_k"] if point["k"] == 1)
    samples = [
        [math.log(each[ONE_AFTER_ANOTHER] / each[FUSED]) for each in point["rounds_s"]] for point in (best, single)
    ]
    errors = [variance(sample) / len(sample) for sample in samples]
    degrees = sum(errors) ** 2 / sum(e**2 / (len(s) - 1) for e, s in zip(errors, samples, strict=True))
    middle, half = fmean(samples[0]) - fmean(samples[1]), t_quantile_975(int(degrees)) * math.sqrt(sum(errors))
    return math.exp(middle), (math.exp(middle - half), math.exp(middle + half))


def _percent(ratio: float, digits: int) -> str:
    return f"{100 * ratio + 0.0:+.{digits}f}%".replace("-", "−")


if __name__ == "__main__":
    main()
