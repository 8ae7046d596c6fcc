"""Draws the waterfall of a run as an SVG: from all of its bubble time, share by share, down to the yield."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_hooks.shared.private_file import write_text
from squeezer.reports.svg import OVERRUN, SIDE, document, rect, text
from squeezer.reports.waterfall import MEANINGS, largest

LEFT, RIGHT, TOP = 24, 24, 78
ROW, BAR = 30, 18
PLOT = 380
"""The width of the bars, in pixels; words stand to the right of them."""
LOST = "#E69F00"
Rows = Sequence[tuple[str, float, float, str]]
"""See `_rows`."""


def draw_yield(report: Mapping[str, Any], path: Path) -> Path | None:
    """Write the picture to `path`; None: the yield is not known.

    Args:
        report: what `squeezer.reports.report.build_report` gives.
        path: a new file.
    """
    side = report["side"]
    if side["yield"] is None:
        return None
    write_text(path, _svg(report))
    return path


def _svg(report: Mapping[str, Any]) -> str:
    side, bubbles, main = report["side"], report["bubbles"], report["main"]
    rows = list(_rows(side))
    of_step = f"{100 * bubbles['ratio']:.0f}% of a step" if bubbles["ratio"] is not None else "all of it"
    about = f"Bubble time of {main['steps']} steps ({of_step}), and what it went to"
    return document("What the bubbles gave", about, TOP + ROW * len(rows) + 16, [*_axis(rows), *_bars(rows)])


def _rows(side: Mapping[str, Any]) -> Iterator[tuple[str, float, float, str]]:
    """Each bar: words, begin and end as shares of bubble time, colour."""
    yield "all bubble time", 0.0, 1.0, "#a5acb4"
    level = 1.0
    for name, share in largest(side):
        yield MEANINGS[name], level - share, level, LOST if share > 0 else OVERRUN
        level -= share
    yield "yield: as good as a dedicated device with full rows", 0.0, side["yield"], SIDE


def _scale(rows: Rows) -> Callable[[float], float]:
    """From a share of bubble time to x. What runs on in idle time may lead beyond all of it, and below none of it."""
    ends = [0.0, *(end for _, *both, _ in rows for end in both)]
    low, high = min(ends), max(ends)
    return lambda share: LEFT + PLOT * (share - low) / (high - low)


def _bars(rows: Rows) -> Iterator[str]:
    x_of = _scale(rows)
    for number, (words, begin, end, fill) in enumerate(rows):
        y = TOP + ROW * number
        low, high = sorted((x_of(begin), x_of(end)))
        css = "side" if fill == SIDE else ""
        yield rect(low, y, max(1.0, high - low), BAR, fill, css, 2)
        weight = ' font-weight="600"' if number in (0, len(rows) - 1) else ""
        yield text(LEFT + PLOT + 52, y + BAR - 5, f"{100 * (end - begin):.1f}%", 12, more=f' text-anchor="end"{weight}')
        yield text(LEFT + PLOT + 62, y + BAR - 5, words, 12, more=weight)


def _axis(rows: Rows) -> Iterator[str]:
    x_of = _scale(rows)
    for quarter in range(5):
        x = x_of(quarter / 4)
        yield f'<path class="grid" d="M{x:.2f} {TOP - 8}V{TOP + ROW * len(rows)}" stroke="#e4e8ec"/>'
