"""The figures of windows."""

from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.utilization.picture import picture, table
from benchmarks.windows.figures import RankLog, Window, collect, mode_figures, recovery
from benchmarks.windows.figures import pairs as pairs_of
from benchmarks.windows.modes import Windows
from squeezer.records.reader import RankRun
from squeezer.records.units import UNIT_DTYPE

WINDOWS = Windows(observe=2, warm_up=4, cycle=(("preemptive", 3), ("alone", 2), ("oracle", 3), ("naive", 2)))


def rank_log(step_ms: dict[str, float], work: dict[str, int], *, cycles: int = 3) -> RankLog:
    """Records of a rank whose steps take `step_ms` and give `work` by mode; half of each step is bubble."""
    steps, bubbles, naive = [], [], []
    now_ns = done = 0
    for step in range(1, WINDOWS.first_step(cycles)):
        place = WINDOWS.locate(step)
        is_first = place.at == 0 and place.cycle >= 0
        begin_ns, now_ns = now_ns, now_ns + round(step_ms[place.mode] * (2 if is_first else 1) * 1e6)
        if place.mode == "naive":
            naive.append((now_ns - 1, work["naive"], 1))
        else:
            done += work.get(place.mode, 0)
        steps.append({"step": step, "start_ns": begin_ns, "end_ns": now_ns, "work": done})
        end_ns = (begin_ns + now_ns) // 2
        bubbles.append({"step": step, "start_ns": begin_ns, "end_ns": end_ns, "side_ns": (end_ns - begin_ns) // 2})
    run = RankRun(rank=0, records={"step": steps, "bubble": bubbles}, units=np.zeros(0, UNIT_DTYPE), groups=())
    return RankLog(run=run, baselines={"naive": naive}, work_per_s={0: 1000.0})


def test_each_mode_is_told_by_its_own_steps_work_and_bubbles() -> None:
    step_ms = {"alone": 100.0, "preemptive": 101.0, "oracle": 100.0, "naive": 150.0}
    work = {"preemptive": 30, "oracle": 40, "naive": 60}
    found = collect(WINDOWS, [rank_log(step_ms, work)] * 2)
    figures = mode_figures(found)
    assert found[0].computing_ms == pytest.approx(50.5), "of a step on a rank"
    assert figures["cooperative"] is None and figures["step_grain"] is None
    preemptive, oracle, naive = (figures[mode] for mode in ("preemptive", "oracle", "naive"))
    assert preemptive and oracle and naive
    assert preemptive["slowdown"] == pytest.approx(0.01) and preemptive["slowdown_ci95"] == pytest.approx([0.01, 0.01])
    assert preemptive["steps"] == 6, "without the first of each window, which takes twice as long"
    assert preemptive["harvest"] == pytest.approx(30 / 50.5)
    assert preemptive["fill"] == pytest.approx(0.5)
    assert oracle["harvest"] == pytest.approx(40 / 50)
    assert naive["harvest"] == pytest.approx(60 / 75) and naive["fill"] is None
    assert all(w.busy_ms == pytest.approx(2e-6) for w in found if w.mode == "naive"), "of both ranks"
    assert naive["slowdown"] == pytest.approx(0.5)
    assert naive["net_gain"] == pytest.approx(60 / 150 + 100 / 150 - 1)


def test_a_window_is_compared_with_those_alone_beside_it() -> None:
    step_ms = [100.0, 101.0, 102.0, 150.0, 200.0, 206.0, 208.0]  # the machine becomes slower by half
    modes = ["alone", "preemptive", "alone", "naive", "alone", "preemptive", "alone"]
    windows = [
        Window(cycle=i // 4, mode=mode, step_ms=[ms, ms])
        for i, (mode, ms) in enumerate(zip(modes, step_ms, strict=True))
    ]
    assert pairs_of(windows, "preemptive") == [(101.0, 101.0), (206.0, 204.0)]
    assert pairs_of(windows, "naive") == [(150.0, 151.0)]
    assert pairs_of(windows[1:2], "preemptive") == [], "nothing to compare it with"


def test_a_fill_that_comes_back_has_recovered() -> None:
    step_ms = dict.fromkeys(("alone", "preemptive", "oracle", "naive"), 100.0)
    found = collect(WINDOWS, [rank_log(step_ms, {"preemptive": 30, "oracle": 40, "naive": 60}, cycles=4)])
    for window in found:
        if window.mode == "oracle" and window.cycle >= 1:
            window.work *= 0.8
            window.busy_ms *= 0.8
        elif window.cycle >= 1:
            window.work *= 0.7  # a slower machine
    recoveries = recovery(found, 1, 2)
    assert recoveries["preemptive"]["recovered"] and not recoveries["oracle"]["recovered"]
    assert recovery(found, 1, 2, resized=True)["oracle"]["recovered"], "less, but all that there is"
    assert recoveries["oracle"]["harvest"]["before"] == pytest.approx(0.8)
    assert recoveries["oracle"]["harvest"]["after"] == pytest.approx(0.64)
    assert recoveries["oracle"]["fill"]["after"] == pytest.approx(0.8 * recoveries["oracle"]["fill"]["before"])


def test_table_and_picture_show_every_scenario_and_mode() -> None:
    step_ms = {"alone": 100.0, "preemptive": 101.0, "oracle": 100.0, "naive": 150.0}
    figures = mode_figures(collect(WINDOWS, [rank_log(step_ms, {"preemptive": 30, "oracle": 40, "naive": 60})]))
    run = {"scenario": "ghost_4_1_4", "step_ms_alone": 100.0, "baselines": figures}
    content = {"name": "n", "date": "d", "commit": "c", "machine": {"cores": 2, "cpu": "x"}, "runs": [run]}
    text = table(content)
    assert "| ghost_4_1_4 | 100 | +1.0 [+1.0, +1.0] / 59 | n/a |" in text
    assert "+50.0" in text
    root = ElementTree.fromstring(picture([run]))
    words = [element.text for element in root.iter() if element.text]
    assert "ghost 4 1 4" in words and "+50" in words, "what does not fit onto the axis stands beside it"
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == 6 + 2 * 3, "a legend of six, and two panels of three modes"
