"""Turns at submitted studies: when one is over, and what is noted of it."""

import signal
from pathlib import Path

import pytest

from ds_hooks.shared.submissions import MOST_DEATHS, Submission, Submissions, Used
from trials.gate.base import StopRequested
from trials.side_task import turn as turn_module
from trials.side_task.turn import NOTE_EVERY_S, Turn, TurnOver, wait_for_turn

TURN_S = 600.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def submissions(tmp_path: Path) -> Submissions:
    return Submissions(tmp_path)


def submit(submissions: Submissions, name: str, priority: int = 0) -> Submission:
    submissions.submit(Submission(name=name, study=Path("study.py"), priority=priority))
    return named(submissions, name)


def named(submissions: Submissions, name: str) -> Submission:
    return next(each for each in submissions.submissions() if each.name == name)


def begin(submissions: Submissions, submission: Submission, clock: Clock) -> Turn:
    turn = Turn(submissions, submission, "w", TURN_S, clock)
    turn.busy_s = lambda: clock.now_s / 2
    return turn


def test_it_lasts_while_no_other_study_waits(submissions: Submissions) -> None:
    clock = Clock()
    turn = begin(submissions, submit(submissions, "a"), clock)
    for _ in range(50):
        clock.now_s += NOTE_EVERY_S
        assert not turn.is_over()
    assert submissions.used(named(submissions, "a"))["w"].used_s == clock.now_s / 2


def test_it_is_over_after_its_time_if_another_study_waits(submissions: Submissions) -> None:
    clock = Clock()
    turn = begin(submissions, submit(submissions, "a"), clock)
    submit(submissions, "b")
    clock.now_s = TURN_S - 1
    assert not turn.is_over()
    clock.now_s = TURN_S + NOTE_EVERY_S
    assert turn.is_over()


def test_a_higher_priority_does_not_wait_for_its_end_nor_does_a_withdrawal(submissions: Submissions) -> None:
    clock = Clock()
    turn = begin(submissions, submit(submissions, "a"), clock)
    submit(submissions, "urgent", priority=1)
    assert not turn.is_over(), "files are looked at once a minute"
    clock.now_s += NOTE_EVERY_S
    assert turn.is_over()
    submissions.end(named(submissions, "urgent"), "done")
    clock.now_s += NOTE_EVERY_S
    assert not turn.is_over()
    submissions.withdraw("a")
    clock.now_s += NOTE_EVERY_S
    assert turn.is_over()


def test_a_study_that_was_withdrawn_is_left_at_once_if_others_wait_or_it_was_submitted_again(
    submissions: Submissions,
) -> None:
    for other in ("b", "a"):
        clock = Clock()
        turn = begin(submissions, submit(submissions, "a"), clock)
        submissions.withdraw("a")
        submit(submissions, other)
        clock.now_s = NOTE_EVERY_S
        assert turn.is_over()
        turn.end("done")
    assert submissions.ended(named(submissions, "a")) is None, "what ended is not what waits now"


def test_a_study_without_work_is_left_only_for_another_that_may_have_some(submissions: Submissions) -> None:
    clock = Clock()
    turn = begin(submissions, submit(submissions, "a"), clock)
    clock.now_s += NOTE_EVERY_S
    assert not turn.may_be_left()
    submit(submissions, "b")
    clock.now_s += NOTE_EVERY_S
    assert turn.may_be_left()
    with pytest.raises(TurnOver), turn.noted():
        raise TurnOver(is_idle=True)
    other = wait_for_turn(submissions, "w", TURN_S)
    assert other is not None and other.submission.name == "b"
    clock.now_s += NOTE_EVERY_S
    assert not Turn(submissions, other.submission, "w", TURN_S, clock).may_be_left(), "it was just left"


@pytest.mark.parametrize("ends", [StopRequested(), TurnOver(), None])
def test_what_ends_as_usual_is_no_death(submissions: Submissions, ends: Exception | None) -> None:
    submission = submit(submissions, "a")
    for _ in range(MOST_DEATHS + 1):
        turn = begin(submissions, submission, Clock())
        assert turn.failure is None
        try:
            with turn.noted():
                if ends is not None:
                    raise ends
        except (StopRequested, TurnOver):
            pass
        assert turn.is_done == (ends is None)
    assert submissions.used(named(submissions, "a"))["w"] == Used()


def test_a_study_in_which_processes_die_has_failed_and_others_are_served(submissions: Submissions) -> None:
    first = submit(submissions, "a", priority=1)
    submit(submissions, "b")
    for _ in range(MOST_DEATHS):
        turn = begin(submissions, first, Clock())
        assert turn.failure is None
        with pytest.raises(RuntimeError), turn.noted():
            raise RuntimeError("no disk")
    served = wait_for_turn(submissions, "w", TURN_S)
    assert served is not None and served.submission.name == "b"
    assert (
        submissions.ended(named(submissions, "a"))
        == "failed: 3 processes in a row died in it; the last: RuntimeError: no disk"
    )


def test_one_that_has_worked_for_a_while_before_it_died_does_not_count(submissions: Submissions) -> None:
    submission = submit(submissions, "a")
    for _ in range(MOST_DEATHS + 2):
        clock = Clock()
        turn = begin(submissions, submission, clock)
        assert turn.failure is None
        clock.now_s += NOTE_EVERY_S
        turn.is_over()
    assert submissions.used(named(submissions, "a"))["w"].used_s == (MOST_DEATHS + 2) * NOTE_EVERY_S / 2


def test_it_waits_until_something_is_submitted_or_the_daemon_ends(
    submissions: Submissions, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> int | None:
        naps.append(seconds)
        if len(naps) == 2:
            submit(submissions, "late")
        return signal.SIGTERM if len(naps) > 2 else None

    monkeypatch.setattr(turn_module, "nap", nap)
    turn = wait_for_turn(submissions, "w", TURN_S)
    assert turn is not None and turn.submission.name == "late" and len(naps) == 2
    submissions.end(named(submissions, "late"), "done")
    assert wait_for_turn(submissions, "w", TURN_S) is None
