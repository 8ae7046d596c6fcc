"""What a side task has reported, in words."""

from ds_hooks.shared.statuses import Mismatched, OutOfMemory, Starved


def too_long(status: Starved) -> str:
    """A unit is longer than every bubble."""
    remedy = (
        "they now train in halves"
        if status.remedy == "split"
        else "splitting it would not help, so it is tried now and then, past the bubble's end"
    )
    return (
        f'unit "{status.unit}" of {_count(status.trials)} needs {status.needs_ms:.1f} ms, the longest bubble is '
        f"{status.longest_bubble_ms:.1f} ms; {remedy}"
    )


def differs(status: Mismatched) -> str:
    """A fused trial differs from the trial alone."""
    remedy = f"they repeat that step, and now train by {status.then}" if status.then else "they fail"
    return (
        f"{_count(status.trials)} fused by {status.way}: the audit found that trial {status.trial} differs in "
        f"{status.mode} from the trial alone: {status.what}; {remedy}"
    )


def too_large(status: OutOfMemory) -> str:
    """Trials did not fit into the memory of the device, or of the host."""
    remedy = f"at most {status.most} train at once now" if status.most else "it fails"
    return f"{_count(status.trials)} did not fit into the side task's memory; {remedy}"


def _count(trials: int) -> str:
    return f"{trials} trial" + "s" * (trials != 1)
