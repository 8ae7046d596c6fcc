"""Whether a budget held, from runs whose true cost is known."""

import random
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.utilization.guarded_figures import GuardedStep, guarded_steps, harvests, interval_cost, judge, placebo
from benchmarks.utilization.picture import table

BUDGET = 0.01


def run_of(slowdown: float, *, until: int = 10_000, steps: int = 300, deviation: float = 0.005) -> list[GuardedStep]:
    """12 squeezed and 4 alone in turn; from step 101 squeezed ones are slower, and every other step twice as long."""
    noise = random.Random(1)
    made = []
    for step in range(1, steps + 1):
        at = (step - 1) % 16
        squeezed = at < 12
        modelled_ms = 200.0 if step > 100 and step % 2 else 100.0
        slow = slowdown if squeezed and 100 < step < until else 0.0
        ms = modelled_ms * (1 + slow) * noise.gauss(1, deviation)
        times = {"ms": ms, "modelled_ms": modelled_ms, "bubble_ms": 40.0}
        times |= {"side_ms": 30.0 * squeezed, "overrun_ms": 0.1 * squeezed}
        made.append(GuardedStep(step=step, squeezed=squeezed, carries_over=at in (0, 12), work=80 * squeezed, **times))
    return made


def test_a_budget_that_holds_is_said_to_hold_whatever_the_model_says_of_each_step() -> None:
    found = judge(run_of(0.0), 101, BUDGET)
    assert found["held"] and found["intervals"] == 300 - 110 - 50 + 1
    assert abs(found["over_all"]["cost"]) < 0.003
    assert found["worst_overrun_share"] == pytest.approx(0.0005, rel=0.2)


def test_a_broken_budget_is_found_with_its_worst_interval() -> None:
    found = judge(run_of(0.05, until=200), 101, BUDGET)
    assert not found["held"]
    assert found["worst"]["cost"] == pytest.approx(0.05 * 0.75, abs=0.006)
    low, high = found["worst"]["cost_ci95"]
    assert BUDGET < low < found["worst"]["cost"] < high
    assert found["worst"]["first_step"] < 170


def test_harm_of_the_first_ten_steps_alone_does_not_count() -> None:
    assert judge(run_of(0.2, until=111), 101, BUDGET)["held"]


def test_where_nothing_is_squeezed_nothing_is_lost_and_without_steps_alone_nothing_is_known() -> None:
    steps = run_of(0.0)
    alone = [s for s in steps if not s.squeezed]
    cost = interval_cost(alone)
    assert cost is not None and cost["cost"] == 0.0
    assert interval_cost([s for s in steps if s.squeezed]) is None


def test_the_interval_of_a_cost_holds_the_truth_in_95_of_100() -> None:
    noise = random.Random(3)

    def one() -> bool:
        steps = [
            GuardedStep(
                step=step,
                squeezed=step % 16 < 12,
                carries_over=False,
                ms=100 * (1.02 if step % 16 < 12 else 1) * noise.gauss(1, 0.02),
                modelled_ms=100.0,
                work=0,
                bubble_ms=0.0,
                side_ms=0.0,
                overrun_ms=0.0,
            )
            for step in range(48)
        ]
        cost = interval_cost(steps)
        assert cost is not None
        low, high = cost["cost_ci95"]
        return bool(low <= 0.015 <= high)

    assert 0.92 < sum(one() for _ in range(1000)) / 1000 < 0.98


def told_of(steps: list[GuardedStep]) -> dict[str, Any]:
    """What a result keeps of the steps."""
    columns = {name: [getattr(s, name) for s in steps] for name in ("squeezed", "ms", "modelled_ms")}
    return {"steps": columns, "disturbed_step": 101, "budget": BUDGET}


def test_what_squeezing_costs_is_no_noise_and_what_hits_any_step_is() -> None:
    harmed = run_of(0.05)
    assert not judge(harmed, 101, BUDGET)["held"]
    found = placebo(told_of(harmed))
    assert found["held"] and found["intervals"] > 50
    assert abs(found["over_all"]["cost"]) < 0.005
    # what makes the last steps of a window shorter is not squeezing, of which all of them have the same
    at_odds = [replace(s, ms=s.ms * (0.9 if s.squeezed and (s.step - 1) % 16 >= 8 else 1)) for s in run_of(0.0)]
    assert not placebo(told_of(at_odds))["held"]


def test_a_few_squeezed_steps_that_happen_to_be_equal_are_not_thereby_sure() -> None:
    steps = run_of(0.0, deviation=0.03)[:60]
    equal = [replace(s, ms=s.modelled_ms * 1.03) if s.squeezed else s for s in steps]
    few = [s for s in equal if not s.squeezed] + [s for s in equal if s.squeezed and not s.carries_over][:3]
    cost = interval_cost(few)
    assert cost is not None
    low, high = cost["cost_ci95"]
    assert (high - low) / cost["squeezed_share"] > 2 * 0.03


def test_harvest_is_told_before_and_after() -> None:
    found = harvests(run_of(0.0), 101, 200, 4.0)
    assert set(found) == {"before", "first_10", "disturbed", "last_60"}
    assert found["last_60"]["harvest"] == pytest.approx(80 / (4.0 * 40.0))
    assert found["last_60"]["fill"] == pytest.approx(30 / 40)
    assert found["before"]["squeezed_share"] == pytest.approx(0.75, abs=0.05)


def test_steps_are_read_from_the_records() -> None:
    def step(number: int, squeezed: bool | None, work: int) -> dict[str, Any]:
        return {"step": number, "squeezed": squeezed, "start_ns": 0, "end_ns": 100_000_000, "work": work}

    bubble: dict[str, Any] = {
        "step": 2,
        "start_ns": 0,
        "end_ns": 30_000_000,
        "permit_until_ns": 1,
        "overrun_ns": 200_000,
        "side_ns": 20_000_000,
    }
    labels = [True, True, True, False, False, None]
    records: dict[str, list[dict[str, Any]]] = {
        "step": [step(number, label, 10 * number) for number, label in enumerate(labels, start=1)],
        "bubble": [bubble, {**bubble, "permit_until_ns": None}, {**bubble, "overrun_ns": None}],
    }
    steps = guarded_steps(records, [100.0] * 6)
    assert [s.carries_over for s in steps] == [True, False, False, False, False, False], "a window of two has no first"
    assert (steps[1].work, steps[1].bubble_ms, steps[1].side_ms, steps[1].overrun_ms) == (10, 90.0, 60.0, 0.2)
    assert steps[1].ratio == 1.0


def test_the_table_tells_what_the_guard_did() -> None:
    steps = run_of(0.0)
    run = {
        "scenario": "guarded_jitter",
        "guarded": judge(steps, 101, BUDGET),
        "harvest": harvests(steps, 101, 200, 4.0),
        **told_of(steps),
        "decisions": [{"step": 120, "what": "go_on", "cause": "cusum"}, {"step": 7, "what": "widen", "cause": ""}],
    }
    text = table({"name": "x", "machine": {"cores": 2, "cpu": "c"}, "date": "d", "commit": "c", "runs": [run]})
    (row,) = [line for line in text.splitlines() if line.startswith("| guarded_jitter")]
    assert "| 0 of 141 | 0 of " in row and row.endswith("| 120: go on cusum |")
