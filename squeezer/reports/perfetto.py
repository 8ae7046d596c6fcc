"""Writes a part of a recorded run as a trace that Perfetto and chrome://tracing open."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ds_hooks.shared.private_file import write_text
from squeezer.records.layout import trace_path
from squeezer.records.reader import RankRun, ReportError, StepTime, load_run
from squeezer.reports.metrics import mean_over_ranks

TRACKS = ("steps", "instructions", "bubbles", "side task")


def _choose_steps(steps: Sequence[StepTime], most: int) -> Sequence[StepTime]:
    """Up to `most` steps of one job around the change between squeezed and alone that is nearest the middle."""

    def same_job(i: int) -> bool:
        return steps[i - 1].job == steps[i].job

    middle = len(steps) // 2
    changes = [i for i in range(1, len(steps)) if same_job(i) and steps[i - 1].squeezed != steps[i].squeezed]
    centre = min(changes, key=lambda i: abs(i - middle), default=middle)
    first, last = centre, centre + 1
    while first > 0 and same_job(first):
        first -= 1
    while last < len(steps) and same_job(last):
        last += 1
    begin = max(first, min(centre - most // 2, last - most))
    return steps[begin : min(last, begin + most)]


def _events(rank: RankRun, tid: int) -> Iterator[tuple[int, int, str, dict[str, Any]]]:
    """(start_ns, end_ns, name, args) of everything in one track."""
    if TRACKS[tid] == "steps":
        for s in rank.records["step"]:
            args = {"job": s["job"], "step": s["step"], "squeezed": s["squeezed"]}
            yield s["start_ns"], s["end_ns"], f"step {s['step']}{' squeezed' if s['squeezed'] else ''}", args
    elif TRACKS[tid] == "instructions":
        for record in rank.records["instructions"]:
            for kind, slot, start_ns, end_ns in record["items"]:
                yield start_ns, end_ns, kind.lower(), {"slot": slot}
    elif TRACKS[tid] == "bubbles":
        for b in rank.records["bubble"]:
            forecast_ms = None if b["forecast_ns"] is None else [ns / 1e6 for ns in b["forecast_ns"]]
            wait = b["wait"].lower()
            permitted = b["permit_until_ns"] is not None
            args = {"slot": b["slot"], "wait": wait, "forecast_ms": forecast_ms, "permitted": permitted}
            args |= {"side_us": b["side_ns"] / 1e3, "overrun_us": (b["overrun_ns"] or 0) / 1e3}
            yield b["start_ns"], b["end_ns"], wait, args
    else:
        for start_ns, wall_ns, cpu_ns, unit, group in rank.units.tolist():
            trials = rank.groups[group]["trials"] if group < len(rank.groups) else None
            name = rank.unit_name(group, unit)
            yield start_ns, start_ns + wall_ns, name, {"trials": trials, "cpu_us": cpu_ns / 1e3}


def _without_overlap(spans: Iterable[tuple[int, int, str, dict[str, Any]]]) -> Iterator[tuple[int, int, str, Any]]:
    """Events end where the next begins: viewers drop or nest what overlaps within a track."""
    ordered = sorted(spans, key=lambda span: span[:2])
    for (start_ns, end_ns, name, args), following in zip_longest(ordered, ordered[1:]):
        yield start_ns, end_ns if following is None else min(end_ns, following[0]), name, args


def write_trace(run: Path, most_steps: int = 40) -> Path:
    """Write ``trace.json`` in `run`: a process per rank, with tracks and the guard's decisions as instants.

    Args:
        run: directory of a recorded run.
        most_steps: the number of consecutive steps to show. All ranks show the same time.

    Raises:
        ReportError: no records, or no step in them.
    """
    ranks = load_run(run)
    chosen = _choose_steps(mean_over_ranks([rank.step_times(detailed=True) for rank in ranks]), most_steps)
    if not chosen:
        raise ReportError(f"{run}: no step is recorded; a trace needs at least one")
    from_ns, to_ns = min(s.start_ns for s in chosen), max(s.end_ns for s in chosen)
    events: list[dict[str, Any]] = []
    for rank in ranks:
        stage = rank.records["job"][-1] if rank.records["job"] else {"stage": "?", "stages": "?"}
        name = f"rank {rank.rank} · stage {stage['stage']} of {stage['stages']}"
        events.append(_metadata("process_name", rank.rank, 0, name=name))
        events.append(_metadata("process_sort_index", rank.rank, 0, sort_index=rank.rank))
        for tid, track in enumerate(TRACKS):
            events.append(_metadata("thread_name", rank.rank, tid, name=track))
            events.append(_metadata("thread_sort_index", rank.rank, tid, sort_index=tid))
            # by its middle, so that neither the step before nor the one after comes in by a few microseconds
            shown = (span for span in _events(rank, tid) if from_ns <= (span[0] + span[1]) // 2 <= to_ns)
            events += [
                {"ph": "X", "pid": rank.rank, "tid": tid, "ts": a, "dur": (b - a) / 1e3, "name": label, "args": args}
                for a, b, label, args in _without_overlap(shown)
            ]
        events += [
            {"ph": "i", "s": "p", "pid": rank.rank, "tid": 0, "ts": d["t_ns"], "name": f"guard: {d['what']}", "args": d}
            for d in rank.records["guard"]
            if from_ns <= d["t_ns"] <= to_ns
        ]
    earliest_ns = min(event["ts"] for event in events if event["ph"] == "X")
    for event in events:
        if event["ph"] != "M":
            event["ts"] = (event["ts"] - earliest_ns) / 1e3
    path = trace_path(run)
    write_text(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
    return path


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0.0, "dur": 0.0, "name": kind, "args": args}
