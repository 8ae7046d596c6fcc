"""Turns at submitted studies: when one is over, and what is noted of it."""

import errno
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from ds_hooks.shared.study_queue import IDLE_S, Submission, Submissions, Used
from trials.gate.base import StopRequested
from trials.search.client import SearchError
from trials.side_task import turn as turn_module
from trials.side_task.devices import NoRoomError
from trials.side_task.turn import NOTE_EVERY_S, Turn, TurnOver, give_up, wait_for_turn

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
        assert not turn.is_over(has_trained=True)
    assert submissions.used(named(submissions, "a"))["w"].used_s == clock.now_s / 2


def test_it_is_over_after_its_time_if_another_study_waits(submissions: Submissions) -> None:
    clock = Clock()
    turn = begin(submissions, submit(submissions, "a"), clock)
    submit(submissions, "b")
    clock.now_s = TURN_S - 1
    assert not turn.is_over(has_trained=True)
    clock.now_s = TURN_S + NOTE_EVERY_S
    assert turn.is_over(has_trained=True)


def test_a_higher_priority_does_not_wait_for_its_end_nor_does_a_withdrawal(submissions: Submissions) -> None:
    clock = Clock()
    turn = begin(submissions, submit(submissions, "a"), clock)
    submit(submissions, "urgent", priority=1)
    assert not turn.is_over(has_trained=True), "files are looked at once a minute"
    clock.now_s += NOTE_EVERY_S
    assert turn.is_over(has_trained=True)
    submissions.end(named(submissions, "urgent"), "done")
    clock.now_s += NOTE_EVERY_S
    assert not turn.is_over(has_trained=True)
    submissions.withdraw("a")
    clock.now_s += NOTE_EVERY_S
    assert turn.is_over(has_trained=True)


def test_a_study_that_was_withdrawn_is_left_at_once_if_others_wait_or_it_was_submitted_again(
    submissions: Submissions,
) -> None:
    for other in ("b", "a"):
        clock = Clock()
        turn = begin(submissions, submit(submissions, "a"), clock)
        submissions.withdraw("a")
        submit(submissions, other)
        clock.now_s = NOTE_EVERY_S
        assert turn.is_over(has_trained=True)
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
def test_what_ends_as_usual_leaves_no_reason(submissions: Submissions, ends: Exception | None) -> None:
    turn = begin(submissions, submit(submissions, "a"), Clock())
    with nullcontext() if ends is None else pytest.raises(type(ends)), turn.noted():
        if ends is not None:
            raise ends
    assert turn.is_done == (ends is None)
    assert submissions.used(named(submissions, "a"))["w"] == Used()


def test_a_study_that_is_given_up_has_failed_and_others_are_served(submissions: Submissions) -> None:
    first = submit(submissions, "a", priority=1)
    submit(submissions, "b")
    with pytest.raises(RuntimeError), begin(submissions, first, Clock()).noted():
        raise RuntimeError("no disk")
    give_up(submissions, "a", "w")
    give_up(submissions, "unknown", "w")
    served = wait_for_turn(submissions, "w", TURN_S)
    assert served is not None and served.submission.name == "b"
    how = submissions.ended(first)
    assert how == "failed: one process after another died in it; the last: RuntimeError: no disk"


def test_a_process_that_is_killed_says_nothing_of_its_study_and_loses_no_time_noted(submissions: Submissions) -> None:
    """A job that is killed again and again is not its fault."""
    submission = submit(submissions, "a")
    for _ in range(9):
        clock = Clock()
        turn = begin(submissions, submission, clock)
        clock.now_s += NOTE_EVERY_S
        turn.is_over(has_trained=True)
        Turn(submissions, submission, "w", TURN_S, clock)
    assert submissions.ended(submission) is None
    assert submissions.used(submission)["w"].used_s == 9 * NOTE_EVERY_S / 2
    give_up(submissions, "a", "w")
    assert str(submissions.ended(submission)).endswith("it was killed")


def test_a_study_whose_storage_is_away_waits_for_it(submissions: Submissions) -> None:
    for name in ("a", "b"):
        submit(submissions, name)
    for name in ("a", "b"):
        turn = wait_for_turn(submissions, "w", TURN_S)
        assert turn is not None and turn.submission.name == name
        with pytest.raises(SearchError), turn.noted():
            raise SearchError("the database is away", 1)
    assert submissions.next("w", TURN_S) is None, "it is not tried again at once"
    found = submissions.next("w", TURN_S, time.time() + IDLE_S + 1)
    assert found is not None and found.name == "a"
    assert submissions.used(found)["w"].reason == "the database is away"


@pytest.mark.parametrize("leaves", [TurnOver(is_idle=True), SearchError("away", 1)])
def test_where_it_cannot_note_that_there_is_nothing_to_do_no_process_begins_again_at_once(
    submissions: Submissions, tmp_path: Path, leaves: Exception
) -> None:
    turn = begin(submissions, submit(submissions, "a"), Clock())
    shutil.rmtree(tmp_path / "queue" / "a" / "used")
    (tmp_path / "queue" / "a" / "used").touch()
    with pytest.raises(OSError, match="exists"), turn.noted():  # counts as a death
        raise leaves


def test_a_turn_shorter_than_a_start_trains_an_epoch(submissions: Submissions) -> None:
    clock = Clock()
    turn = begin(submissions, submit(submissions, "a"), clock)
    submit(submissions, "b")
    clock.now_s = 2 * TURN_S
    assert not turn.is_over(has_trained=False)
    clock.now_s += NOTE_EVERY_S
    assert turn.is_over(has_trained=True)


def away(path: Path) -> None:
    raise OSError(errno.ESTALE, "Stale file handle", str(path))


def test_while_the_directory_is_away_training_goes_on_and_who_waits_looks_again(
    submissions: Submissions, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    turn = begin(submissions, submit(submissions, "a"), clock)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", away)
        clock.now_s = NOTE_EVERY_S
        assert not turn.is_over(has_trained=True) and not turn.may_be_left()
    naps: list[float] = []
    monkeypatch.setattr(Path, "iterdir", away)
    monkeypatch.setattr(turn_module, "nap", lambda seconds: naps.append(seconds) or monkeypatch.undo())
    found = wait_for_turn(submissions, "w", TURN_S)
    assert found is not None and found.submission.name == "a"


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


def test_a_study_that_does_not_fit_waits_for_a_worker_where_it_may(submissions: Submissions) -> None:
    words = "not even one trial fits into the side task's share of the device's memory"
    turn = begin(submissions, submit(submissions, "a"), Clock())
    with pytest.raises(NoRoomError), turn.noted():
        raise NoRoomError(words)
    assert submissions.next("w", TURN_S) is None, "it is not tried again at once"
    assert not turn.may_go_on_elsewhere(words), "nobody else has served it"
    other = Turn(submissions, turn.submission, "other", TURN_S, Clock())
    assert turn.may_go_on_elsewhere(words)
    with pytest.raises(NoRoomError), other.noted():
        raise NoRoomError(words)
    assert not turn.may_go_on_elsewhere(words)
