"""Cost of squeezing in every 50 steps of a guarded run after the first 10 of its disturbance.

A step counts as a share of what the ghosts' model says of that very step, so jitter, a stall or another batch size is
no noise. What remains is due to the machine and the side task.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, variance
from typing import Any

from squeezer.policy.margins import RECENT_STEPS
from squeezer.reports.student_t import t_quantile_975

LEFT_OUT_STEPS = 10
LEAST_STEPS, FEW_STEPS = 4, 8
PLACEBO_SHARE = 3
"""The last third of each squeezed window passes for a window alone, as long as those of the benchmark are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardedStep:
    """One step of the main job.

    Attributes:
        step: its number, from 1.
        squeezed: as in the records: False is alone, None closed by the guard.
        carries_over: the first of a window of more than two steps: it still feels the window before it.
        ms: its time.
        modelled_ms: its time in the ghosts' model.
        work: trial-samples done in it.
        bubble_ms: all its bubbles.
        side_ms: the side task's CPU time in them.
        overrun_ms: the side task's CPU time after bubbles' ends.
    """

    step: int
    squeezed: bool | None
    carries_over: bool
    ms: float
    modelled_ms: float
    work: int
    bubble_ms: float
    side_ms: float
    overrun_ms: float

    @property
    def ratio(self) -> float:
        """Its length as a share of the model's."""
        return self.ms / self.modelled_ms


def guarded_steps(
    records: Mapping[str, Sequence[Mapping[str, Any]]], modelled_ms: Sequence[float]
) -> list[GuardedStep]:
    """All steps of one rank's records."""
    bubble_ms, side_ms, overrun_ms = (defaultdict[int, float](float) for _ in range(3))
    for bubble in records["bubble"]:
        step = bubble["step"]
        bubble_ms[step] += (bubble["end_ns"] - bubble["start_ns"]) / 1e6
        side_ms[step] += bubble["side_ns"] / 1e6
        if bubble["permit_until_ns"] is not None:
            overrun_ms[step] += (bubble["overrun_ns"] or 0) / 1e6
    found = []
    work = 0
    for squeezed, window in groupby(records["step"], key=lambda record: record["squeezed"]):
        own = list(window)
        for at, record in enumerate(own):
            found.append(
                GuardedStep(
                    step=record["step"],
                    squeezed=squeezed,
                    carries_over=at == 0 and len(own) > 2,
                    ms=(record["end_ns"] - record["start_ns"]) / 1e6,
                    modelled_ms=modelled_ms[record["step"] - 1],
                    work=record["work"] - work,
                    bubble_ms=bubble_ms[record["step"]],
                    side_ms=side_ms[record["step"]],
                    overrun_ms=overrun_ms[record["step"]],
                )
            )
            work = record["work"]
    return found


def interval_cost(steps: Sequence[GuardedStep]) -> dict[str, Any] | None:
    """What squeezing cost the main job in these steps; None with too few alone steps.

    `cost` is a share of all their time: the squeezed steps' slowdown × their share.
    """
    squeezed = [s.ratio for s in steps if s.squeezed and not s.carries_over]
    without = [s.ratio for s in steps if not s.squeezed and not s.carries_over]
    share = sum(bool(s.squeezed) for s in steps) / len(steps)
    figures = {"first_step": steps[0].step, "squeezed_share": share}
    figures["overrun_share"] = sum(s.overrun_ms for s in steps) / sum(s.ms for s in steps)
    if not share:
        return {**figures, "slowdown": 0.0, "cost": 0.0, "cost_ci95": [0.0, 0.0]}
    if len(squeezed) < 2 or len(without) < LEAST_STEPS:
        return None
    slowdown, half = _welch(squeezed, without)
    ci95 = [share * (slowdown - half), share * (slowdown + half)]
    return {**figures, "slowdown": slowdown, "cost": share * slowdown, "cost_ci95": ci95}


def _welch(squeezed: Sequence[float], without: Sequence[float]) -> tuple[float, float]:
    """(relative difference of the means, half of its 95% interval)."""
    ratio = fmean(squeezed) / fmean(without)
    own, other = (variance(each) / fmean(each) ** 2 for each in (squeezed, without))
    # a few steps show their own noise badly; it is no less than that of the others
    parts = [max(own, other if len(squeezed) < FEW_STEPS else 0.0) / len(squeezed), other / len(without)]
    if not sum(parts):
        return ratio - 1, 0.0
    counts = (len(squeezed), len(without))
    degrees = sum(parts) ** 2 / sum(part**2 / (n - 1) for part, n in zip(parts, counts, strict=True))
    return ratio - 1, ratio * t_quantile_975(max(1, int(degrees))) * math.sqrt(sum(parts))


def judge(steps: Sequence[GuardedStep], disturbed_step: int, budget: float) -> dict[str, Any]:
    """Judge every interval of 50 steps after the first 10 of the disturbance, and find the worst.

    The budget counts as broken in an interval if the 95% interval of its cost lies above it.
    """
    later = [s for s in steps if s.step >= disturbed_step + LEFT_OUT_STEPS]
    found = [interval_cost(later[at : at + RECENT_STEPS]) for at in range(len(later) - RECENT_STEPS + 1)]
    known = [cost for cost in found if cost is not None]
    if not known:
        raise ValueError(f"{len(later)} steps after the disturbance: more than {RECENT_STEPS} are needed")
    broken = [cost for cost in known if cost["cost_ci95"][0] > budget]
    return {
        "intervals": len(known),
        "intervals_not_known": len(found) - len(known),
        "intervals_broken": len(broken),
        "held": not broken,
        "worst": max(known, key=lambda cost: cost["cost"]),
        "worst_overrun_share": max(cost["overrun_share"] for cost in known),
        "over_all": interval_cost(later),
    }


def placebo(run: Mapping[str, Any]) -> dict[str, Any]:
    """What `judge` finds where there is nothing to find: a third of the squeezed steps passes for alone steps.

    The two can differ by noise only, so this is how often noise makes the budget seem broken.

    Args:
        run: the result of a guarded run.
    """
    columns = run["steps"]
    numbered = zip(columns["squeezed"], columns["ms"], columns["modelled_ms"], strict=True)
    nothing = {"work": 0, "bubble_ms": 0.0, "side_ms": 0.0, "overrun_ms": 0.0}
    made = []
    for squeezed, window in groupby(enumerate(numbered, start=1), key=lambda item: item[1][0]):
        own = list(window) if squeezed else []
        first_alone = len(own) - len(own) // PLACEBO_SHARE
        for at, (step, (_, ms, modelled_ms)) in enumerate(own):
            first = at in (0, first_alone) and len(own) > 2
            times = {"ms": ms, "modelled_ms": modelled_ms, **nothing}
            made.append(GuardedStep(step=step, squeezed=at < first_alone, carries_over=first, **times))
    return judge(made, run["disturbed_step"], run["budget"])


def harvests(steps: Sequence[GuardedStep], disturbed_step: int, until_step: int, per_ms: float) -> dict[str, Any]:
    """Harvest and fill of squeezed steps, and the share of steps that were squeezed, before the disturbance and later.

    Args:
        steps: all.
        disturbed_step: the first that is disturbed.
        until_step: the first that is disturbed no more. The last 60 steps come after it, or at the end of a lasting
            disturbance.
        per_ms: trial-samples per ms of a dedicated device.
    """
    before = [s for s in steps if s.step < disturbed_step]
    parts = {
        "before": before[len(before) // 3 :],  # not while the side task builds its trials
        "first_10": [s for s in steps if disturbed_step <= s.step < disturbed_step + LEFT_OUT_STEPS],
        "disturbed": [s for s in steps if disturbed_step + LEFT_OUT_STEPS <= s.step < until_step],
        "last_60": steps[-60:],
    }
    return {name: _harvest(part, per_ms) for name, part in parts.items() if part}


def _harvest(steps: Sequence[GuardedStep], per_ms: float) -> dict[str, float | None]:
    own = [s for s in steps if s.squeezed and not s.carries_over]
    bubble_ms = sum(s.bubble_ms for s in own)
    return {
        "squeezed_share": sum(bool(s.squeezed) for s in steps) / len(steps),
        "harvest": sum(s.work for s in own) / (per_ms * bubble_ms) if bubble_ms else None,
        "fill": sum(s.side_ms for s in own) / bubble_ms if bubble_ms else None,
    }
