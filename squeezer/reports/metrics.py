"""The figures of a recorded run: pure functions over plain data. `docs/report.md` defines each figure.

`Tally` holds the sums and samples that ranks can be added up by, so one function serves a rank and the whole run.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from squeezer.policy.slowdown import Pair, estimate, pairs_of
from squeezer.records.reader import StepTime
from squeezer.reports.student_t import t_quantile_975

WARM_UP_STEPS = 2
STEPS_FOR_P99 = 100


def mean_over_ranks(ranks: Sequence[Sequence[StepTime]]) -> list[StepTime]:
    """Merge the ranks' steps: equal numbers that overlap in time are one step, with the mean duration.

    Time decides, not the job's index, which changes on a rank when its daemon restarts. A step is squeezed if any rank
    squeezed it, since one slow rank slows its peers, and alone if every rank was.
    """
    by_number = sorted((step for rank in ranks for step in rank), key=lambda s: (s.step, s.start_ns))
    merged: list[list[StepTime]] = []
    for step in by_number:
        last = merged[-1] if merged else []
        if last and last[0].step == step.step and step.start_ns < max(s.end_ns for s in last):
            last.append(step)
        else:
            merged.append([step])
    means = []
    for same in merged:
        start_ns, end_ns = min(s.start_ns for s in same), max(s.end_ns for s in same)
        duration_ns = sum(s.duration_ns for s in same) / len(same)
        present = tuple(sorted(rank for s in same for rank in s.ranks))
        job = min(same, key=lambda s: s.ranks).job
        labels = {s.squeezed for s in same}
        squeezed = True if True in labels else None if None in labels else False
        means.append(StepTime(job, same[0].step, squeezed, start_ns, end_ns, duration_ns, present))
    return sorted(means, key=lambda s: s.start_ns)


def main_figures(steps: Sequence[StepTime]) -> dict[str, Any]:
    """Step times and the slowdown, by the guard's own estimator (`squeezer.policy.slowdown`).

    The two step times are made of its comparisons, so their ratio is the slowdown. Plain means over all steps would
    differ from it, even in sign, when the machine's speed drifts. Without a comparison they are plain means.
    """
    counting = list(_without_warm_up(steps))
    # a mean over other ranks (one lost a message) is no neighbour
    groups = [list(group) for _, group in groupby(counting, key=lambda s: (s.job, s.ranks))]
    pairs = [pair for group in groups for pair in pairs_of((s.step, s.duration_ns / 1e6, s.squeezed) for s in group)]
    alone_ms, squeezed_ms = ([s.duration_ns / 1e6 for s in counting if s.squeezed is of] for of in (False, True))
    return {
        "steps": len(steps),
        "squeezed_share": _mean_or_none([float(step.squeezed is True) for step in steps]),
        "alone_share": _mean_or_none([float(step.squeezed is False) for step in steps]),
        "step_ms_alone": _mean_or_none(alone_ms),
        "step_ms_squeezed": _mean_or_none(squeezed_ms),
        "p99_slowdown": _quantile_ratio(squeezed_ms, alone_ms),
        **slowdown_figures(pairs),
    }


def _without_warm_up(steps: Iterable[StepTime]) -> Iterator[StepTime]:
    seen: Counter[int] = Counter()
    for step in steps:
        seen[step.job] += 1
        if seen[step.job] > WARM_UP_STEPS:
            yield step


def slowdown_figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The slowdown by comparisons in ms: with its interval, their number, and the two step times that it is made of."""
    if not pairs:
        return {"slowdown": None, "slowdown_ci95": None, "slowdown_pairs": 0, "slowdown_detected": None}
    count = len(pairs)
    mean, deviation = estimate(pair.log_ratio for pair in pairs)
    half = t_quantile_975(count - 1) * deviation / math.sqrt(count) if count > 1 else None
    interval = None if half is None else [math.expm1(mean - half), math.expm1(mean + half)]
    alone_ms = math.exp(_mean([math.log(pair.alone) for pair in pairs]))
    squeezed_ms = alone_ms * math.exp(mean)
    return {
        "step_ms_alone": alone_ms,
        "step_ms_squeezed": squeezed_ms,
        "slowdown": squeezed_ms / alone_ms - 1,  # of these very numbers, so that rounding cannot turn its sign
        "slowdown_ci95": interval,
        "slowdown_pairs": count,
        "slowdown_detected": None if interval is None else interval[0] > 0,
    }


class Resumes(NamedTuple):
    """When the side task's units ran in each bubble, one entry per bubble."""

    resume_ns: NDArray[np.int64]
    """Bubble start to the first unit that starts in it; -1 if none does, or if a stopped one continues."""
    ran: NDArray[np.bool_]
    """Whether any unit ran in it, started there or before."""


def resumes(start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], units: NDArray[Any]) -> Resumes:
    """Find the first unit of every bubble.

    Args:
        start_ns: each bubble's start, in order; bubbles do not overlap.
        end_ns: each bubble's end.
        units: `UNIT_DTYPE`, in order of start.
    """
    begin = units["start_ns"].astype(np.int64)
    until = np.maximum.accumulate(begin + units["wall_ns"]) if len(units) else begin
    first = np.searchsorted(begin, start_ns, "left")
    after = np.searchsorted(begin, end_ns, "left")
    starts_here = after > first
    found = np.append(begin, 0)[first]
    goes_on = np.append(-1, until)[first] > start_ns
    # when a stopped unit continued is unknown, so its rest begins with the bubble
    starts_anew = starts_here & (found > start_ns)
    return Resumes(np.where(starts_anew, found - start_ns, -1), starts_here | goes_on)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotFigures:
    """The bubbles of one slot in squeezed steps. An error is (length - forecast) ÷ length; positive: it was longer."""

    slot: int
    wait: str
    count: int
    ms_p50: float
    ms_min: float
    """The shortest: what the wait takes when its peer is ready, so transfer. The rest of a length is idle time."""
    forecast_ms_p50: float | None
    forecast_error_p50: float | None
    forecast_error_p90: float | None
    """Of the error's absolute value."""
    in_range: float | None
    """The share of lengths between the forecast's low and high; 0.8 if it says truly how sure it is."""
    opened: float
    """The share that was opened."""
    fill: float


def slot_figures(bubbles: Iterable[Mapping[str, Any]]) -> list[SlotFigures]:
    """Figures per slot from the records of bubbles, by slot."""
    by_slot: dict[int, list[Mapping[str, Any]]] = {}
    for bubble in bubbles:
        if bubble["squeezed"]:
            by_slot.setdefault(bubble["slot"], []).append(bubble)
    return [_slot_figures(slot, by_slot[slot]) for slot in sorted(by_slot)]


def _slot_figures(slot: int, bubbles: Sequence[Mapping[str, Any]]) -> SlotFigures:
    lengths = np.array([b["end_ns"] - b["start_ns"] for b in bubbles], np.float64)
    known = np.array([b["forecast_ns"] is not None for b in bubbles], bool)
    forecasts = np.array([b["forecast_ns"] for b in bubbles if b["forecast_ns"] is not None], np.float64).reshape(-1, 3)
    length, low, high = np.maximum(lengths[known], 1), forecasts[:, 1], forecasts[:, 2]
    errors = (length - forecasts[:, 0]) / length
    any_known = bool(known.any())
    return SlotFigures(
        slot=slot,
        wait=bubbles[0]["wait"],
        count=len(bubbles),
        ms_p50=float(np.median(lengths)) / 1e6,
        ms_min=float(lengths.min()) / 1e6,
        forecast_ms_p50=float(np.median(forecasts[:, 0])) / 1e6 if any_known else None,
        forecast_error_p50=float(np.median(errors)) if any_known else None,
        forecast_error_p90=float(np.percentile(np.abs(errors), 90)) if any_known else None,
        in_range=float(((low <= length) & (length <= high)).mean()) if any_known else None,
        opened=sum(b["permit_until_ns"] is not None for b in bubbles) / len(bubbles),
        fill=sum(b["side_ns"] for b in bubbles) / max(1.0, float(lengths.sum())),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """Sums and samples of one rank, or of several. `capacity` is a dedicated device's work in these bubbles."""

    steps: int
    step_ns: int
    wait_count: Counter[str]
    wait_ns: Counter[str]
    squeezed_bubble_ns: int
    busy_ns: float
    work: float
    capacity: float
    overrun_us: NDArray[np.float64]
    resume_us: NDArray[np.float64]
    units: int
    restarts: int
    faults: dict[str, int | None]


def pool(tallies: Sequence[Tally]) -> Tally:
    """One tally of all ranks: sums of sums, all samples; a count that is unknown on one rank is unknown."""
    faults: dict[str, int | None] = {}
    for key in tallies[0].faults:
        known = [count for t in tallies if (count := t.faults[key]) is not None]
        faults[key] = sum(known) if len(known) == len(tallies) else None
    return Tally(
        steps=sum(t.steps for t in tallies),
        step_ns=sum(t.step_ns for t in tallies),
        wait_count=sum((t.wait_count for t in tallies), Counter()),
        wait_ns=sum((t.wait_ns for t in tallies), Counter()),
        squeezed_bubble_ns=sum(t.squeezed_bubble_ns for t in tallies),
        busy_ns=sum(t.busy_ns for t in tallies),
        work=sum(t.work for t in tallies),
        capacity=sum(t.capacity for t in tallies),
        overrun_us=np.concatenate([t.overrun_us for t in tallies]),
        resume_us=np.concatenate([t.resume_us for t in tallies]),
        units=sum(t.units for t in tallies),
        restarts=sum(t.restarts for t in tallies),
        faults=faults,
    )


def _quantile_ratio(squeezed_ms: Sequence[float], alone_ms: Sequence[float]) -> float | None:
    """The 99th percentile of squeezed steps ÷ that of alone ones, less 1; None below 100 of each, which it needs."""
    if min(len(squeezed_ms), len(alone_ms)) < STEPS_FOR_P99:
        return None
    return float(np.percentile(squeezed_ms, 99) / np.percentile(alone_ms, 99)) - 1


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_or_none(values: Sequence[float]) -> float | None:
    return _mean(values) if values else None
