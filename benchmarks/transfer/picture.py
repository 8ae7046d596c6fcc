"""Draws how the best rate moves with a model's width, as a picture (.svg) beside the results.

python -m benchmarks.transfer.picture FILE.json
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from math import floor, inf, log2
from pathlib import Path

from benchmarks.transfer.figures import mean_losses
from benchmarks.transfer.resampled import Runs
from squeezer.reports.svg import document, text

EXPERIMENT = "drift_mlp_adam"
PANELS = {"shrunk": "surrogates of one target", "plain": "plain PyTorch"}
COLOURS = ("#9ecae1", "#56a0d3", "#2171b5", "#08306b")
"""From the narrowest model to the widest."""
LEFT, TOP, WIDE, HIGH, GAP = 70, 96, 370, 240, 50


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the picture of one file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE.json")
    file: Path = parser.parse_args(arguments).file
    file.with_suffix(".svg").write_text(picture(json.loads(file.read_text(encoding="utf-8"))["runs"]), encoding="utf-8")


def picture(runs: Runs) -> str:
    """Two panels, the training loss over the rate at each width: of surrogates, and of plain PyTorch."""
    own = [run for run in runs if run["scenario"] == EXPERIMENT]
    curves = {way: {run["width"]: mean_losses(run) for run in own if run["way"] == way} for way in PANELS}
    every = [loss for panel in curves.values() for curve in panel.values() for loss in curve.values() if loss < inf]
    bounds = min(every), max(every)
    widths = sorted(curves["shrunk"])
    parts = [part for place, way in enumerate(PANELS) for part in _panel(place, PANELS[way], curves[way], bounds)]
    for row, width in enumerate(widths):
        x, y = LEFT + 105 * row, TOP + HIGH + 62
        parts.append(
            f'<line x1="{x}" x2="{x + 20}" y1="{y - 4}" y2="{y - 4}" stroke="{COLOURS[row]}" stroke-width="3"/>'
        )
        parts.append(text(x + 26, y, f"width {width:,}"))
    return document(
        "Shrunk by up to 64, a model keeps its best learning rate to within an octave",
        "Training loss of an MLP with Adam over the learning rate, mean of three seeds; a dot marks the best rate.",
        TOP + HIGH + 80,
        parts,
    )


def _panel(
    place: int, title: str, curves: Mapping[int, Mapping[float, float]], bounds: tuple[float, float]
) -> list[str]:
    left, rates = LEFT + place * (WIDE + GAP), sorted(next(iter(curves.values())))
    low, high = bounds

    def point(rate: float, loss: float) -> tuple[float, float]:
        across = (log2(rate) - log2(rates[0])) / (log2(rates[-1]) - log2(rates[0]))
        return left + 8 + across * (WIDE - 16), TOP + 8 + (HIGH - 16) * (high - loss) / (high - low)

    parts = [
        text(left, TOP - 10, title, 13, more=' font-weight="600"'),
        f'<rect class="grid" x="{left}" y="{TOP}" width="{WIDE}" height="{HIGH}" fill="none" stroke="#d1d9e0"/>',
        text(left + WIDE / 2, TOP + HIGH + 36, "learning rate", 12, "soft", ' text-anchor="middle"'),
        *(
            text(point(rate, 0)[0], TOP + HIGH + 17, _power(log2(rate)), 11, "soft", ' text-anchor="middle"')
            for rate in rates[::2]
        ),
    ]
    if place == 0:
        first = floor(low) + 1
        parts += [
            text(left - 8, point(rates[0], octave)[1] + 4, f"{2.0**octave:g}", 11, "soft", ' text-anchor="end"')
            for octave in range(first, floor(high) + 1, 2)
        ]
        parts.append(text(left - 46, TOP - 10, "loss", 11, "soft"))
    for row, width in enumerate(sorted(curves)):
        found = {rate: loss for rate, loss in sorted(curves[width].items()) if loss < inf}
        points = " ".join("{:.1f},{:.1f}".format(*point(rate, loss)) for rate, loss in found.items())
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[row]}" stroke-width="2"/>')
        x, y = point(*min(found.items(), key=lambda each: each[1]))
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLOURS[row]}" stroke="#ffffff"/>')
    return parts


def _power(octave: float) -> str:
    """A power of two, as it is written."""
    return "2" + f"{round(octave)}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


if __name__ == "__main__":
    main()
