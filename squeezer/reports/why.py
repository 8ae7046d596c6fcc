"""`squeezer why RUN`: where the bubbles of a recorded run went, and why the guard decided as it did."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from squeezer.records.reader import RankRun, ReportError, load_run
from squeezer.reports.audit import audit_figures, audit_text
from squeezer.reports.metrics import SlotFigures, slot_figures
from squeezer.reports.waterfall import MEANINGS, spent, waterfall_figures, waterfall_lines

CAUSES = {
    "steps": "squeezed steps are longer than the steps beside them that were left alone",
    "gaps": "the time between steps is longer after squeezed ones than after those left alone beside them",
    "long_gaps": "evaluations and checkpoints take longer after squeezed steps than after those left alone",
    "overrun": "the side task used CPU time outside bubbles",
}

SHOWN_APART = ("r", "t_ns", "event")
"""Keys of a side task's record that stand before the others, or nowhere."""


def main_why(run: Path, number: int | None) -> int:
    """Print the account of one rank of `run`, or of all; returns the exit status.

    Raises:
        ReportError: as `load_run`; the command line prints it.
    """
    ranks = [rank for rank in load_run(run) if number in (None, rank.rank)]
    if not ranks:
        raise ReportError(f"{run}: no rank {number} in it")
    print("\n\n".join("\n".join(lines_of(rank)) for rank in ranks))
    return 0


def lines_of(rank: RankRun) -> Iterator[str]:
    """The account of one rank."""
    yield f"rank {rank.rank}"
    yield from _steps(rank)
    yield from ("  " + line for line in waterfall_lines(waterfall_figures([spent(rank)])))
    yield from _guard(rank)
    yield from _side(rank)
    yield from _slots(rank)


def _steps(rank: RankRun) -> Iterator[str]:
    steps = rank.records["step"]
    count = {label: sum(step["squeezed"] is label for step in steps) for label in (True, False, None)}
    yield (
        f"  steps       {len(steps)}: {count[True]} squeezed, {count[False]} left alone for comparison, "
        f"{count[None]} neither"
    )
    for label, same in groupby(steps, key=lambda step: step["squeezed"]):
        if label is None:
            numbers = [step["step"] for step in same]
            guarded = _is_guarded(rank, numbers[0])
            cause = MEANINGS["guard"] if guarded else "the side task was starting, or waited to"
            yield f"              {_span(numbers)}: {cause}"


def _is_guarded(rank: RankRun, step: int) -> bool:
    """Whether the guard's last decision before `step` was to shut the gate."""
    gate = [d["what"] for d in rank.records["guard"] if d["step"] < step and d["what"] in ("shut", "retry")]
    return bool(gate) and gate[-1] == "shut"


def _guard(rank: RankRun) -> Iterator[str]:
    guard = rank.records["run"][-1]["config"]["guard"]
    decisions = rank.records["guard"]
    if not guard["enabled"]:
        yield "  guard       switched off by the configuration"
        return
    shut = sum(decision["what"] == "shut" for decision in decisions)
    yield f"  guard       budget {guard['slowdown_budget']:.2%} of slowdown; shut {shut} time{'s' * (shut != 1)}"
    for decision in decisions:
        yield f"              step {decision['step']}: {sentence(decision)}"


def sentence(decision: Mapping[str, Any]) -> str:
    """A decision of the guard in words."""
    figures = decision["figures"]
    match decision["what"]:
        case "shut":
            return f"the gate is shut for {figures['for_steps']} steps: {CAUSES[decision['cause']]} ({_sure(figures)})"
        case "retry":
            return "squeezing is tried again, and judged anew"
    wider = "ends earlier" if decision["what"] == "widen" else "may end later again"
    return (
        f"in slot {figures['slot']} the permit {wider}: {figures['margin_ms']:.1f} ms before the forecast end "
        f"(overrun {figures['overrun_ms']:.2f} ms, recent mean {figures['mean_overrun_ms']:.2f} ms)"
    )


def _sure(figures: Mapping[str, Any]) -> str:
    if "overrun_share" in figures:
        return f"{figures['overrun_share']:.2%} of the last squeezed steps"
    return f"by {figures['slowdown']:.2%}, surely by {figures['at_least']:.2%}; {figures['pairs']} comparisons"


def _side(rank: RankRun) -> Iterator[str]:
    if rank.records["run"][-1]["config"].get("side") is None:
        yield "  side task   none is configured: bubbles are only observed"
        return
    begin_ns = rank.records["run"][0]["t_ns"]  # of the first daemon, where another has taken over
    for event in rank.records["side"]:
        if event["event"] == "audited":  # after every epoch: below, in one line
            continue
        rest = ", ".join(_said(key, value) for key, value in event.items() if key not in SHOWN_APART and value != "")
        name = event["event"].replace("_", " ")
        yield f"  side task   {(event['t_ns'] - begin_ns) / 1e9:6.1f} s: {name}{f' ({rest})' if rest else ''}"
    audits = audit_figures(rank.records["side"])
    if audits["audits"]:
        yield f"  audits      {audit_text(audits)}"


def _said(key: str, value: object) -> str:
    return f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"


def _slots(rank: RankRun) -> Iterator[str]:
    slots = slot_figures(rank.records["bubble"])
    if not slots:
        return
    squeeze = rank.records["run"][-1]["config"]["squeeze"]
    # earlier releases did not record it
    worth_ms = max((job.get("least_bubble_ns", 0) for job in rank.records["job"][-1:]), default=0) / 1e6
    lately = f" among the last {len(rank.detailed_steps())}" if rank.first_detailed else ""
    yield f"  bubbles of squeezed steps{lately}, by slot"
    errors = f"{'error p50':>10} {'error p90':>10}"
    yield f"  {'slot':>6} {'wait':<18}{'ms p50':>8} {'min':>7} {errors} {'opened':>7} {'fill':>6}"
    for slot in slots:
        errors = f"{_percent(slot.forecast_error_p50):>10} {_percent(slot.forecast_error_p90):>10}"
        wait = slot.wait.lower().replace("_", " ")
        row = f"  {slot.slot:>6} {wait:<18}{slot.ms_p50:>8.2f} {slot.ms_min:>7.2f} {errors}"
        yield f"{row} {slot.opened:>7.0%} {slot.fill:>6.0%}{_why_shut(slot, squeeze, worth_ms)}"


def _why_shut(slot: SlotFigures, squeeze: Mapping[str, Any], worth_ms: float) -> str:
    """Why a slot stays shut on a device where bubbles of `worth_ms` are worth opening."""
    if slot.opened > 0.5:
        return ""
    if slot.wait not in squeeze["kinds"]:
        return "  not in kinds"
    if slot.forecast_ms_p50 is None:
        return "  no forecast yet"
    if slot.forecast_ms_p50 < squeeze["min_bubble_ms"]:
        return f"  on average shorter than min_bubble_ms = {squeeze['min_bubble_ms']:g}"
    if slot.forecast_ms_p50 < worth_ms:
        return f"  on average shorter than the {worth_ms:.1f} ms worth opening on this device (squeezer doctor)"
    return "  planned too late, or too short for the margin or for this device"


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:+.1%}"


def _span(numbers: Sequence[int]) -> str:
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"
