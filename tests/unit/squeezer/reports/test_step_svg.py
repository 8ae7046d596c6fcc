"""The picture is well-formed, shows the right step, and puts everything where it was in time."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from squeezer.reports.report import ReportError
from squeezer.reports.step_svg import LEFT, RIGHT, draw_step
from squeezer.reports.svg import BACKWARD, FORWARD, OVERRUN, SIDE, WIDTH
from tests.support.made_up_rank import MadeUpRank

SVG = "{http://www.w3.org/2000/svg}"
PLOT = WIDTH - LEFT - RIGHT


def picture(run: Path) -> ElementTree.Element:
    path = run / "step.svg"
    draw_step(run, path)
    return ElementTree.parse(path).getroot()


def rects(svg: ElementTree.Element, fill: str) -> list[tuple[float, float]]:
    """(begin, end) as shares of the plot's width; without the legend's samples."""
    spans = [
        ((float(r.attrib["x"]) - LEFT) / PLOT, (float(r.attrib["x"]) + float(r.attrib["width"]) - LEFT) / PLOT)
        for r in svg.iter(f"{SVG}rect")
        if r.attrib["fill"] == fill and r.attrib["height"] != "12"
    ]
    return spans


def words(svg: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in svg.iter(f"{SVG}text")]


def test_everything_is_at_its_time(tmp_path: Path) -> None:
    for number in range(2):
        rank = MadeUpRank(tmp_path, number)
        rank.step(False, 100, [(20, 10)])
        rank.step(True, 100, [(20, 20)], [(25, 5, 5), (38, 40, 4)])
        rank.write()
    svg = picture(tmp_path)
    half_px = 0.8 / PLOT
    assert rects(svg, FORWARD) == [(pytest.approx(0, abs=half_px), pytest.approx(0.5, abs=half_px))] * 2
    assert rects(svg, BACKWARD) == [(pytest.approx(0.5, abs=half_px), pytest.approx(1, abs=half_px))] * 2
    assert rects(svg, "url(#bubble)") == [(pytest.approx(0.2, abs=half_px), pytest.approx(0.4, abs=half_px))] * 2
    side = [pytest.approx(edge, abs=half_px) for edge in (0.25, 0.3, 0.38, 0.4)]
    assert [edge for span in rects(svg, SIDE) for edge in span] == side * 2
    # the last unit was stopped after the bubble: of its 38 ms there no more than its CPU time is drawn
    assert rects(svg, OVERRUN) == [(pytest.approx(0.4, abs=half_px), pytest.approx(0.44, abs=half_px))] * 2
    shown = words(svg)
    assert {"F0", "B0", "stage 0", "stage 1", "main job · rank 1", "0 ms", "side task after the bubble"} <= set(shown)
    assert "Step 2 as recorded: 100.0 ms, 20% of it bubbles" in " ".join(shown)


def test_the_median_squeezed_step_is_shown(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    for ms in (100, 300, 120, 110, 90):
        rank.step(ms != 90, ms, [(20, 10)])
    rank.write()
    assert any("Step 3 as recorded: 120.0 ms" in text for text in words(picture(tmp_path)))


def test_thousands_of_units_are_few_shapes(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    rank.step(True, 100, [(10, 80)], [(10 + 0.02 * i, 0.018, 0.018) for i in range(4000)])
    rank.write()
    svg = picture(tmp_path)
    assert len(rects(svg, SIDE)) < 10
    assert "side task after the bubble" not in words(svg)


def test_dark_pages_have_their_colours(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    rank.step(True, 100)
    rank.write()
    draw_step(tmp_path, tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    style = text[text.index("@media (prefers-color-scheme: dark)") : text.index("</style>")]
    assert style.count("{") == style.count("}")
    assert set(re.findall(r"\.([a-z-]+) {", style)) >= {"card", "ink", "soft", "hatch"}


def test_a_run_without_squeezing_has_no_picture(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    rank.step(False, 100)
    rank.write()
    with pytest.raises(ReportError, match="no squeezed step is recorded"):
        draw_step(tmp_path, tmp_path / "step.svg")
    assert not (tmp_path / "step.svg").exists()
