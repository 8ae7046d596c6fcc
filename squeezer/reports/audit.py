"""What the audits found: whether fused trials gave what the trials alone give."""

from collections.abc import Mapping, Sequence
from typing import Any

KEYS = ("trial", "trials", "mode", "what", "way", "then")


def audit_figures(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up what side tasks reported.

    Args:
        records: the "side" records of one rank, or of several.
    """
    audited = [line for line in records if line["event"] == "audited"]
    audit_ms, first_ms, all_ms = (sum(line[key] for line in audited) for key in ("audit_ms", "first_ms", "all_ms"))
    return {
        "audits": sum(line["audits"] for line in audited),
        "mismatches": [{key: line[key] for key in KEYS} for line in records if line["event"] == "mismatched"],
        "cost": audit_ms / all_ms if all_ms else None,
        "cost_of_first": first_ms / all_ms if all_ms else None,
    }


def audit_text(audit: Mapping[str, Any]) -> str:
    """The figures in one line."""
    count, found = audit["audits"], len(audit["mismatches"])
    if not count:
        return "none"
    cost = f"cost {100 * audit['cost']:.1f}% of the side task's time"
    if audit["cost_of_first"]:
        cost += f", {100 * audit['cost_of_first']:.1f}% on first batches"
    return f"{count} step{'s' * (count != 1)} compared with a trial alone, {found} differed; {cost}"


def mismatch_text(found: Mapping[str, Any]) -> str:
    """One mismatch in words."""
    then = f"trained by {found['then']} from there on" if found["then"] else "they failed"
    return (
        f"trial {found['trial']} of {found['trials']} fused by {found['way']} differed in {found['mode']}: "
        f"{found['what']}; {then}"
    )
