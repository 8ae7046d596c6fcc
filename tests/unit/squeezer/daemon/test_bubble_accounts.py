"""Every nanosecond of bubble time is counted once, and what the side task used is what it reports."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hooks.shared.statuses import Progress
from squeezer.daemon.bubble_accounts import NOTHING, BubbleCounter, Shut
from squeezer.records.facts import Bubble


def bubble(
    length_ns: int,
    side_ns: int | None = 0,
    permit: bool = True,
    overrun_ns: int | None = 0,
    main_ns: int | None = None,
) -> Bubble:
    return Bubble(
        step=1,
        epoch=1,
        slot=3,
        wait="RECV_GRAD",
        start_ns=100,
        forecast_ns=None,
        permit_until_ns=100 + length_ns if permit else None,
        end_ns=100 + length_ns,
        squeezed=True,
        side_ns=side_ns,
        main_ns=main_ns,
        stopped=False,
        overrun_ns=overrun_ns,
    )


TRAINS = Progress(100, 4, 8, 25.0, 1.0, 2.0, 6)


@given(
    st.lists(
        st.tuples(
            *(st.integers(1, 10**9), st.integers(0, 10**9), st.none() | st.integers(0, 10**9)),
            *(st.booleans(), st.sampled_from([None, *Shut]), st.booleans()),
            *(st.none() | st.integers(0, 2 * 10**9), st.booleans()),
        )
    )
)
def test_each_bubble_is_counted_once(
    bubbles: list[tuple[int, int, int | None, bool, Shut | None, bool, int | None, bool]],
) -> None:
    counter = BubbleCounter()
    for length_ns, side_ns, main_ns, permit, shut, trains, ready_ns, ended in bubbles:
        if ready_ns is not None:
            counter.ready(ready_ns, 0.0)
        counter.progress(replace(NOTHING, trials_running=int(trains)))
        counter.bubble(bubble(length_ns, side_ns, permit, main_ns=main_ns), shut, side_ns)
        if ended:
            counter.side_ended()
    found = counter.take()
    parts = ("ended", "starting", "alone", "guard", "unopened", "unmeasured", "search", "unused", "main", "side")
    assert all(found[f"{part}_ns"] >= 0 for part in parts)
    assert sum(found[f"{part}_ns"] for part in parts) == found["bubble_ns"] == sum(each[0] for each in bubbles)
    assert not any(counter.take().values()), "what was taken is not counted again"


@pytest.mark.parametrize("shut", list(Shut))
def test_a_step_that_is_not_for_trials_says_why(shut: Shut) -> None:
    counter = BubbleCounter()
    counter.bubble(bubble(50, side_ns=20), shut, 0)
    assert {name: value for name, value in counter.take().items() if value} == {
        "bubble_ns": 50,
        f"{shut.value}_ns": 50,
    }


def test_idle_time_is_the_search_s_while_no_trial_trains() -> None:
    counter = BubbleCounter()
    counter.bubble(bubble(50, side_ns=20), None, 0)
    counter.progress(TRAINS)
    counter.bubble(bubble(70, side_ns=60), None, 0)
    counter.progress(replace(TRAINS, trials_running=0))
    counter.bubble(bubble(9), None, 0)
    found = counter.take()
    assert (found["search_ns"], found["unused_ns"], found["side_ns"]) == (30 + 9, 10, 80)


def test_what_runs_on_uses_bubbles_that_stay_shut() -> None:
    counter = BubbleCounter()
    counter.progress(TRAINS)
    counter.bubble(bubble(50_000_000, 20_000_000, permit=False, overrun_ns=7_000_000), None, 20_000_000)
    counter.side_ended()
    found = counter.take()
    assert (found["unopened_ns"], found["side_ns"], found["overrun_ns"]) == (30_000_000, 20_000_000, 7_000_000)
    assert found["lost_ms"] == 27.0, "of which no process has reported"


def test_what_the_main_job_itself_uses_is_nobodys_loss() -> None:
    counter = BubbleCounter()
    counter.bubble(bubble(50, side_ns=20, main_ns=5), None, 0)
    counter.progress(TRAINS)
    counter.bubble(bubble(70, side_ns=60, main_ns=7), None, 0)
    counter.bubble(bubble(9, permit=False, main_ns=3), None, 0)
    found = counter.take()
    assert (found["main_ns"], found["search_ns"], found["unused_ns"], found["unopened_ns"]) == (12, 25, 3, 9)


def test_a_bubble_in_which_the_side_task_became_ready_is_for_starting_until_then() -> None:
    counter = BubbleCounter()
    counter.ready(100 + 30, 2e-3)
    counter.bubble(bubble(50, side_ns=45), None, 2000 + 18)
    counter.ready(100 + 300, 3e-3)
    counter.bubble(bubble(60, side_ns=45), None, 2900)
    found = counter.take()
    assert (found["starting_ns"], found["side_ns"], found["search_ns"]) == (30 + 60, 18, 2)


def test_so_is_one_of_a_step_that_began_before_the_daemon_heard_of_it() -> None:
    counter = BubbleCounter()
    counter.bubble(bubble(50, side_ns=45), Shut.STARTING, 2000)
    counter.ready(100 + 30, 2e-3)
    counter.bubble(bubble(50, side_ns=45), Shut.STARTING, 2000 + 18)
    found = counter.take()
    assert (found["starting_ns"], found["side_ns"], found["search_ns"]) == (50 + 30, 18, 2)


def test_what_comes_after_a_process_has_ended_is_for_starting_the_next() -> None:
    counter = BubbleCounter()
    counter.ready(100, 2e-3)
    counter.side_ended()
    counter.bubble(bubble(50, permit=False), Shut.STARTING, 2000)
    assert counter.take()["starting_ns"] == 50


def test_reports_are_sums_of_one_process() -> None:
    counter = BubbleCounter()
    counter.progress(replace(TRAINS, work=40, samples=10.0, busy_ms=1.5))
    counter.progress(TRAINS)
    counter.side_ended()
    counter.progress(replace(TRAINS, work=7, epochs=1, lost=0))
    found = counter.take()
    assert found["work"] == 107 and found["samples"] == 50.0 and found["busy_ms"] == 4.0


def test_what_a_dead_process_has_not_saved_is_lost() -> None:
    counter = BubbleCounter()
    counter.progress(TRAINS)
    counter.bubble(bubble(70, side_ns=60, overrun_ns=5), None, 0)
    counter.side_ended()
    found = counter.take()
    assert found["lost_work"] == TRAINS.lost
    assert found["lost_ms"] == pytest.approx(65e-6, abs=1e-3) and found["overrun_ns"] == 5
    counter.side_ended()
    assert not counter.take()["lost_work"], "once"


def test_where_the_host_sees_nothing_the_side_task_measures() -> None:
    counter = BubbleCounter()
    counter.bubble(bubble(70, side_ns=None, overrun_ns=None), None, 0)
    counter.overran(8)
    found = counter.take()
    assert (found["unmeasured_ns"], found["overrun_ns"], found["side_ns"]) == (70, 8, 0)
