"""Whether a study ends in time: what is left, how fast it goes, and what is said."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.search.choice.deadline import (
    ENOUGH_S,
    Deadline,
    DeadlineError,
    Outlook,
    Pace,
    Rate,
    Trained,
    judge,
    left_of_rungs,
    left_of_trials,
    rate_of,
)
from trials.search.deadline_outlook import DeadlineWatch
from trials.search.storage.measured import Minute

NOW = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)
STEADY = Rate(slow=0.1, mean=0.2, seen_s=1000.0)

TRIALS = st.lists(st.builds(Trained, st.integers(0, 27), st.sampled_from(["open", "ended", "failed"])), max_size=60)


# What is left


def test_a_study_that_has_not_begun_has_all_its_epochs_left() -> None:
    assert left_of_trials([], 10, 12) == 120
    assert left_of_rungs([], 27, 27, (1, 3, 9), 3) == 27 * 1 + 9 * 2 + 3 * 6 + 1 * 18


def test_the_pruner_is_taken_to_save_as_much_of_the_rest() -> None:
    trials = [*[Trained(12, "ended")] * 5, *[Trained(2, "ended")] * 5]
    assert left_of_trials(trials, 20, 12) == pytest.approx(120 * (1 - 50 / 120))


def test_trials_under_way_have_saved_nothing_yet_and_failed_ones_say_nothing() -> None:
    trials = [Trained(2, "ended"), Trained(6, "open"), Trained(0, "failed"), Trained(0, "open")]
    assert left_of_trials(trials, 4, 12) == pytest.approx((6 + 12) * (1 - 10 / 24))


def test_what_paused_trials_have_trained_is_not_left() -> None:
    paused = [Trained(1, "open")] * 27
    assert left_of_rungs(paused, 27, 27, (1, 3, 9), 3) == 9 * 2 + 3 * 6 + 18
    promoted = [*[Trained(3, "open")] * 9, *[Trained(1, "open")] * 18]
    assert left_of_rungs(promoted, 27, 27, (1, 3, 9), 3) == 3 * 6 + 18
    midway = [Trained(20, "open"), *[Trained(9, "open")] * 2, *[Trained(3, "open")] * 6, *[Trained(1, "open")] * 18]
    assert left_of_rungs(midway, 27, 27, (1, 3, 9), 3) == 7


def test_a_study_of_few_trials_completes_one_all_the_same() -> None:
    assert left_of_rungs([], 2, 9, (1, 3), 3) == 2 + 2 + 6


@given(TRIALS, st.integers(0, 80))
def test_nothing_is_left_exactly_when_every_trial_has_ended(trials: list[Trained], budget: int) -> None:
    is_over = len(trials) >= budget and all(each.state != "open" or each.epochs >= 27 for each in trials)
    left = left_of_trials(trials, budget, 27)
    assert 0 <= left <= 27 * max(budget, len(trials))
    assert (left == 0) == is_over or any(each.state == "ended" and not each.epochs for each in trials)
    if len(trials) >= budget and all(each.state != "open" for each in trials):
        assert left_of_rungs(trials, budget, 27, (1, 3, 9), 3) == 0


@given(TRIALS, st.integers(0, 80), st.data())
def test_an_epoch_more_leaves_at_most_as_much(trials: list[Trained], budget: int, data: st.DataObject) -> None:
    under_way = [index for index, each in enumerate(trials) if each.state == "open" and 0 < each.epochs < 27]
    if not under_way:
        return
    index = data.draw(st.sampled_from(under_way))
    later = [*trials[:index], Trained(trials[index].epochs + 1, "open"), *trials[index + 1 :]]
    assert left_of_trials(later, budget, 27) <= left_of_trials(trials, budget, 27)
    assert left_of_rungs(later, budget, 27, (1, 3, 9), 3) <= left_of_rungs(trials, budget, 27, (1, 3, 9), 3)


# How fast it goes


def minutes(*epochs: float, first: int = 100, lived_s: float = 60.0) -> list[Minute]:
    return [Minute(first + index, lived_s, each) for index, each in enumerate(epochs)]


def test_the_rate_is_that_of_the_slowest_tenth_of_the_minutes() -> None:
    found = rate_of(minutes(*[3.0] * 3, *[6.0] * 17), None, 1.0)
    assert found is not None
    assert found.slow == pytest.approx(3 / 60) and found.mean == pytest.approx(111 / 20 / 60)
    assert found.seen_s == 20 * 60
    two = rate_of(minutes(*[3.0] * 2, *[6.0] * 18), None, 1.0)
    assert two is not None and two.slow == pytest.approx(6 / 60), "two of twenty are a tenth"


def test_epochs_that_a_death_has_lost_do_not_count() -> None:
    found = rate_of(minutes(*[6.0] * 5), None, 0.5)
    assert found is not None and found.slow == pytest.approx(3 / 60)


def test_minutes_that_a_busy_worker_has_not_told_yet_do_not_count() -> None:
    found = rate_of(minutes(*[12.0] * 4, *[6.0] * 6), 103, 1.0)
    assert found is not None and found.seen_s == 240 and found.slow == pytest.approx(12 / 60)


def test_gaps_in_which_no_worker_lived_do_not_count() -> None:
    found = rate_of([*minutes(6.0, 6.0), *minutes(6.0, first=900)], None, 1.0)
    assert found is not None and found.seen_s == 180 and found.slow == pytest.approx(0.1)


def test_without_an_epoch_there_is_no_rate_and_with_idle_minutes_it_is_the_mean() -> None:
    assert rate_of([], None, 1.0) is None and rate_of(minutes(0.0, 0.0), None, 1.0) is None
    found = rate_of(minutes(0.0, 0.0, 6.0, 6.0), None, 1.0)
    assert found is not None and found.slow == found.mean == pytest.approx(12 / 240)


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=200))
def test_at_most_a_tenth_of_the_minutes_are_slower(epochs: list[float]) -> None:
    found = rate_of(minutes(*epochs), None, 1.0)
    assert found is not None
    assert sum(each / 60 < found.slow for each in epochs) <= 0.1 * len(epochs)
    assert min(epochs) / 60 <= found.slow <= max(epochs) / 60 + 1e-12


# What a worker notes


def test_epochs_are_spread_over_the_time_that_they_took() -> None:
    pace = Pace(0.0)
    pace.add(30.0, 150.0, 8)
    assert pace.changed() == [Minute(0, 30.0, 2.0), Minute(1, 60.0, 4.0), Minute(2, 30.0, 2.0)]


def test_pauses_are_lived_in_and_nothing_is_told_twice() -> None:
    pace = Pace(0.0)
    pace.add(0.0, 30.0, 1)
    pace.told(pace.changed(), 0.0)
    assert pace.changed() == []
    pace.add(90.0, 120.0, 1)
    assert pace.changed() == [Minute(0, 60.0, 1.0), Minute(1, 60.0, 1.0), Minute(2, 0.0, 0.0)]


@given(st.lists(st.tuples(st.floats(0.0, 500.0), st.floats(0.01, 500.0), st.integers(1, 16)), min_size=1, max_size=12))
def test_all_epochs_and_all_the_time_are_counted_once(spans: list[tuple[float, float, int]]) -> None:
    pace, now_s, told = Pace(0.0), 0.0, dict[int, Minute]()
    for pause_s, took_s, trials in spans:
        pace.add(now_s + pause_s, now_s + pause_s + took_s, trials)
        now_s += pause_s + took_s
        found = pace.changed()
        told |= {each.minute: each for each in found}
        pace.told(found, 0.0)
    assert sum(each.epochs for each in told.values()) == pytest.approx(sum(trials for *_, trials in spans))
    assert sum(each.lived_s for each in told.values()) == pytest.approx(now_s - spans[0][0], abs=1e-6)


@pytest.mark.parametrize("hours", [-1, 1, 24 * 365])
def test_a_clock_that_is_set_moves_later_minutes_and_no_epoch_is_lost(hours: int) -> None:
    pace = Pace(0.0)
    pace.add(36000.0, 36060.0, 4)
    pace.told(pace.changed(), hours * 3600.0)
    pace.add(36060.0, 36120.0, 4)
    assert sum(each.epochs for each in pace.changed()) == pytest.approx(4)
    assert {each.minute for each in pace.changed() if each.epochs} == {601 + 60 * hours}


# What is said


def outlook(left: float, rate: Rate | None = STEADY) -> Outlook:
    return Outlook(ended=2, trials=10, left=left, rate=rate)


def test_a_deadline_is_admitted_with_the_date_of_the_end() -> None:
    verdict = judge(outlook(360), Deadline.of("2026-12-01 09:00Z"), NOW)
    assert verdict.is_admitted
    assert verdict.text == (
        "deadline 2026-12-01 09:00Z: admitted, at its pace so far the study ends by 2026-12-01 09:00+00:00; "
        "2 of 10 trials have ended"
    )


def test_a_deadline_is_refused_with_the_date_of_the_end_and_what_ends_by_then() -> None:
    verdict = judge(outlook(720), Deadline.of("2026-12-01 09:00Z"), NOW)
    assert verdict.is_admitted is False
    assert verdict.text.endswith("ends by 2026-12-01 10:00+00:00; by the deadline 6 of 10 trials would have ended")


def test_a_deadline_that_has_passed_is_named() -> None:
    verdict = judge(outlook(720), Deadline.of("2026-12-01 07:00Z"), NOW)
    assert verdict.is_admitted is False and "07:00Z has passed; " in verdict.text


@pytest.mark.parametrize(
    ("rate", "why"),
    [(None, "because nothing has been trained"), (Rate(0.1, 0.1, ENOUGH_S - 1), "because too little has been trained")],
)
def test_without_a_rate_nothing_is_said_for_sure(rate: Rate | None, why: str) -> None:
    for deadline in (None, Deadline.of("2026-12-01 09:00Z"), Deadline.of("2020-12-01 09:00Z")):
        verdict = judge(outlook(720, rate), deadline, NOW)
        assert verdict.is_admitted is None and why in verdict.text


def test_a_short_study_is_judged_after_half_of_it() -> None:
    assert outlook(10, Rate(1.0, 1.0, 9.0)).left_s is None and outlook(10, Rate(1.0, 1.0, 10.0)).left_s == 10


def test_a_study_that_is_done_is_in_time_and_an_endless_one_has_no_date() -> None:
    assert judge(outlook(0, None), Deadline.of("2020-12-01 09:00Z"), NOW).is_admitted
    endless = judge(outlook(1e30), Deadline.of("2026-12-01 09:00Z"), NOW)
    assert endless.is_admitted is False and "in more than 100 years" in endless.text


@given(st.floats(1, 1e6), st.integers(-10000, 10000))
def test_it_is_admitted_exactly_if_the_end_is_no_later(left: float, minutes_ahead: int) -> None:
    by = NOW + timedelta(minutes=minutes_ahead)
    verdict = judge(outlook(left), Deadline.of(by.isoformat()), NOW)
    assert verdict.is_admitted == (minutes_ahead > 0 and NOW + timedelta(seconds=left / STEADY.slow) <= by)


def test_local_times_and_zones() -> None:
    east = timezone(timedelta(hours=5))
    assert Deadline.of("2026-12-01 08:00+05:00").show(NOW) == NOW.astimezone(east).isoformat(" ", "minutes")
    local = Deadline.of("2026-12-01 08:00")
    assert local.at == datetime(2026, 12, 1, 8).astimezone() and local.show(local.at) == "2026-12-01 08:00"


@pytest.mark.parametrize("text", ["", "tomorrow", "2026-12-01", "2026-13-01 08:00", "08:00", "0001-01-01 00:00+05:00"])
def test_other_texts_are_refused_in_words(text: str) -> None:
    with pytest.raises(DeadlineError, match=r"allowed: a date and a time, such as '2099-12-31 08:00'"):
        Deadline.of(text)


def watch(look: Callable[[], Outlook], now: list[float]) -> DeadlineWatch:
    return DeadlineWatch("2126-12-01 08:00", look, lambda: now[0])


def test_a_verdict_is_said_once_and_again_when_it_changes() -> None:
    now, left = [0.0], [360.0]
    seen = watch(lambda: outlook(left[0]), now)
    said = []
    for left[0] in (360.0, 361.0, 1e12, 1e12, 360.0):
        found = seen.judge()
        said.append(None if found is None else found["warns"])
        now[0] += 61
    assert said == [False, None, True, None, False]


def test_it_is_looked_at_once_a_minute_at_most() -> None:
    looks: list[float] = []
    now = [0.0]
    seen = watch(lambda: looks.append(now[0]) or outlook(360), now)
    for second in range(200):
        now[0] = float(second)
        seen.judge()
    assert looks == [0.0, 60.0, 120.0, 180.0]


def test_a_study_without_a_deadline_is_never_looked_at() -> None:
    assert DeadlineWatch(None, lambda: pytest.fail("a look")).judge() is None
