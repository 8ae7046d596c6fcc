"""What the launcher prints when a squeezed job has ended: five lines. `squeezer report` prints the rest."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from squeezer.reports.audit import mismatch_text
from squeezer.reports.slowdown import is_too_wide
from squeezer.reports.waterfall import NAMES, largest

MENTIONED = 0.02
"""A share of bubble time that is worth a word."""


def closing_lines(report: Mapping[str, Any], run: Path) -> list[str]:
    """What was gained, at what cost, and where to look next. Further lines come only after mismatches and faults.

    Args:
        report: what `build_report` gives.
        run: the run's directory.
    """
    shown = _short(run)
    faults = _faults(report)
    return [
        f"Gained  {_trials(report['trials'])}",
        f"Used    {_used(report)}",
        f"Cost    {_cost(report)}",
        f"Next    squeezer report {shown}  |  squeezer why {shown}",
        f"Files   in {shown}: {_files(report)}",
        *(f"Audit   {mismatch_text(found)}" for found in report["side"]["audit"]["mismatches"]),
        *([f"Faults  {'; '.join(faults)}"] if faults else []),
    ]


def _files(report: Mapping[str, Any]) -> str:
    main = report["main"]
    made = {
        "step.svg (a step)": main["squeezed_share"],
        "yield.svg (what the bubbles gave)": report["side"]["yield"] is not None,
        "trace.json (for ui.perfetto.dev)": main["steps"],
    }
    return ", ".join(name for name, is_there in made.items() if is_there) or "report.json"


def slowdown_text(main: Mapping[str, Any]) -> str:
    """The slowdown and how sure it is; no slowdown is claimed that the interval does not show."""
    if main["slowdown_ci95"] is None:
        return "unknown: too few steps with and without squeezing to compare"
    low, high = main["slowdown_ci95"]
    interval = f"95% interval {_signed(low)} to {_signed(high)}, n = {main['slowdown_pairs']}"
    if low > 0:
        return f"{_signed(main['slowdown'])} slower steps ({interval})"
    if high < 0:
        return f"no slowdown detected; steps were {_signed(main['slowdown'])} with squeezing ({interval})"
    if is_too_wide(main):
        return f"unknown: steps vary too much to tell ({interval})"
    return f"no slowdown detected, ±{50 * (high - low):.1f}% ({interval})"


def _trials(trials: Mapping[str, Any]) -> str:
    if trials["problem"] is not None:
        return f"the study cannot be read: {trials['problem']}"
    states = ("completed", "pruned", "failed", "running")
    parts = [f"{trials[key]} {key}" for key in states if trials[key]]
    waiting = trials.get("waiting", 0) + trials.get("paused", 0)
    parts += [f"{waiting} waiting for the next run"] if waiting else []
    names = list(trials["studies"])
    of_them = f"{'study' if len(names) == 1 else 'studies'} {', '.join(names)}: " if names else ""
    text = of_them + (", ".join(parts) or "no trial")
    if trials["best"]:
        text += f"; best score {trials['best']['value']:.4g} (trial {trials['best']['number']})"
    return text


def _used(report: Mapping[str, Any]) -> str:
    if not report["main"]["steps"]:
        return "no step was seen: the script built no pipeline engine, or its hooks could not work, as said above"
    idle, side = report["bubbles"]["ratio"], report["side"]
    text = f"devices were idle {_percent(idle)} of the time; "
    if side["yield"] is None:
        text += f"trials ran in {_percent(side['fill'])} of that"
    else:
        text += f"that gave trials {_percent(side['yield'])} of what a dedicated device would"
    lost = [f"{NAMES[name]} {_percent(share)}" for name, share in largest(side, MENTIONED)[:3]]
    text += f" (most of the rest: {', '.join(lost)})" if lost else ""
    audit = side["audit"]
    return f"{text}; audits: {audit['audits']}, {len(audit['mismatches'])} differed" if audit["audits"] else text


def _cost(report: Mapping[str, Any]) -> str:
    main = report["main"]
    text = slowdown_text(main)
    alone, squeezed = main["step_ms_alone"], main["step_ms_squeezed"]
    if alone is not None and squeezed is not None:
        text += f"; steps {alone:.1f} ms without, {squeezed:.1f} ms with"
    return text


def _faults(report: Mapping[str, Any]) -> list[str]:
    """What makes the figures above incomplete."""
    found = [f"no side task was started: {reason}" for reason in report["side"]["not_started"]]
    switched_off = report["faults"]["hook_faults"]
    if switched_off:
        found.append(f"hooks switched themselves off {switched_off} time{'s' * (switched_off != 1)}")
    killed = [rank for rank, of in report["ranks"].items() if not of["ended"]]
    if killed:
        found.append(f"the daemon of rank {', '.join(killed)} did not finish its record")
    if report["missing"]:
        found.append(f"no records of rank {', '.join(map(str, report['missing']))} here")
    return found


def _short(run: Path) -> str:
    """The path as the user would type it here."""
    relative = os.path.relpath(run)
    return str(run) if relative.startswith("..") else relative


def _signed(ratio: float) -> str:
    return f"{100 * ratio:+.1f}%"


def _percent(ratio: float | None) -> str:
    return "n/a" if ratio is None else f"{100 * ratio:.0f}%"
