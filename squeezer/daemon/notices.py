"""What the daemon tells the user of what befell a side task, in words."""

from collections.abc import Mapping
from typing import Any


def too_long(status: Mapping[str, Any]) -> str:
    """A unit is longer than every bubble."""
    did = (
        "they are trained in halves now"
        if status["did"] == "split"
        else "splitting it further cannot help: it is tried now and then, over the bubble's end"
    )
    return (
        f'unit "{status["unit"]}" of {_trials(status)} needs {status["needs_ms"]:.1f} ms, the longest bubble is '
        f"{status['longest_bubble_ms']:.1f} ms; {did}"
    )


def too_large(status: Mapping[str, Any]) -> str:
    """Trials did not fit into the device's memory."""
    did = f"at most {status['most']} are trained at once now" if status["most"] else "it fails"
    return f"{_trials(status)} did not fit into the share of the device's memory; {did}"


def _trials(status: Mapping[str, Any]) -> str:
    return f"{status['trials']} trial" + "s" * (status["trials"] != 1)
