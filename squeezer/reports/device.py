"""What the device's meters say with squeezing and without: power, energy per step, clocks. Keys: `docs/report.md`.

Energy is counted from look to look, a second or more. Only time that lies wholly within steps of one kind, squeezed or
alone, counts for it: nothing is split by estimate. Where no run of alone steps lasts that long, they have no figure.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from squeezer.records.reader import RankRun, StepTime
from squeezer.reports.metrics import WARM_UP_STEPS

KINDS = {"squeezed": True, "alone": False}
LONGEST_NS = 10_000_000_000
"""Looks further apart are of two jobs, or the daemon was held up."""
COVERED = 0.95
"""Of the time between two looks: the rest is between steps."""
DIFFERS = 0.01
"""Clocks and shares that differ by less are not printed."""
_METERS = ("utilization", "sm_mhz", "memory_mhz")


@dataclass(slots=True)
class _Sums:
    """All that counts for one kind of steps."""

    looks: int = 0
    ns: int = 0
    mj: float = 0.0
    meters: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in _METERS})
    slowed: Counter[str] = field(default_factory=Counter)
    known_slowed: int = 0


def device_figures(ranks: Sequence[RankRun], main: Mapping[str, Any]) -> dict[str, Any] | None:
    """Figures per device, as means over `ranks`; None if there were no meters.

    Args:
        ranks: whose devices.
        main: their step times, see `squeezer.reports.metrics.main_figures`.
    """
    if not any(rank.records["device"] for rank in ranks):
        return None
    sums = {kind: _Sums() for kind in KINDS}
    for rank in ranks:
        for kind, earlier, look in _within_one_kind(rank.step_times(), rank.records["device"]):
            _add(sums[kind], earlier, look)
    return {kind: _figures(sums[kind], main[f"step_ms_{kind}"]) for kind in KINDS}


def device_lines(device: Mapping[str, Any] | None) -> list[str]:
    """The same as text."""
    if device is None:
        return []
    squeezed, alone = device["squeezed"], device["alone"]
    looks = f"{squeezed['looks']} and {alone['looks']} looks"
    lines = [
        f"power {_value(squeezed['power_w'])} W squeezed, {_value(alone['power_w'])} W alone; "
        f"{_value(squeezed['joules_per_step'])} and {_value(alone['joules_per_step'])} J per step ({looks})",
        f"busy {_value(squeezed['utilization'])}% and {_value(alone['utilization'])}% of the time",
    ]
    for name, text in (("sm_mhz", "SM clock"), ("memory_mhz", "memory clock")):
        if _differ(squeezed[name], alone[name], squeezed[name]):
            lines.append(f"{text} {squeezed[name]:.0f} MHz squeezed, {alone[name]:.0f} MHz alone")
    for reason in sorted({*(squeezed["slowed_by"] or {}), *(alone["slowed_by"] or {})}):
        shares = [(of["slowed_by"] or {}).get(reason, 0.0) for of in (squeezed, alone)]
        if _differ(shares[0], shares[1], 1.0):
            lines.append(f"slowed by {reason} in {shares[0]:.0%} of looks squeezed, {shares[1]:.0%} alone")
    if not alone["looks"]:
        lines.append("no steps left alone lasted from one look to the next, so their figures are unknown")
    return lines


def barred_figures(of_ranks: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """How often the device had no room for a side task, and why at last; from the "side" records."""
    barred = [event for records in of_ranks for event in records if event["event"] == "barred"]
    last = max(barred, key=lambda event: event["t_ns"], default=None)
    return {"barred": {"times": len(barred), "last": None if last is None else last["reason"]}}


def barred_text(side: Mapping[str, Any]) -> str:
    """The same as text; empty: it never happened."""
    times, last = side["barred"]["times"], side["barred"]["last"]
    return f"had no room on the device {times} time{'s' * (times != 1)}, the last time because {last}" if times else ""


def _within_one_kind(
    steps: Sequence[StepTime], looks: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """(kind, look before, look) wherever all the time between two looks belongs to steps of one kind."""
    ends = [step.end_ns for step in steps]
    for earlier, look in pairwise(looks):
        begin_ns, end_ns = earlier["t_ns"], look["t_ns"]
        if not 0 < end_ns - begin_ns <= LONGEST_NS:
            continue
        covered_ns = 0
        labels = set()
        for step in steps[bisect_right(ends, begin_ns) :]:
            if step.start_ns >= end_ns:
                break
            covered_ns += min(step.end_ns, end_ns) - max(step.start_ns, begin_ns)
            labels.add(None if step.step <= WARM_UP_STEPS else step.squeezed)
        for kind, label in KINDS.items():
            if labels == {label} and covered_ns >= COVERED * (end_ns - begin_ns):
                yield kind, earlier, look


def _add(sums: _Sums, earlier: Mapping[str, Any], look: Mapping[str, Any]) -> None:
    sums.looks += 1
    ns = look["t_ns"] - earlier["t_ns"]
    mj = _used_mj(earlier, look, ns)
    if mj is not None:
        sums.ns += ns
        sums.mj += mj
    for name, values in sums.meters.items():
        if look[name] is not None:
            values.append(look[name])
    if look["slowed_by"] is not None:
        sums.known_slowed += 1
        sums.slowed.update(look["slowed_by"])


def _used_mj(earlier: Mapping[str, Any], look: Mapping[str, Any], ns: int) -> float | None:
    """By the counter; without one, as much as the power at the end."""
    if None not in (earlier["energy_mj"], look["energy_mj"]) and look["energy_mj"] >= earlier["energy_mj"]:
        return float(look["energy_mj"] - earlier["energy_mj"])
    return None if look["power_mw"] is None else look["power_mw"] * ns / 1e9


def _figures(sums: _Sums, step_ms: float | None) -> dict[str, Any]:
    power_w = 1e6 * sums.mj / sums.ns if sums.ns else None
    slowed_by = {reason: count / sums.known_slowed for reason, count in sorted(sums.slowed.items())}
    return {
        "looks": sums.looks,
        "power_w": power_w,
        "joules_per_step": None if power_w is None or step_ms is None else power_w * step_ms / 1e3,
        **{name: sum(values) / len(values) if values else None for name, values in sums.meters.items()},
        "slowed_by": slowed_by if sums.known_slowed else None,
    }


def _differ(one: float | None, other: float | None, of: float | None) -> bool:
    return one is not None and other is not None and of is not None and abs(one - other) > DIFFERS * of


def _value(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"
