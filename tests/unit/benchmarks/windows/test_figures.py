"""The figures of windows."""

import numpy as np
import pytest

from benchmarks.windows.figures import RankLog, Window, collect
from benchmarks.windows.modes import Windows
from squeezer.records.reader import RankRun
from squeezer.records.units import UNIT_DTYPE

WINDOWS = Windows(observe=2, warm_up=4, cycle=(("preemptive", 3), ("alone", 2), ("cooperative", 3), ("naive", 2)))


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
        bubbles.append({"step": step, "start_ns": begin_ns, "end_ns": end_ns})
    run = RankRun(rank=0, records={"step": steps, "bubble": bubbles}, units=np.zeros(0, UNIT_DTYPE), groups=())
    return RankLog(run=run, baselines={"naive": naive}, work_per_s={0: 1000.0})


def test_each_window_has_its_own_steps_work_and_bubbles() -> None:
    step_ms = {"alone": 100.0, "preemptive": 101.0, "cooperative": 100.0, "naive": 150.0}
    work = {"preemptive": 30, "cooperative": 40, "naive": 60}
    found = collect(WINDOWS, [rank_log(step_ms, work)] * 2)
    assert [(each.cycle, each.mode) for each in found] == [
        (cycle, mode) for cycle in range(3) for mode, _ in WINDOWS.cycle
    ]
    for window in found:
        steps = dict(WINDOWS.cycle)[window.mode] - 1
        assert window.step_ms == [step_ms[window.mode]] * steps, "without the first, which takes twice as long"
        assert window.bubble_ms == pytest.approx(2 * steps * step_ms[window.mode] / 2), "of both ranks"
        assert window.capacity == pytest.approx(window.bubble_ms), "of 1000 per second"
        assert window.work == 2 * steps * work.get(window.mode, 0)
        assert Window(**window.raw()) == window


def test_a_cycle_counts_against_the_dedicated_rate_of_its_own_time() -> None:
    log = rank_log(dict.fromkeys(("alone", "preemptive", "cooperative", "naive"), 100.0), {"naive": 1})
    drifting = RankLog(run=log.run, baselines=log.baselines, work_per_s={0: 1000.0, 1: 500.0})
    capacities = {each.cycle: each.capacity for each in collect(WINDOWS, [drifting]) if each.mode == "preemptive"}
    assert capacities == pytest.approx({0: 100.0, 1: 50.0, 2: 75.0}), "the mean where a cycle has none"
