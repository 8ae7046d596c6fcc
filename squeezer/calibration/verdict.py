"""What measured rows of a device allow, and what each figure decides.

slices    whether processes take turns; clients of an MPS server that do: observe only
opening   the shortest bubble worth opening
arrival   the margin; late in spite of the longest one: observe only
blocking  how many units are queued; where the main job waits for a side task that waits: observe only
words     the device's time for a bubble's words comes on top of each arrival's
"""

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

_WAITED = 0.5
"""A call that took this share of the time until the gate opened has waited for it."""
_GATES_CALLS = ("launch, behind the wait", "launch, same stream", "cuEventRecord", "cuEventQuery")
"""What the gate and its units call while a stream may wait at a shut gate."""
_LAUNCHES_AT_LEAST = 256
"""What two units may launch: with less room the second one's host would wait in the driver."""
QUEUE_DEPTH = 2
"""Units that a device is given at once: the one that runs and the next, which may wait for a bubble to begin."""
VERSION = 2
"""Of what is measured. Version 1 had neither `blocking` nor `words`."""

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
        words_ns: the device's time for the words of a bubble's both ends, at the 99th percentile.
        queue_depth: how many units the device is given at once; 1: and none before its bubble has begun.
        queue_reason: of that, in words.
        version: of what was measured; see `VERSION`.
    """

    sound: bool
    reason: str
    margin_ns: int
    turn_ns: int
    opening_ns: int
    late_us: dict[str, dict[str, float]]
    words_ns: int = 0
    queue_depth: int = QUEUE_DEPTH
    queue_reason: str = "it was not measured what waits at a shut gate"
    version: int = 1

    @property
    def is_old(self) -> bool:
        """Whether an earlier version has measured less than is judged today."""
        return self.version < VERSION

    @property
    def least_bubble_ns(self) -> int:
        """The shortest bubble worth opening: half of its permit is left when the first kernel starts."""
        return self.margin_ns + 2 * self.opening_ns


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


def judge(rows: Iterable[Row], *, mps: bool) -> Verdict:
    """Judge the rows of the figures `slices`, `opening`, `arrival`, `blocking` and `words`.

    Args:
        rows: as measured.
        mps: whether the two processes were clients of an MPS server.

    Raises:
        ValueError: one of them is missing, or failed.
    """
    by_figure: dict[str, list[Row]] = {}
    for row in rows:
        if "error" not in row:
            by_figure.setdefault(row["figure"], []).append(row)
    turn_ns = _turn_ns(by_figure.get("slices", ()))
    opening_ns = _opening_ns(by_figure.get("opening", ()))
    late_us = _late_us(by_figure.get("arrival", ()))
    calls = {row["process"]: row for row in by_figure.get("blocking", ())}
    queue_depth, queue_reason = _queue(calls.get("side"))
    words_ns = _words_ns(by_figure.get("words", ()))
    # a margin that seems to be enough, although a longer one is not, is chance
    enough = list(takewhile(partial(_on_time, late_us, words_ns), sorted(MARGINS_US, reverse=True)))
    figures = (turn_ns, opening_ns, late_us, words_ns, queue_depth, queue_reason, VERSION)
    reason = _main_waits(calls.get("main"))
    if not reason and mps and turn_ns:
        reason = f"processes take turns of {turn_ns / 1e6:.1f} ms, although MPS should let them overlap"
    if not reason and not enough:
        reason = _too_late(late_us, words_ns)
    if reason:
        return Verdict(False, reason, 0, *figures)
    margin_us = enough[-1]
    reason = f"the main job's next kernel starts on time if the side task has ended {margin_us} µs before"
    return Verdict(True, reason, margin_us * 1000, *figures)


def _on_time(late_us: Mapping[str, Mapping[str, float]], words_ns: int, margin_us: int) -> bool:
    return all(states[str(margin_us)] + words_ns / 1e3 <= LATE_AT_MOST_US for states in late_us.values())


def _too_late(late_us: Mapping[str, Mapping[str, float]], words_ns: int) -> str:
    if words_ns / 1e3 > LATE_AT_MOST_US:
        return f"the words of each bubble take the main job's device {words_ns / 1e3:.0f} µs"
    worst = {how: min(states.values()) for how, states in late_us.items()}
    least = ", ".join(f"{late:.0f} µs where it waits by {how}" for how, late in sorted(worst.items()))
    return f"the main job's next kernel starts late even if the side task has ended long before: {least}"


def _waited(row: Row, call: str) -> str:
    """How a call fared beside a stream at a shut gate, if it waited for that to open, or failed; else nothing."""
    took_ms = row["took_ms"][call]
    if isinstance(took_ms, str):
        return f"{call} failed: {took_ms}"
    return f"{call} took {took_ms:.0f} ms" if took_ms >= _WAITED * row["opens_after_ms"] else ""


def _main_waits(row: Row | None) -> str:
    if row is None:
        raise ValueError("the figure blocking is missing for the main job")
    found = ", ".join(filter(None, (_waited(row, call) for call in row["took_ms"])))
    return found and f"the main job waits for a side task whose host waits at the gate: {found}"


def _queue(row: Row | None) -> tuple[int, str]:
    """How many units the device is given at once, and why."""
    if row is None:
        raise ValueError("the figure blocking is missing for the side task")
    if _waited(row, "nothing"):
        raise ValueError("this machine is not quiet: what needs no time took as long as the gate was shut")
    asked = [call for call in _GATES_CALLS if call in row["took_ms"]]
    found = ", ".join(filter(None, (_waited(row, call) for call in asked)))
    if found:
        return 1, f"what is queued behind a shut gate holds the side task's host: {found}"
    room = abs(row["queued_at_most"])  # below 0: the gate opened before there was no more room
    if room < _LAUNCHES_AT_LEAST:
        return 1, f"only {room} launches have room behind a shut gate"
    return QUEUE_DEPTH, f"nothing that the gate calls waits, and {room} launches have room behind a shut gate"


def _words_ns(rows: Sequence[Row]) -> int:
    if not rows:
        raise ValueError("the figure words is missing")
    ways = rows[-1]["device_us_per_bubble"]
    took_us: float = percentile_99(ways["batches"]) - median(ways["nothing"])
    return max(0, round(1e3 * took_us))


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
