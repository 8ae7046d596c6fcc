"""What audits compared, as a table for `trials check`."""

from trials.training.audits.audit import Audit
from trials.training.audits.compare import Comparison
from trials.training.audits.record import SETTING, STATE, UPDATE

_NAME_WIDTH = 52


def audit_lines(audit: Audit, trials: int) -> list[str]:
    """Return the verdict, and a line for each tensor and number: of all steps the one nearest to its bound.

    Args:
        audit: keeps its tables.
        trials: how many are fused.
    """
    tables = audit.tables or []
    verdict = f"{audit.mismatches} differed; now by {audit.way}" if audit.mismatches else "equal but for rounding"
    lines = [
        f"audit   {len(tables)} steps of a trial among {trials} against the trial alone: {verdict}",
        "",
        f"{'step':<11} {'compared':<{_NAME_WIDTH}} {'difference':>10} {'bound':>10}",
    ]
    worst: dict[tuple[str, str], Comparison] = {}
    for mode, table in tables:
        for found in table:
            own = mode, str(found.key)
            if _goes_without_saying(mode, found):
                continue
            if own not in worst or _share(found) > _share(worst[own]):
                worst[own] = found
    for (step, name), found in worst.items():
        shown = name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…"
        remark = "" if found.equal else "  differs" + (f": {found.text}" if found.text else "")
        lines.append(f"{step:<11} {shown:<{_NAME_WIDTH}} {found.difference:>10.1e} {found.bound:>10.1e}{remark}")
    return lines


def _goes_without_saying(mode: str, found: Comparison) -> bool:
    kind = found.key.kind
    of_training = kind in (UPDATE, STATE) and mode == "evaluation"
    return found.equal and (not found.bound or kind == SETTING or of_training)


def _share(found: Comparison) -> float:
    """A difference as a share of its bound."""
    if not found.bound:
        return float("inf") if found.difference else 0.0
    return found.difference / found.bound
