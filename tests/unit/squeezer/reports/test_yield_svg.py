"""The picture of the waterfall: every share begins where the one before it ends, and the last bar is the yield."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from squeezer.reports.svg import OVERRUN, SIDE
from squeezer.reports.waterfall import MEANINGS
from squeezer.reports.yield_svg import LEFT, LOST, PLOT, draw_yield

SVG = "{http://www.w3.org/2000/svg}"


def report(yielded: float | None, **shares: float) -> dict[str, Any]:
    waterfall = {name: shares.get(name, 0.0) for name in MEANINGS}
    return {
        "side": {"yield": yielded, "waterfall": waterfall},
        "bubbles": {"ratio": 0.24},
        "main": {"steps": 400},
    }


def test_the_bars_lead_from_all_bubble_time_to_the_yield(tmp_path: Path) -> None:
    content = report(0.62, alone=0.2, search=0.001, other_work=0.1, resume_and_tail=0.1, overrun=-0.02)
    path = draw_yield(content, tmp_path / "yield.svg")
    assert path is not None
    svg = ElementTree.parse(path).getroot()
    bars = [
        (each.attrib["fill"], (x - LEFT) / PLOT, (x + float(each.attrib["width"]) - LEFT) / PLOT)
        for each in svg.iter(f"{SVG}rect")
        if each.attrib["fill"] in (LOST, OVERRUN, SIDE)
        for x in [float(each.attrib["x"])]
    ]
    assert [fill for fill, _, _ in bars] == [LOST, LOST, LOST, OVERRUN, SIDE], "the largest first"
    edges = [(0.8, 1.0), (0.7, 0.8), (0.6, 0.7), (0.6, 0.62), (0.0, 0.62)]
    for (_, begin, end), expected in zip(bars, edges, strict=True):
        assert (begin, end) == pytest.approx(expected, abs=1e-3)
    words = " ".join(text.text or "" for text in svg.iter(f"{SVG}text"))
    assert re.findall(r"-?[\d.]+%", words)[1:] == ["100.0%", "20.0%", "10.0%", "10.0%", "-2.0%", "62.0%"]
    assert MEANINGS["alone"] in words and MEANINGS["search"] not in words and "400 steps (24% of a step)" in words


@pytest.mark.parametrize(
    ("yielded", "shares"),
    [
        (1.6, {"starting": 0.3, "alone": 0.1, "overrun": -1.0}),
        (0.4, {"starting": 0.3, "other_work": 1.2, "overrun": -0.9}),
    ],
)
def test_no_bar_leaves_the_picture_where_the_side_task_used_more_than_bubble_time(
    tmp_path: Path, yielded: float, shares: dict[str, float]
) -> None:
    path = draw_yield(report(yielded, **shares), tmp_path / "yield.svg")
    assert path is not None
    bars = [
        (float(each.attrib["x"]), float(each.attrib["width"]), each.attrib["fill"])
        for each in ElementTree.parse(path).iter(f"{SVG}rect")
        if each.attrib["fill"] in (LOST, OVERRUN, SIDE)
    ]
    assert len(bars) == len(shares) + 1
    assert all(x >= LEFT - 0.01 and x + width <= LEFT + PLOT + 0.01 for x, width, _ in bars)
    (overrun,), (side,) = ([width for _, width, fill in bars if fill == kind] for kind in (OVERRUN, SIDE))
    assert side / overrun == pytest.approx(-yielded / shares["overrun"], rel=0.01), "one scale for all"


def test_there_is_none_without_a_yield(tmp_path: Path) -> None:
    assert draw_yield(report(None), tmp_path / "yield.svg") is None
    assert not list(tmp_path.iterdir())
