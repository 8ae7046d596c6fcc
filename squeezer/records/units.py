"""The side task's units as arrays, cut where the device had stopped the process: it did nothing meanwhile."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_hooks.shared.unit_record import UNIT_FIELDS, UNIT_FORMATS

UNIT_DTYPE = np.dtype([(name, f"<{code}") for name, code in zip(UNIT_FIELDS, UNIT_FORMATS, strict=True)])
"""`UNIT_RECORD` for numpy."""


def stopped_intervals(bubbles: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """(stopped, continued) in ns, from the "bubble" records of one rank in order."""
    intervals = []
    stop_ns: int | None = None
    for bubble in bubbles:
        if bubble["permit_until_ns"] is not None and stop_ns is not None:
            intervals.append((stop_ns, bubble["start_ns"]))
            stop_ns = None
        if bubble["stopped"]:
            stop_ns = bubble["end_ns"]
    return intervals


def attribute(bubbles: Sequence[dict[str, Any]], units: NDArray[Any], overruns: Iterable[Mapping[str, Any]]) -> None:
    """Fill in what the main job could not measure in its bubbles, because units run on a device's time.

    `side_ns` is what units took within the bubble. `overrun_ns` is what the side task has reported, or else 0.

    Args:
        bubbles: the "bubble" records of one rank in order; those with `side_ns` already stay as they are.
        units: `UNIT_DTYPE`, by start.
        overruns: the "overran" records.
    """
    unknown = [bubble for bubble in bubbles if bubble["side_ns"] is None]
    if not unknown:
        return
    begin_ns = units["start_ns"].astype(np.int64)
    busy_ns = np.append(0, np.cumsum(units["cpu_ns"], dtype=np.int64))
    end_ns = begin_ns + units["cpu_ns"]

    def until(t_ns: int) -> int:
        """What units took until then; of the one that runs, its part."""
        done = int(np.searchsorted(end_ns, t_ns, "right"))
        part = max(0, t_ns - int(begin_ns[done])) if done < len(units) else 0
        return int(busy_ns[done]) + part

    opened: dict[int, list[dict[str, Any]]] = {}
    for bubble in unknown:
        bubble["side_ns"] = until(bubble["end_ns"]) - until(bubble["start_ns"])
        if bubble["permit_until_ns"] is not None:
            bubble["overrun_ns"] = 0
            opened.setdefault(bubble["slot"], []).append(bubble)
    for overrun in overruns:
        own = opened.get(overrun["slot"], [])
        index = bisect_right(own, overrun["t_ns"], key=lambda bubble: bubble["start_ns"])
        if index:
            own[index - 1]["overrun_ns"] += overrun["overrun_ns"]


def cut_at_stops(units: NDArray[Any], stops: Sequence[tuple[int, int]]) -> NDArray[Any]:
    """`units` (`UNIT_DTYPE`, by start) with each one that was stopped replaced by the pieces in which it ran.

    A piece has its wall time as CPU time, as long as the unit's CPU time lasts.
    """
    if not stops or not len(units):
        return units
    starts = np.array([stop for stop, _ in stops], np.int64)
    ends = units["start_ns"] + units["wall_ns"].astype(np.int64)
    first = np.searchsorted(starts, units["start_ns"], "left")
    last = np.searchsorted(starts, ends, "left")
    hit = last > first
    pieces: list[tuple[int, int, int, int, int]] = []
    for unit, end_ns, i, j in zip(units[hit], ends[hit], first[hit], last[hit], strict=True):
        begin_ns, cpu_ns = int(unit["start_ns"]), int(unit["cpu_ns"])
        for stop_ns, continue_ns in [*stops[i:j], (int(end_ns), int(end_ns))]:
            wall_ns = max(0, min(stop_ns, int(end_ns)) - begin_ns)
            used_ns = min(wall_ns, cpu_ns)
            if wall_ns:
                pieces.append((begin_ns, wall_ns, used_ns, int(unit["unit"]), int(unit["group"])))
            cpu_ns -= used_ns
            begin_ns = continue_ns
    cut = np.concatenate([units[~hit], np.array(pieces, UNIT_DTYPE)])
    return cut[np.argsort(cut["start_ns"], kind="stable")]
