"""A printed slowdown never contradicts the step times beside it, and claims nothing that its interval does not show."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from squeezer.records.reader import StepTime
from squeezer.reports.metrics import main_figures
from squeezer.reports.report import build_report, render
from squeezer.reports.slowdown import printed, verdict
from tests.support.made_up_rank import MadeUpRank

MS = 1_000_000


def run_of(windows: list[tuple[bool, list[float]]]) -> list[StepTime]:
    """Steps one after another from (squeezed, step times in ms) per window."""
    flat = [(squeezed, ms) for squeezed, times in windows for ms in times]
    starts = np.cumsum([0.0, *(ms for _, ms in flat)])
    return [
        StepTime(0, i + 1, squeezed, round(starts[i] * MS), round(starts[i + 1] * MS), ms * MS, (0,))
        for i, (squeezed, ms) in enumerate(flat)
    ]


def sign(value: float) -> int:
    return (value > 0) - (value < 0)


def agree(main: dict[str, Any]) -> bool:
    """Whether all signs of what is printed, and of the JSON, are the same."""
    shown = printed(main)
    times = float(shown.squeezed_ms) - float(shown.alone_ms)
    stored = json.loads(json.dumps(main))
    raw = stored["step_ms_squeezed"] - stored["step_ms_alone"]
    return sign(times) == sign(float(shown.slowdown.rstrip("%"))) and sign(raw) == sign(stored["slowdown"])


def test_a_drifting_machine_once_printed_a_slowdown_against_its_step_times() -> None:
    # A fast machine becomes slow while most steps are squeezed: squeezed steps take longer on average, yet each
    # squeezed window is shorter than its neighbours.
    windows = [
        (i % 2 == 1, [(300 + 8 * i) * (0.96 if i % 2 else 1)] * (3 if i < 9 or i % 2 == 0 else 9)) for i in range(19)
    ]
    plain = [np.mean([ms for of, times in windows if of is wanted for ms in times]) for wanted in (False, True)]
    main = main_figures(run_of(windows))
    assert plain[1] > plain[0], "the plain means say slower"
    assert main["slowdown"] == pytest.approx(-0.04, abs=0.002)
    assert main["step_ms_squeezed"] / main["step_ms_alone"] == pytest.approx(0.96, abs=0.002)
    assert agree(main)


@given(
    base_ms=st.floats(0.05, 50_000),
    drift=st.floats(-0.5, 2.0),
    slowdown=st.floats(-0.2, 0.2) | st.floats(-2e-4, 2e-4),
    noise=st.floats(0, 0.3),
    lengths=st.lists(st.integers(1, 6), min_size=4, max_size=14),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_printed_slowdown_has_the_sign_of_the_printed_times(
    base_ms: float, drift: float, slowdown: float, noise: float, lengths: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    windows = []
    for i, length in enumerate([3, *lengths]):  # alone, squeezed, alone, squeezed …
        squeezed = i % 2 == 1
        level_ms = base_ms * (1 + drift * i / len(lengths)) * (1 + slowdown * squeezed)
        windows.append((squeezed, list(level_ms * np.exp(noise * rng.standard_normal(length)))))
    main = main_figures(run_of(windows))
    assert agree(main), printed(main)


def test_the_text_of_a_drifting_run_agrees_for_the_run_and_for_its_rank(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    for i in range(11):
        for _ in range(9 if i % 2 and i > 4 else 3):
            rank.step(i % 2 == 1, (300 + 15 * i) * (0.96 if i % 2 else 1))
    rank.end()
    rank.write()
    text = render(build_report(tmp_path))
    printed_ms = re.search(r"([\d.]+) ms alone, ([\d.]+) ms squeezed.*\n.*?([-+][\d.]+)%, 95% CI", text)
    row = re.search(r"^ +0 +\d+ +([\d.]+) +([\d.]+) +([-+][\d.]+)% ", text, re.MULTILINE)
    assert printed_ms and row, text
    for alone, squeezed, slowdown in (printed_ms.groups(), row.groups()):
        assert float(slowdown) < -3 and float(squeezed) < float(alone)


def figures(slowdown: float | None, interval: list[float] | None) -> dict[str, Any]:
    ms = None if slowdown is None else 100 * (1 + slowdown)
    return {
        "step_ms_alone": 100.0,
        "step_ms_squeezed": ms,
        "slowdown": slowdown,
        "slowdown_ci95": interval,
        "slowdown_pairs": 30,
    }


@pytest.mark.parametrize(
    ("main", "sentence"),
    [
        (figures(0.0074, [-0.0406, 0.0554]), "no slowdown detected (±4.80%): +0.74%, 95% CI -4.06% to +5.54%, n = 30"),
        (figures(0.02, [0.01, 0.03]), "slowdown +2.00%, 95% CI +1.00% to +3.00%, n = 30"),
        (figures(-0.02, [-0.03, -0.01]), "no slowdown: -2.00%, 95% CI -3.00% to -1.00%, n = 30"),
        (figures(0.02, None), "slowdown +2.00%, too few comparisons for an interval"),
        (
            figures(-0.2, [-0.9, 11.7]),
            "slowdown unknown, steps vary too much to tell: -20.00%, 95% CI -90.00% to +1170.00%, n = 30",
        ),
        (figures(0.5, [0.1, 1.7]), "slowdown +50.00%, 95% CI +10.00% to +170.00%, n = 30"),
        (figures(-0.00001, [-0.001, 0.001]), "no slowdown detected (±0.10%): +0.00%, 95% CI -0.10% to +0.10%, n = 30"),
        (figures(None, None), "slowdown n/a: no block of steps left alone between squeezed ones"),
    ],
)
def test_the_verdict_is_what_the_interval_shows(main: dict[str, Any], sentence: str) -> None:
    assert verdict(main) == sentence


def test_detected_is_an_interval_above_zero() -> None:
    quiet = [(i % 2 == 1, [100.0 + 2 * (i % 2) + 0.1 * (i % 3)] * 4) for i in range(15)]
    noisy = [(i % 2 == 1, [100.0 + 30 * (i % 3)] * 4) for i in range(15)]
    assert main_figures(run_of(quiet))["slowdown_detected"] is True
    assert main_figures(run_of(noisy))["slowdown_detected"] is False
    assert main_figures(run_of(noisy[:4]))["slowdown_detected"] is None


def test_short_steps_have_as_many_decimals_as_their_difference_needs() -> None:
    main = {"step_ms_alone": 2.0, "step_ms_squeezed": 2.0002, "slowdown": 1e-4, "slowdown_ci95": None}
    assert printed(main) == ("2.0000", "2.0002", "+0.01%")
