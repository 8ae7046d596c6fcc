"""The figures against hand-computed values, a brute-force count, and a simulation."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hooks.shared.unit_record import UNIT_RECORD
from squeezer.records.reader import StepTime
from squeezer.records.units import UNIT_DTYPE
from squeezer.reports.metrics import main_figures, mean_over_ranks, resumes

MS = 1_000_000


def steps_of(
    pattern: Sequence[tuple[bool | None, Sequence[float]]], job: int = 0, ranks: tuple[int, ...] = (0,), first: int = 1
) -> list[StepTime]:
    """Steps one after another from (squeezed, step times in ms) per window."""
    flat = [(squeezed, ms) for squeezed, times in pattern for ms in times]
    starts = np.cumsum([0, *(ms for _, ms in flat)]) * MS
    return [
        StepTime(job, first + i, squeezed, round(starts[i]), round(starts[i] + ms * MS), ms * MS, ranks)
        for i, (squeezed, ms) in enumerate(flat)
    ]


def units_of(*units: tuple[int, int, int]) -> np.ndarray:
    return np.array([(start, wall, cpu, 0, 0) for start, wall, cpu in units], UNIT_DTYPE)


def resumes_of(bubbles: list[tuple[int, int]], units: np.ndarray) -> tuple[list[Any], ...]:
    starts, ends = (np.array([b[i] for b in bubbles], np.int64) for i in (0, 1))
    return tuple(column.tolist() for column in resumes(starts, ends, units))


def test_units_have_the_layout_of_the_record() -> None:
    assert UNIT_DTYPE.itemsize == UNIT_RECORD.size
    assert np.frombuffer(UNIT_RECORD.pack(-1, 2, 3, -4, 5), UNIT_DTYPE)[0].tolist() == (-1, 2, 3, -4, 5)


def test_warm_up_does_not_count_and_starts_anew_with_each_job() -> None:
    for job in (0, 1):
        steps = steps_of([(False, [500, 500, 100]), (True, [100]), (False, [100]), (True, [100, 100])], job=job)
        assert main_figures(steps)["step_ms_alone"] == pytest.approx(100)
    both = main_figures(steps_of([(True, [500, 500, 100]), (False, [100]), (True, [100])]) + steps)
    assert (both["slowdown"], both["slowdown_pairs"]) == (pytest.approx(0), 2)


def test_slowdown_is_exact_where_every_step_is() -> None:
    alone, squeezed = (False, [100, 100]), (True, [102] * 5)
    got = main_figures(steps_of([(False, [500, 500]), squeezed, alone, squeezed, alone, squeezed]))
    assert got["steps"] == 21
    assert (got["step_ms_alone"], got["step_ms_squeezed"]) == pytest.approx((100, 102))
    assert got["slowdown"] == pytest.approx(0.02)
    assert got["slowdown_ci95"] == pytest.approx([0.02, 0.02])
    assert got["slowdown_pairs"] == 2


def test_steps_in_which_the_side_task_only_starts_are_neither_squeezed_nor_a_baseline() -> None:
    starting, squeezed, alone = (None, [900] * 4), (True, [102, 102]), (False, [100, 100])
    got = main_figures(steps_of([(False, [500, 500, 100]), starting, squeezed, alone, squeezed, starting, alone]))
    assert (got["step_ms_alone"], got["step_ms_squeezed"]) == pytest.approx((100, 102))
    assert got["slowdown"] == pytest.approx(0.02)
    labels = ((False, False), (False, None), (None, True))
    merged = mean_over_ranks([steps_of([(pair[rank], [1]) for pair in labels], ranks=(rank,)) for rank in (0, 1)])
    assert [step.squeezed for step in merged] == [False, None, True]


def test_a_steady_drift_is_no_slowdown() -> None:
    pattern = [(i % 2 == 1, [100.0 + i] * 9) for i in range(21)]
    got = main_figures(steps_of(pattern))
    assert got["slowdown"] == pytest.approx(0, abs=1e-4)


def test_interval_of_two_comparisons_by_hand() -> None:
    squeezed, alone = (True, [110] * 9), (False, [100])
    got = main_figures(
        steps_of([(True, [9, 9]), (True, [100] * 4), alone, (True, [100] * 5), squeezed, alone, squeezed])
    )
    logs = [0.0, math.log(1.1)]
    half = 12.7062 * math.sqrt(np.var(logs, ddof=1) / 2)
    low, high = (math.exp(np.mean(logs) + sign * half) - 1 for sign in (-1, 1))
    assert got["slowdown_ci95"] == pytest.approx([low, high], rel=1e-4)


def test_no_interval_from_one_comparison_and_no_slowdown_from_none() -> None:
    one = main_figures(steps_of([(False, [100] * 5), (True, [101] * 5), (False, [100] * 2), (True, [101] * 5)]))
    assert one["slowdown"] == pytest.approx(0.01)
    assert one["slowdown_ci95"] is None
    for pattern in ([(True, [100] * 5)], [(False, [100] * 5), (True, [100] * 5)]):
        none = main_figures(steps_of(pattern))
        assert (none["slowdown"], none["slowdown_ci95"], none["slowdown_pairs"]) == (None, None, 0)


def test_interval_holds_the_truth_in_95_of_100_runs() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(600):
        pattern = [(i % 2 == 1, list(rng.normal(101 if i % 2 else 100, 2, 9 if i % 2 else 2))) for i in range(25)]
        low, high = main_figures(steps_of(pattern))["slowdown_ci95"]
        held += low <= 0.01 <= high
    assert 0.93 <= held / 600 <= 0.97


def test_steps_of_all_ranks_are_averaged() -> None:
    ours = steps_of([(False, [100, 100]), (False, [100])])
    theirs = steps_of([(False, [110, 90]), (True, [100])], ranks=(1,))
    got = mean_over_ranks([ours, theirs])
    assert [s.duration_ns / MS for s in got] == [105, 95, 100]
    assert [s.squeezed for s in got] == [False, False, True]
    assert {s.ranks for s in got} == {(0, 1)}


def test_a_rank_that_missed_steps_is_not_compared_with_itself_and_others() -> None:
    blocks = [(False, [100] * 2), (True, [100] * 5)] * 3
    fast = steps_of(blocks)
    slow = [s._replace(ranks=(1,), job=3, duration_ns=2 * s.duration_ns) for s in fast[:14]]
    got = main_figures(mean_over_ranks([fast, slow]))
    assert (got["slowdown"], got["slowdown_pairs"]) == (pytest.approx(0), 1), "not those where the mean changes"


def test_equal_step_numbers_at_other_times_are_other_steps() -> None:
    first = steps_of([(False, [100, 100])])
    again = [s._replace(job=1, start_ns=s.start_ns + 10**12, end_ns=s.end_ns + 10**12) for s in first]
    assert mean_over_ranks([first + again]) == first + again


def test_resumes_by_hand() -> None:
    bubbles = [(100, 200), (300, 400), (500, 600), (700, 800)]
    units = units_of((90, 5, 5), (120, 50, 40), (170, 50, 45), (310, 200, 60))
    assert resumes_of(bubbles, units) == ([20, 10, -1, -1], [True, True, True, False])


def test_resumes_of_nothing() -> None:
    assert resumes_of([], units_of((1, 2, 3))) == ([], [])
    assert resumes_of([(1, 2)], units_of()) == ([-1], [False])


@given(
    edges=st.lists(st.integers(0, 300), min_size=2, max_size=12, unique=True).map(sorted),
    units=st.lists(st.tuples(st.integers(-20, 320), st.integers(1, 90), st.integers(0, 90)), max_size=12),
)
def test_resumes_agree_with_counting(edges: list[int], units: list[tuple[int, int, int]]) -> None:
    bubbles = list(zip(edges[0::2], edges[1::2], strict=False))
    units.sort()
    resume, ran = resumes_of(bubbles, units_of(*units))
    for i, (start, end) in enumerate(bubbles):
        starts = [s - start for s, _, _ in units if start <= s < end]
        assert resume[i] == (min(starts, default=0) or -1), "0: the rest of one that was stopped"
        assert ran[i] == any(s < end and s + wall > start for s, wall, _ in units)
