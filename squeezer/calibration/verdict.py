"""What measured rows of a device allow: whether a side task may share it with a main job, and with what margin."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from statistics import median
from typing import Any

from squeezer.calibration.figures import MARGINS_US

LATE_AT_MOST_US = 50.0
"""How much later than alone, at the 99th percentile, the main job's next kernel may start after its data's arrival."""
_TURN_AT_LEAST_US = 20.0
"""A gap in a spinning kernel that is no jitter."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a device allows, and the figures behind it.

    Attributes:
        sound: whether a side task may run in this device's bubbles.
        reason: of that, in words.
        margin_ns: how long before the main job's data arrive the side task must have ended. Meaningless unless sound.
        turn_ns: how long the device stays with the other process, where processes take turns; 0: they overlap.
        opening_ns: from the gate's opening to the side task's first kernel, at the 99th percentile.
        late_us: how much later than alone the next kernel starts at the 99th percentile, by how the main job waits
            (`spin`, `stream`) and what the side task does (`busy`, or how many µs before it has stopped).
    """

    sound: bool
    reason: str
    margin_ns: int
    turn_ns: int
    opening_ns: int
    late_us: dict[str, dict[str, float]]


def check_quiet(rows: Iterable[Row]) -> None:
    """Check that a main job alone starts on time: beside a late one nothing could be found to be late.

    Raises:
        ValueError: it does not.
    """
    for row in rows:
        if row["figure"] == "arrival" and row.get("side") == "none" and row["started_us"]:
            spread_us = percentile_99(row["started_us"]) - median(row["started_us"])
            if spread_us > LATE_AT_MOST_US:
                raise ValueError(
                    f"the device or this machine is not quiet: even alone, the next kernel starts up to "
                    f"{spread_us:.0f} µs later than usual, where the main job waits by {row['receive']}"
                )


def judge(rows: Iterable[Row]) -> Verdict:
    """Judge the rows of the figures `slices`, `arrival` and `opening`.

    Raises:
        ValueError: one of them is missing, or failed.
    """
    rows = [row for row in rows if "error" not in row]
    turn_ns = _turn_ns([row for row in rows if row["figure"] == "slices"])
    opening_ns = _opening_ns([row for row in rows if row["figure"] == "opening"])
    late_us = _late_us([row for row in rows if row["figure"] == "arrival"])
    # a margin that seems to be enough, although a longer one is not, is chance
    enough = list(takewhile(partial(_on_time, late_us), sorted(MARGINS_US, reverse=True)))
    margin_us = enough[-1] if enough else None
    if margin_us is None:
        worst = {how: min(states.values()) for how, states in late_us.items()}
        least = ", ".join(f"{late:.0f} µs where it waits by {how}" for how, late in sorted(worst.items()))
        reason = f"the main job's next kernel starts late even if the side task has ended long before: {least}"
        return Verdict(False, reason, 0, turn_ns, opening_ns, late_us)
    reason = f"the main job's next kernel starts on time if the side task has ended {margin_us} µs before"
    return Verdict(True, reason, margin_us * 1000, turn_ns, opening_ns, late_us)


def _on_time(late_us: Mapping[str, Mapping[str, float]], margin_us: int) -> bool:
    return all(states[str(margin_us)] <= LATE_AT_MOST_US for states in late_us.values())


def _turn_ns(rows: Sequence[Row]) -> int:
    if not rows:
        raise ValueError("the figure slices is missing")
    gaps_us = [gap for row in rows for gap in row["main_gaps_us"] if gap > _TURN_AT_LEAST_US]
    # some gaps are of other origin; where processes take turns, a spinning kernel has one every few ms
    return round(1e3 * median(gaps_us)) if len(gaps_us) > 5 * len(rows) else 0


def _opening_ns(rows: Sequence[Row]) -> int:
    if not rows:
        raise ValueError("the figure opening is missing")
    return round(1e3 * max(percentile_99(row["opening_us"]) for row in rows))


def _late_us(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for receive in ("spin", "stream"):
        own = [row for row in rows if row["receive"] == receive]
        alone = next((percentile_99(row["started_us"]) for row in own if row["side"] == "none"), None)
        if alone is None:
            raise ValueError(f"the figure arrival is missing for a main job that waits by {receive}")
        states: dict[str, float] = {}
        for row in own:
            state = row["side"].removeprefix("margin_")
            if state == "busy" or state.isdigit():
                states[state] = max(states.get(state, 0.0), round(percentile_99(row["started_us"]) - alone, 2))
        if not all(str(margin) in states for margin in MARGINS_US):
            raise ValueError(f"the figure arrival has not all margins for a main job that waits by {receive}")
        found[receive] = states
    return found


def percentile_99(values: Sequence[float]) -> float:
    """The 99th percentile; with fewer than a hundred values, the largest."""
    if not values:
        raise ValueError("a figure has a row without values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
