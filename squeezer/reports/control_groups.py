"""Whether side tasks had control groups, and what those show that the main job's hooks have not seen."""

from collections.abc import Mapping, Sequence
from typing import Any


def control_group_figures(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The figures of some ranks, from their records of the side task.

    Returns:
        `grouped`: how many of their processes had a control group; `no_group`: why others had none; `uncounted`: CPU
        time that the hooks have not seen ÷ all that the groups counted meanwhile; None: unknown.
    """
    started = [record for rank in ranks for record in rank if record["event"] == "started"]
    ended = [record for rank in ranks for record in rank if record["event"] == "exited" and record.get("group_cpu_ms")]
    cpu_ms = sum(record["group_cpu_ms"] for record in ended)
    return {
        "processes": len(started),
        "grouped": sum(bool(record.get("group")) for record in started),
        "no_group": sorted({record["no_group"] for record in started if record.get("no_group")}),
        "uncounted": sum(record["uncounted_ms"] for record in ended) / cpu_ms if cpu_ms else None,
    }


def control_group_text(side: Mapping[str, Any]) -> str:
    """The same as a sentence; empty if there was no side task."""
    texts = []
    if side["grouped"]:
        share = side["uncounted"]
        counted = "" if share is None else f"; {100 * share:.1f}% of their CPU time was not counted"
        texts.append(f"control groups: {side['grouped']} of {side['processes']}{counted}")
    if side["no_group"]:
        texts.append(f"without a control group: {'; '.join(side['no_group'])}")
    return "; ".join(texts)
