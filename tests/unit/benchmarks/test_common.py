"""How benchmarks alternate their windows, and turn them into figures."""

import math
import random
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.common import ratio_with_ci95
from benchmarks.utilization.baselines import BubbleSteps
from benchmarks.utilization.picture import picture, table
from benchmarks.utilization.window_figures import RankLog, Window, collect, mode_figures, recovery
from benchmarks.utilization.window_figures import pairs as pairs_of
from benchmarks.utilization.windowed_daemon import FORECASTS, WindowedMachine
from benchmarks.utilization.windows import GATED, Windows, WindowStep
from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.page.plan import plan_slot, plan_steps, planned_permit
from squeezer.config import GuardTable, SqueezeTable
from squeezer.policy.actions import PlanSlot, PlanSteps
from squeezer.policy.events import BubbleEnded, Event, JobAttached, Side, SideChanged, StepStarted
from squeezer.records.reader import RankRun
from squeezer.records.units import UNIT_DTYPE


def pairs(number: int, noise: float, truth: float, rng: random.Random) -> list[tuple[float, float]]:
    return [(100 * math.exp(truth + rng.gauss(0, noise)), 100.0) for _ in range(number)]


def test_equal_pairs_have_no_interval() -> None:
    value, interval = ratio_with_ci95([(101.0, 100.0)] * 5)
    assert [value, *interval] == pytest.approx([0.01] * 3)


def test_one_pair_has_an_unknown_interval() -> None:
    value, interval = ratio_with_ci95([(101.0, 100.0)])
    assert value == pytest.approx(0.01) and all(map(math.isnan, interval))


def test_the_interval_holds_the_truth_in_95_of_100_runs() -> None:
    rng = random.Random(2)
    held = []
    for _ in range(2000):
        low, high = ratio_with_ci95(pairs(8, 0.02, 0.003, rng))[1]
        held.append(low <= math.expm1(0.003) <= high)
    assert 0.935 < fmean(held) < 0.965


CYCLE = (("preemptive", 3), ("alone", 2), ("oracle", 3), ("naive", 2))
WINDOWS = Windows(observe=2, warm_up=4, cycle=CYCLE)


def test_windows_locate_every_step() -> None:
    found = [WINDOWS.locate(step) for step in range(1, WINDOWS.first_step(2))]
    assert [each.mode for each in found[:6]] == ["alone"] * 2 + ["preemptive"] * 4
    assert all(each.cycle == -1 for each in found[:6])
    expected = [
        WindowStep(cycle, window, mode, at)
        for cycle in range(2)
        for window, (mode, steps) in enumerate(CYCLE)
        for at in range(steps)
    ]
    assert found[6:] == expected


def test_the_warm_up_shows_the_daemon_both_modes() -> None:
    windows = Windows(observe=1, warm_up=6, cycle=(*CYCLE, ("cooperative", 2), ("alone", 2)))
    modes = [windows.locate(step).mode for step in range(1, windows.first_step(0))]
    assert modes == ["alone", *["cooperative"] * 3, "alone", *["preemptive"] * 2]
    assert windows.next_gated(1) == "cooperative" and windows.next_gated(5) == "preemptive"


def test_where_only_the_cooperative_mode_is_measured_the_whole_warm_up_is_cooperative() -> None:
    windows = Windows(observe=1, warm_up=6, cycle=(("cooperative", 2), ("unhooked", 2)))
    assert {windows.locate(step).mode for step in range(2, 8)} == {"cooperative"}


SHUFFLED = Windows(observe=2, warm_up=4, cycle=(("alone", 2), ("awake", 3), ("preemptive", 2)), shuffled=True)


def test_shuffled_windows_come_once_per_cycle_in_an_order_that_all_processes_know() -> None:
    orders = set()
    for cycle in range(60):
        first = SHUFFLED.first_step(cycle)
        found = [SHUFFLED.locate(step) for step in range(first, first + SHUFFLED.length)]
        assert {each.cycle for each in found} == {cycle}
        starts = [each.mode for each in found if each.at == 0]
        assert [each.mode for each in found] == [mode for mode in starts for _ in range(dict(SHUFFLED.cycle)[mode])]
        orders.add(tuple(starts))
        for step in range(first, first + SHUFFLED.length):
            assert SHUFFLED.next_gated(step) == "preemptive"
    assert orders == set(permutations(mode for mode, _ in SHUFFLED.cycle))
    again = Windows(**{field: getattr(SHUFFLED, field) for field in ("observe", "warm_up", "cycle", "shuffled")})
    assert all(again.locate(step) == SHUFFLED.locate(step) for step in range(1, 400))


@pytest.mark.parametrize("windows", [WINDOWS, SHUFFLED])
def test_windows_travel_by_the_environment(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in windows.environment().items():
        monkeypatch.setenv(name, value)
    assert Windows.of_environment() == windows


@pytest.mark.parametrize(
    ("cycle", "message"),
    [
        ((("preemptive", 2), ("cooperative", 2), ("alone", 1)), "cooperative follows preemptive"),
        ((("preemptive", 2), ("alone", 1), ("oracle", 1)), "preemptive follows oracle"),
        ((("preemptive", 2), ("greedy", 1)), "greedy"),
    ],
)
def test_windows_that_cannot_alternate_are_refused(cycle: tuple[tuple[str, int], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Windows(observe=1, warm_up=1, cycle=cycle)


def test_two_gated_modes_cannot_be_shuffled() -> None:
    with pytest.raises(ValueError, match="cannot be shuffled; allowed: one mode of"):
        Windows(observe=1, warm_up=1, cycle=(("preemptive", 2), ("alone", 1), ("cooperative", 2)), shuffled=True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[WindowedMachine]:
    for name, value in WINDOWS.environment().items():
        monkeypatch.setenv(name, value)
    made = WindowedMachine(SqueezeTable().policy(GuardTable()))
    yield made
    made.validate()


def test_the_windowed_daemon_squeezes_in_gated_windows_as_each_says(machine: WindowedMachine, tmp_path: Path) -> None:
    page = Page.open(page_path(tmp_path / "pages", 0))

    def feed(event: Event) -> None:
        for action in machine.handle(event):
            if isinstance(action, PlanSlot):
                plan_slot(page.words, action.slot, action.permit_ns)
            elif isinstance(action, PlanSteps):
                plan_steps(page.words, action.from_step, action.until_step)

    feed(SideChanged(Side.READY))
    feed(JobAttached())
    for step in range(1, WINDOWS.first_step(3)):
        mode = WINDOWS.locate(step).mode
        permit_ns, _ = planned_permit(page.words, step, 3)
        if step > 2:  # the first two are not forecast
            assert bool(permit_ns) == (mode in GATED), (step, mode)
            assert not planned_permit(page.words, step, 7)[0], "too short"
        if permit_ns:
            assert (permit_ns > 50_000_000) == (mode == "preemptive"), (step, mode)
        feed(StepStarted(step))
        feed(BubbleEnded(3, "RECV_GRAD", 50_000_000))
        feed(BubbleEnded(7, "RECV_GRAD", 1_500_000))
        assert step < 2 or page.words[Field.PERMITS + FORECASTS + 7] == 1_500
    page.close()


def test_a_whole_step_runs_if_it_fits_into_what_is_left_of_the_bubble(tmp_path: Path) -> None:
    page = Page.open(page_path(tmp_path / "pages", 0))
    words = page.words
    baseline = BubbleSteps(tmp_path / "pages", 0)
    words[Field.SLOT] = 5
    words[Field.PERMITS + FORECASTS + 5] = 10**7
    words[Field.BUBBLE_START_NS] = time.monotonic_ns()
    assert not baseline._fits(1.0), "no bubble"
    words[Field.BUBBLE] = 3
    assert baseline._fits(8.0e9) and not baseline._fits(8.4e9), "1.2 times the step"
    words[Field.BUBBLE_START_NS] -= 5 * 10**9
    assert baseline._fits(4.0e9) and not baseline._fits(4.3e9), "what is left"
    words[Field.SLOT] = 6
    assert not baseline._fits(1.0), "no forecast"
    page.close()


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
