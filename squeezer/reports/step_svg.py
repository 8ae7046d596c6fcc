"""Draws one recorded step of every rank as an SVG: the main job's work, its bubbles, and the units in them."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ds_hooks.shared.private_file import write_text
from squeezer.records.reader import RankRun, ReportError, StepTime, load_run
from squeezer.reports.metrics import mean_over_ranks
from squeezer.reports.svg import BACKWARD, FORWARD, OTHER, OVERRUN, SIDE, WIDTH, document, rect, text

LEFT, RIGHT, TOP = 132, 24, 78
MAIN_HEIGHT, SIDE_HEIGHT, ROW_GAP, RANK_GAP = 34, 20, 4, 24
FOOT = 84
NARROW_PX = 0.6
"""Units closer than this are drawn as one: the gap would not show, and there may be thousands."""

HATCH = """<pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
    <rect class="hatch" width="6" height="6" fill="#eef0f2"/>
    <path class="line" d="M0 0V6" stroke="#a5acb4" stroke-width="1.6"/>
  </pattern>"""


def draw_step(run: Path, path: Path) -> Path:
    """Write an SVG of the squeezed step with the median duration to `path`.

    Raises:
        ReportError: no records in `run`, or no squeezed step in them.
    """
    ranks = load_run(run)
    squeezed = [s for s in mean_over_ranks([rank.step_times(detailed=True) for rank in ranks]) if s.squeezed]
    if not squeezed:
        raise ReportError(f"{run}: no squeezed step is recorded; a picture needs one")
    most = max(len(s.ranks) for s in squeezed)  # a step that a killed daemon missed would show an empty rank
    whole = sorted((s for s in squeezed if len(s.ranks) == most), key=lambda s: s.duration_ns)
    busy = [step for step in whole if all(_is_busy(rank, step) for rank in ranks)]  # not while a side task starts
    whole = busy or whole
    write_text(path, _svg(ranks, whole[len(whole) // 2]))
    return path


def _is_busy(rank: RankRun, step: StepTime) -> bool:
    return any(b["side_ns"] > 0 and b["permit_until_ns"] is not None for b in _inside(rank.records["bubble"], step))


class _Scale:
    """Nanoseconds to pixels."""

    def __init__(self, step: StepTime) -> None:
        self.from_ns, self.to_ns = step.start_ns, step.end_ns
        self.px_per_ns = (WIDTH - LEFT - RIGHT) / (step.end_ns - step.start_ns)

    def x(self, t_ns: float) -> float:
        return LEFT + (min(max(t_ns, self.from_ns), self.to_ns) - self.from_ns) * self.px_per_ns


def _svg(ranks: Sequence[RankRun], step: StepTime) -> str:
    scale = _Scale(step)
    per_rank = MAIN_HEIGHT + ROW_GAP + SIDE_HEIGHT
    bottom = TOP + len(ranks) * (per_rank + RANK_GAP) - RANK_GAP + 10
    height = bottom + FOOT
    rows: list[str] = []
    bubble_ns = busy_ns = 0.0
    overran = False
    for i, rank in enumerate(ranks):
        y = TOP + i * (per_rank + RANK_GAP)
        bubbles = _inside(rank.records["bubble"], step)
        pieces = list(_units(rank, bubbles, step))
        rows += _labels(rank, y)
        rows += _main_row(rank, bubbles, scale, step, y)
        drawn = list(_side_row(pieces, scale, y + MAIN_HEIGHT + ROW_GAP))
        overran |= any(OVERRUN in rect for rect in drawn)
        rows += drawn
        bubble_ns += sum(b["end_ns"] - b["start_ns"] for b in bubbles)
        busy_ns += sum(b["side_ns"] for b in bubbles)
    share = bubble_ns / len(ranks) / (step.end_ns - step.start_ns)
    duration_ms = step.duration_ns / 1e6
    stages = "two stages" if len(ranks) == 2 else f"{len(ranks)} stage{'s' * (len(ranks) != 1)}"
    title = f"One training step on {stages}, and what ran in its bubbles"
    about = f"Step {step.step} as recorded: {duration_ms:.1f} ms, {100 * share:.0f}% of it bubbles"
    about += f", {100 * busy_ns / bubble_ns:.0f}% of those filled by the side task" if bubble_ns else ""
    parts = [*_axis(scale, bottom), *rows, *_legend(height - 24, overran)]
    return document(title, about, height, parts, HATCH)


def _inside(bubbles: Sequence[Mapping[str, Any]], step: StepTime) -> Sequence[Mapping[str, Any]]:
    """Select by time, not by job number, which may differ between ranks."""
    first = bisect_right(bubbles, step.start_ns, key=lambda bubble: bubble["end_ns"])
    return bubbles[first : bisect_left(bubbles, step.end_ns, key=lambda bubble: bubble["start_ns"])]


def _labels(rank: RankRun, y: float) -> Iterator[str]:
    job = rank.records["job"][-1] if rank.records["job"] else {"stage": "?"}
    middle = y + MAIN_HEIGHT / 2
    yield text(24, middle - 2, f"stage {job['stage']}", 13, more=' font-weight="600"')
    yield text(24, middle + 13, f"main job · rank {rank.rank}", 11, "soft")
    yield text(24, y + MAIN_HEIGHT + ROW_GAP + SIDE_HEIGHT / 2 + 4, "side task", 11, "soft")
    width = WIDTH - LEFT - RIGHT
    yield rect(LEFT, y, width, MAIN_HEIGHT, "#f6f8fa", "track")
    yield rect(LEFT, y + MAIN_HEIGHT + ROW_GAP, width, SIDE_HEIGHT, "#f6f8fa", "track")


def _main_row(
    rank: RankRun, bubbles: Sequence[Mapping[str, Any]], scale: _Scale, step: StepTime, y: float
) -> Iterator[str]:
    items = sorted(item for r in rank.records["instructions"] for item in _timed(r["items"], step))
    counts = {"FORWARD_PASS": 0, "BACKWARD_PASS": 0}
    blocks: list[str] = []
    words: list[str] = []
    for start_ns, end_ns, kind in items:
        x, width = scale.x(start_ns), scale.x(end_ns) - scale.x(start_ns)
        forward = kind == "FORWARD_PASS"
        if kind not in counts:
            # beneath the bubbles, which hide the waits that are bubbles
            blocks.insert(0, rect(x, y, width, MAIN_HEIGHT, OTHER, "other"))
            continue
        inset = 0.5 if width > 4 else 0.0  # tells equal neighbours apart
        fill, css = (FORWARD, "forward") if forward else (BACKWARD, "backward")
        blocks.append(rect(x + inset, y, width - 2 * inset, MAIN_HEIGHT, fill, css, 2 * inset))
        if width > 16:
            label = f"{'F' if forward else 'B'}{counts[kind]}"
            css = "on-forward" if forward else "on-backward"
            words.append(text(x + width / 2, y + MAIN_HEIGHT / 2 + 4, label, 11, css, ' text-anchor="middle"'))
        counts[kind] += 1
    first_compute = next((i for i, block in enumerate(blocks) if OTHER not in block), len(blocks))
    yield from blocks[:first_compute]
    for b in bubbles:
        x = scale.x(b["start_ns"])
        yield rect(x, y, scale.x(b["end_ns"]) - x, MAIN_HEIGHT, "url(#bubble)")
    yield from blocks[first_compute:]
    yield from words


def _timed(items: Iterable[Sequence[Any]], step: StepTime) -> Iterator[tuple[int, int, str]]:
    for kind, _slot, start_ns, end_ns in items:
        if step.start_ns <= (start_ns + end_ns) // 2 <= step.end_ns:
            yield start_ns, end_ns, kind


def _units(rank: RankRun, bubbles: Sequence[Mapping[str, Any]], step: StepTime) -> Iterator[tuple[int, int, bool]]:
    """(start_ns, end_ns, in a bubble) of the units, cut at the bubbles' edges.

    Outside a bubble no more is drawn than what the one before it overran: for the rest the unit was preempted.
    """
    overruns_ns = {b["end_ns"]: b["overrun_ns"] or 0 for b in bubbles}
    edges = [edge for b in bubbles for edge in (b["start_ns"], b["end_ns"])]
    begin = rank.units["start_ns"]
    shown = rank.units[(begin < step.end_ns) & (begin + rank.units["wall_ns"] > step.start_ns)]
    for start_ns, wall_ns, _cpu_ns, _unit, _group in shown.tolist():
        end_ns = start_ns + wall_ns
        cuts = [start_ns, *(edge for edge in edges if start_ns < edge < end_ns), end_ns]
        for a, b in pairwise(cuts):
            inside = any(edges[i] <= a < edges[i + 1] for i in range(0, len(edges), 2))
            yield a, b if inside else min(b, a + overruns_ns.get(a, 0)), inside


def _side_row(pieces: Iterable[tuple[int, int, bool]], scale: _Scale, y: float) -> Iterator[str]:
    runs: list[tuple[float, float, bool]] = []
    for start_ns, end_ns, inside in pieces:
        a, b = scale.x(start_ns), scale.x(end_ns)
        if runs and inside == runs[-1][2] and a - runs[-1][1] < NARROW_PX and b - a < NARROW_PX * 5:
            runs[-1] = (runs[-1][0], b, inside)
        else:
            runs.append((a, b, inside))
    for a, b, inside in runs:
        inset = 0.3 if b - a > 3 else 0.0
        if b - a >= 0.05:
            fill, css = (SIDE, "side") if inside else (OVERRUN, "overrun")
            yield rect(a + inset, y, b - a - 2 * inset, SIDE_HEIGHT, fill, css)


def _axis(scale: _Scale, bottom: float) -> Iterator[str]:
    span_ms = (scale.to_ns - scale.from_ns) / 1e6
    rough_ms = span_ms / 8
    power = 10.0 ** math.floor(math.log10(rough_ms))
    tick_ms = next(power * m for m in (1, 2, 5, 10) if power * m >= rough_ms)
    for i in range(math.floor(span_ms / tick_ms) + 1):
        x = scale.x(scale.from_ns + i * tick_ms * 1e6)
        yield f'<path class="grid" d="M{x:.2f} {TOP - 8}V{bottom}" stroke="#e4e8ec"/>'
        label = f"{i * tick_ms:g}" + (" ms" if i == 0 else "")
        yield text(x, bottom + 17, label, 11, "soft", ' text-anchor="middle"')


def _legend(y: float, overran: bool) -> Iterator[str]:
    entries = [
        (FORWARD, "forward", "forward"),
        (BACKWARD, "backward", "backward"),
        (OTHER, "other", "other work"),
        ("url(#bubble)", "", "bubble"),
        (SIDE, "side", "side task"),
        *([(OVERRUN, "overrun", "side task after the bubble")] if overran else []),
    ]
    x = float(LEFT)
    for fill, css, words in entries:
        yield rect(x, y - 10, 18, 12, fill, css, 2)
        yield text(x + 25, y, words, 12)
        x += 25 + 6.6 * len(words) + 22
