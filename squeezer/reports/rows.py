"""How many trials trained at once, and what that gained."""

from collections.abc import Mapping, Sequence
from typing import Any


def row_figures(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The figures of some ranks, from their records of the side task.

    Returns:
        `rows`: the smallest and the largest number of trials that their processes trained at once, at most; `gain`:
        how many times faster they train than one after another, the median by measurement before the first trial;
        None: there is none.
    """
    ready = [record for rank in ranks for record in rank if record["event"] == "ready" and "rows" in record]
    gains = sorted(record["gain"] for record in ready if record["gain"])
    rows = [record["rows"] for record in ready]
    return {
        "rows": [min(rows), max(rows)] if rows else None,
        "gain": gains[len(gains) // 2] if gains else None,
    }


def row_text(side: Mapping[str, Any]) -> str:
    """The same as a sentence; empty if no process got so far."""
    if side["rows"] is None:
        return ""
    least, most = side["rows"]
    rows = f"{most}" if least == most else f"{least} to {most}"
    if most == 1:
        return "one trial at a time" + (": fused ones would train no faster" if side["gain"] else "")
    gain = "" if side["gain"] is None else f", {side['gain']:.1f} times as fast as one after another (measured)"
    return f"up to {rows} trials at once{gain}"
