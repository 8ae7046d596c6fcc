"""The report of a run: the cost to the main job and the gain of the side task. Keys: `docs/report.md`."""

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_hooks.shared.private_file import write_text
from squeezer.records.layout import report_path
from squeezer.records.reader import RankRun, load_run
from squeezer.records.reader import ReportError as ReportError
from squeezer.reports.audit import audit_figures, audit_text, mismatch_text
from squeezer.reports.control_groups import control_group_figures, control_group_text
from squeezer.reports.device import barred_figures, barred_text, device_figures, device_lines
from squeezer.reports.metrics import Tally, main_figures, mean_over_ranks, pool, resumes, slot_figures
from squeezer.reports.rows import row_figures, row_text
from squeezer.reports.slowdown import printed, verdict
from squeezer.reports.trials import TRIAL_STATES, trial_figures
from squeezer.reports.waterfall import spent, waterfall_figures, waterfall_lines

REPORT_VERSION = 3
WIDTH = 100


def build_report(run: Path) -> dict[str, Any]:
    """All figures of the run recorded in `run`.

    Raises:
        ReportError: no records, or of another version.
    """
    ranks = load_run(run)
    tallies = [_tally(rank) for rank in ranks]
    times = [spent(rank) for rank in ranks]
    steps = [rank.step_times() for rank in ranks]
    starved = [_starved(rank.records["side"]) for rank in ranks]
    audits = [rank.records["side"] for rank in ranks]
    per_rank = {}
    for rank, tally, own_steps, own_starved, time in zip(ranks, tallies, steps, starved, times, strict=True):
        job = rank.records["job"][-1] if rank.records["job"] else {}
        about = {"stage": job.get("stage"), "stages": job.get("stages"), "ended": bool(rank.records["end"])}
        main = main_figures(own_steps)
        per_rank[str(rank.rank)] = {
            **about,
            "main": main,
            "device": device_figures([rank], main),
            **_figures(tally, own_starved, audit_figures(rank.records["side"])),
            "guard": _guard(rank),
        }
        per_rank[str(rank.rank)]["side"] |= waterfall_figures([time]) | control_group_figures([rank.records["side"]])
        per_rank[str(rank.rank)]["side"] |= barred_figures([rank.records["side"]]) | row_figures([rank.records["side"]])
        per_rank[str(rank.rank)]["side"]["not_started"] = _not_started([rank.records["side"]])
        per_rank[str(rank.rank)]["bubbles"]["slots"] = [asdict(slot) for slot in slot_figures(rank.records["bubble"])]
    of_all = _figures(
        pool(tallies), [u for rank in starved for u in rank], audit_figures([s for a in audits for s in a])
    )
    of_all["side"] |= (
        waterfall_figures(times) | control_group_figures(audits) | barred_figures(audits) | row_figures(audits)
    )
    of_all["side"]["not_started"] = _not_started(audits)
    main = main_figures(mean_over_ranks(steps))
    return {
        "version": REPORT_VERSION,
        "main": main,
        "device": device_figures(ranks, main),
        **of_all,
        "trials": trial_figures(run, ranks),
        "ranks": per_rank,
        "missing": missing_ranks(ranks),
    }


def missing_ranks(ranks: Sequence[RankRun]) -> list[int]:
    """The ranks of the job that have no records here: other nodes have them."""
    jobs = [job for rank in ranks for job in rank.records["job"][-1:]]  # standing daemons name records by local ranks
    return sorted(set(range(max((job["world_size"] for job in jobs), default=0))) - {job["rank"] for job in jobs})


def write_report(run: Path) -> Path:
    """Write ``report.json`` in `run`."""
    path = report_path(run)
    write_text(path, json.dumps(build_report(run), indent=2) + "\n")
    return path


def main_report(run: Path, as_json: bool) -> int:
    """Print the report of `run`; returns the exit status.

    Raises:
        ReportError: as `build_report`; the command line prints it.
    """
    report = build_report(run)
    print(json.dumps(report, indent=2) if as_json else render(report))
    return 0


def _tally(rank: RankRun) -> Tally:
    records, units = rank.records, rank.units
    steps = rank.detailed_steps()
    known = {(s["job"], s["step"]) for s in steps}
    bubbles = sorted(records["bubble"], key=lambda b: b["start_ns"])
    wait_count: Counter[str] = Counter()
    wait_ns: Counter[str] = Counter()
    for b in bubbles:
        if (b["job"], b["step"]) in known:  # a step cut short by a fault has no step time to divide by
            wait_count[b["wait"]] += 1
            wait_ns[b["wait"]] += b["end_ns"] - b["start_ns"]
    start_ns, end_ns = (np.array([b[key] for b in bubbles], np.int64) for key in ("start_ns", "end_ns"))
    squeezed = np.array([b["squeezed"] for b in bubbles], bool)
    opened = np.array([b["permit_until_ns"] is not None for b in bubbles], bool)
    side = resumes(start_ns, end_ns, units)
    overruns = [b["overrun_ns"] / 1e3 for b, ran in zip(bubbles, side.ran, strict=True) if ran and _has_overrun(b)]
    bubble_ns = int((end_ns - start_ns)[squeezed].sum())
    rates = [end["dedicated"]["work_per_s"] for end in records["end"] if end["dedicated"]]
    started = sum(s["event"] == "started" for s in records["side"])
    turns = sum(s["event"] == "exited" and s["restarted"] and not s["status"] for s in records["side"])
    return Tally(
        steps=len(steps),
        step_ns=sum(s["end_ns"] - s["start_ns"] for s in steps),
        wait_count=wait_count,
        wait_ns=wait_ns,
        squeezed_bubble_ns=bubble_ns,
        busy_ns=sum(b["side_ns"] for b in bubbles if b["squeezed"]),
        work=_work(steps) if rates else 0.0,
        capacity=rates[-1] * bubble_ns / 1e9 if rates else 0.0,
        overrun_us=np.array(overruns, np.float64),
        resume_us=side.resume_ns[opened & (side.resume_ns >= 0)] / 1e3,
        units=int((units["unit"] >= 0).sum()),
        restarts=max(0, started - turns - 1),
        faults=_faults(records),
    )


def _guard(rank: RankRun) -> dict[str, Any]:
    decisions = rank.records["guard"]
    return {
        "decisions": len(decisions),
        "shut": sum(decision["what"] == "shut" for decision in decisions),
    }


def _has_overrun(bubble: Mapping[str, Any]) -> bool:
    """Whether the bubble was opened, and a next one shows its overrun."""
    return bubble["permit_until_ns"] is not None and bubble["overrun_ns"] is not None


def _work(steps: Sequence[Mapping[str, Any]]) -> float:
    """Trial-samples over all steps; a new page starts counting at 0."""
    counts = [step["work"] for step in steps]
    return float(sum(max(0, after - before) for before, after in pairwise(counts)))


def _faults(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, int | None]:
    ends = records["end"]
    counts: dict[str, int | None] = {
        key: sum(end[key] for end in ends) if ends else None  # a killed daemon took its counters along
        for key in ("lost_messages", "dropped_messages", "foreign_messages")
    }
    counts["hook_faults"] = sum("hook" in fault["what"].lower() for fault in records["fault"])
    counts["stops"] = sum(bubble["stopped"] for bubble in records["bubble"])
    return counts


def _starved(statuses: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The units longer than every bubble, in the order found."""
    keys = ("unit", "trials", "needs_ms", "longest_bubble_ms", "remedy")
    return [{key: line[key] for key in keys} for line in statuses if line["event"] == "starved"]


def _not_started(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Why bubbles were only observed, for some job or other."""
    return sorted({record["reason"] for rank in ranks for record in rank if record["event"] == "not_started"})


def _figures(t: Tally, starved: Sequence[Mapping[str, Any]], audit: Mapping[str, Any]) -> dict[str, Any]:
    by_kind = {
        wait.lower(): {
            "count_per_step": t.wait_count[wait] / t.steps,
            "ms_per_step": t.wait_ns[wait] / 1e6 / t.steps,
            "ratio": t.wait_ns[wait] / t.step_ns,
        }
        for wait in sorted(t.wait_count)
    }
    return {
        "bubbles": {
            "steps": t.steps,
            "ratio": sum(t.wait_ns.values()) / t.step_ns if t.step_ns else None,
            "by_kind": by_kind,
        },
        "side": {
            "fill": t.busy_ns / t.squeezed_bubble_ns if t.squeezed_bubble_ns else None,
            "harvest": t.work / t.capacity if t.capacity else None,
            "overrun_us": _percentiles(t.overrun_us),
            "resume_us": _percentiles(t.resume_us),
            "units": t.units,
            "restarts": t.restarts,
            "starved": list(starved),
            "audit": dict(audit),
        },
        "faults": t.faults,
    }


def _percentiles(sample: NDArray[np.float64]) -> dict[str, float | None]:
    return {f"p{p}": float(np.percentile(sample, p)) if len(sample) else None for p in (50, 99)}


def render(report: Mapping[str, Any]) -> str:
    """The report as text, at most 100 columns wide; what is unknown is "n/a"."""
    main, side, trials, ranks = report["main"], report["side"], report["trials"], report["ranks"]
    overrun, resume, faults = side["overrun_us"], side["resume_us"], report["faults"]
    times = printed(main)
    killed = [f"rank {rank}" for rank, of in ranks.items() if not of["ended"]]
    lines = [
        f"Main job    {main['steps']} steps on {len(ranks)} rank{'s' * (len(ranks) != 1)}: "
        f"{_ms(times.alone_ms)} alone, {_ms(times.squeezed_ms)} squeezed "
        f"({_percent(main['alone_share'], '.0f')} and {_percent(main['squeezed_share'], '.0f')} of the steps)",
        f"            {verdict(main)}",
        f"Bubbles     {_percent(report['bubbles']['ratio'])} of step time{_lately(report)}",
        *waterfall_lines(side),
        f"Side task   fill {_percent(side['fill'])}, harvest {_percent(side['harvest'])}; "
        f"{side['units']} units, {side['restarts']} restarts",
        f"            overrun p50 {_us(overrun['p50'])}, p99 {_us(overrun['p99'])}; "
        f"resume p50 {_us(resume['p50'])}, p99 {_us(resume['p99'])}",
    ]
    for reason in side["not_started"]:
        lines += _wrapped(f"not started: {reason}")
    lines += _wrapped(row_text(side)) + _wrapped(control_group_text(side)) + _wrapped(barred_text(side))
    for unit in side["starved"]:
        lines += _wrapped(
            f"longer than every bubble ({unit['longest_bubble_ms']:.1f} ms): {unit['unit']} of {unit['trials']}, "
            f"{unit['needs_ms']:.1f} ms: {'split' if unit['remedy'] == 'split' else 'not split'}"
        )
    lines += [f"Audit       {audit_text(side['audit'])}"]
    for found in side["audit"]["mismatches"]:
        lines += _wrapped(mismatch_text(found))
    lines += [
        f"Guard       shut {sum(of['guard']['shut'] for of in ranks.values())} times",
        *(f"{'' if number else 'Device':<12}{line}" for number, line in enumerate(device_lines(report["device"]))),
        "Trials      " + ", ".join(f"{_or_na(trials[k])} {k}" for k in TRIAL_STATES),
    ]
    lines += _wrapped(trials["problem"] or "")
    for name, study in trials["studies"].items():
        of_it = f" of {name}" if len(trials["studies"]) > 1 else ""
        if best := study["best"]:
            lines.append(f"            best{of_it}: trial {best['number']} with {best['value']:.6g}")
            lines += _wrapped("  ".join(f"{key}={_value(value)}" for key, value in best["params"].items()))
    lines.append("Faults      " + ", ".join(f"{_or_na(n)} {key.replace('_', ' ')}" for key, n in faults.items()))
    if killed:
        lines.append(f"            record not finished (still running, or killed): {', '.join(killed)}")
    if report["missing"]:
        lines.append(f"            no records here: {', '.join(f'rank {rank}' for rank in report['missing'])}")
    lines += ["", f"{'bubbles by wait':<20}{'per step':>10}{'ms per step':>13}{'of step time':>14}"]
    for kind, of in report["bubbles"]["by_kind"].items():
        row = f"{kind.replace('_', ' '):<20}{of['count_per_step']:>10.2f}{of['ms_per_step']:>13.2f}"
        lines.append(row + f"{_percent(of['ratio']):>14}")
    lines += ["", "               step ms                                            overrun µs      resume µs"]
    lines.append("rank stage   alone squeezed  slowdown bubbles   fill harvest      p50    p99    p50    p99    units")
    for rank, of in ranks.items():
        own, task = printed(of["main"]), of["side"]
        cells = [
            f"{rank:>4} {_or_na(of['stage']):>5} {own.alone_ms:>7} {own.squeezed_ms:>8} {own.slowdown:>9}",
            f"{_percent(of['bubbles']['ratio']):>7} {_percent(task['fill']):>6} {_percent(task['harvest']):>7}  ",
            *(f"{_number(task[key][p], 0):>6}" for key in ("overrun_us", "resume_us") for p in ("p50", "p99")),
            f"{task['units']:>8}",
        ]
        lines.append(" ".join(cells))
    return "\n".join(lines)


def _lately(report: Mapping[str, Any]) -> str:
    """The number of steps whose bubbles and units are kept, unless all are."""
    kept, recorded = (min(of[key]["steps"] for of in report["ranks"].values()) for key in ("bubbles", "main"))
    return "" if kept == recorded else f"; bubbles and units: the last {kept} steps"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * 12, subsequent_indent=" " * 12)


def _or_na(value: object) -> str:
    return "n/a" if value is None else str(value)


def _number(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def _ms(printed_ms: str) -> str:
    return printed_ms if printed_ms == "n/a" else f"{printed_ms} ms"


def _us(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0f} µs"


def _percent(value: float | None, form: str = ".1f") -> str:
    return "n/a" if value is None else f"{100 * value:{form}}%"


def _value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
