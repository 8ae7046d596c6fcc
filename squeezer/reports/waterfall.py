"""Yield: what the bubbles of a run gave, against a dedicated device with full rows; and what the rest of them went to.

All are shares of bubble time, over the whole run. The daemon counts the bubbles (`squeezer.daemon.bubble_accounts`),
and the side task its own time. They add up to 1 as far as the main job's clock and the side task's agree. The
dedicated rate is measured after the job, with many trials and with few. A straight line through both times of a step
shows how long a dedicated device would take for steps with empty rows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from squeezer.records.reader import RankRun

MEANINGS = {
    "starting": "the side task was starting: imports, compilation, a rehearsal",
    "alone": "steps were left alone, to learn their bubbles and to compare",
    "guard": "the guard had the gate shut",
    "unopened": "slots were not opened: too short, or of a kind that stays shut",
    "main_job": "the main job itself computed: it copied what it had waited for",
    "resume_and_tail": "it resumed, nothing fitted into a bubble's end, or others ran",
    "search": "there was no trial to train",
    "other_work": "it evaluated, built, saved and audited trials",
    "empty_rows": "it trained fewer trials than fit",
    "colder": "training took longer than on a dedicated device",
    "lost": "work of a process that died was lost",
    "ended": "there was no side task",
    "overrun": "work that ran on after bubbles; included above, so it is subtracted here",
}
"""Share -> what the bubbles went to."""

NAMES = {
    "starting": "starting",
    "alone": "steps left alone",
    "guard": "guard",
    "unopened": "short bubbles",
    "main_job": "main job's own work",
    "resume_and_tail": "resuming and tails",
    "search": "no trial",
    "other_work": "evaluation and the like",
    "empty_rows": "empty rows",
    "colder": "slower training",
    "lost": "lost work",
    "ended": "no side task",
    "overrun": "overrun",
}
"""The same in few words."""

_COUNTED = {
    "starting": "starting_ns",
    "alone": "alone_ns",
    "guard": "guard_ns",
    "unopened": "unopened_ns",
    "main_job": "main_ns",
    "search": "search_ns",
    "ended": "ended_ns",
}
_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Spent:
    """Bubble time of one rank, or of several, in ns.

    Attributes:
        bubble_ns: all of it.
        useful_ns: what a dedicated device with full rows would take for what was trained and kept; None: its rate is
            not known.
        shares_ns: what the rest went to, by the names of `MEANINGS`. What needs the dedicated rate is missing with it.
    """

    bubble_ns: float
    useful_ns: float | None
    shares_ns: Mapping[str, float]


def spent(rank: RankRun) -> Spent:
    """Add up one rank's records."""
    sums: Counter[str] = Counter()
    for record in rank.records["bubble_time"]:
        sums.update({key: value for key, value in record.items() if key not in ("r", "t_ns")})
    busy_ns, lost_ns, training_ns = (sums[key] * _NS_PER_MS for key in ("busy_ms", "lost_ms", "training_ms"))
    shares_ns = {name: float(sums[key]) for name, key in _COUNTED.items()}
    shares_ns["overrun"] = -float(sums["overrun_ns"])
    shares_ns["resume_and_tail"] = float(sums["unused_ns"])
    if sums["unmeasured_ns"]:  # the main job's host does not see what the side task uses there
        shares_ns["resume_and_tail"] += sums["unmeasured_ns"] - (busy_ns + lost_ns - sums["overrun_ns"])
    shares_ns["other_work"] = busy_ns - training_ns
    rates = [end["dedicated"] for end in rank.records["end"] if end["dedicated"]]
    if not rates:
        return Spent(float(sums["bubble_ns"]), None, shares_ns)
    full_ns, dedicated_ns = _dedicated_ns(rates[-1], sums["samples"], sums["work"])
    kept = max(0.0, 1 - sums["lost_work"] / sums["work"]) if sums["work"] else 1.0
    shares_ns["empty_rows"] = dedicated_ns - full_ns
    shares_ns["colder"] = training_ns - dedicated_ns
    shares_ns["lost"] = full_ns * (1 - kept) + lost_ns
    return Spent(float(sums["bubble_ns"]), full_ns * kept, shares_ns)


def _dedicated_ns(rates: Mapping[str, float], samples: float, work: float) -> tuple[float, float]:
    """How long a dedicated device would take for that work: with full rows, and with the rows that there were.

    Args:
        rates: in trial-samples per second, of many trials and of few; see `trials.training.rehearsal`.
        samples: of the batches, each counted once.
        work: in trial-samples.
    """
    many, few = rates["trials"], rates["few_trials"]
    many_s, few_s = many / rates["work_per_s"], few / rates["few_work_per_s"]  # for one sample of a batch
    per_trial_s = (many_s - few_s) / (many - few) if many > few else many_s / many
    per_trial_s = min(max(per_trial_s, 0.0), many_s / many)  # a line with neither end below zero
    per_sample_s = many_s - many * per_trial_s
    return work * many_s / many * 1e9, (samples * per_sample_s + work * per_trial_s) * 1e9


def waterfall_figures(ranks: Sequence[Spent]) -> dict[str, Any]:
    """``yield`` and ``waterfall`` of these ranks together, as shares of their bubble time; None: unknown."""
    bubble_ns = sum(rank.bubble_ns for rank in ranks)
    if not bubble_ns:
        return {"yield": None, "waterfall": dict.fromkeys(MEANINGS)}
    useful_ns = [rank.useful_ns for rank in ranks if rank.useful_ns is not None]
    known = {name: [rank.shares_ns[name] for rank in ranks if name in rank.shares_ns] for name in MEANINGS}
    return {
        "yield": sum(useful_ns) / bubble_ns if len(useful_ns) == len(ranks) else None,
        "waterfall": {
            name: sum(each_ns) / bubble_ns if len(each_ns) == len(ranks) else None for name, each_ns in known.items()
        },
    }


def largest(side: Mapping[str, Any], least: float = 0.005) -> list[tuple[str, float]]:
    """The shares of at least `least`, the largest first.

    Args:
        side: that of a report.
        least: as a share of bubble time.
    """
    known = [(name, share) for name, share in side["waterfall"].items() if share is not None and abs(share) >= least]
    return sorted(known, key=lambda item: -item[1])


def waterfall_lines(side: Mapping[str, Any]) -> list[str]:
    """One line for the yield and one for each share of at least half a percent."""
    if side["yield"] is None:
        first = "Yield       unknown: no dedicated rate to compare with. Bubble time went to:"
    else:
        first = f"Yield       {_percent(side['yield'])} of bubble time, as a dedicated device with full rows; the rest:"
    return [first, *(f"            {_percent(share):>6}  {MEANINGS[name]}" for name, share in largest(side))]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
