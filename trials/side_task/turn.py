"""A side task's turn at one of the studies that were submitted: which, for how long, and what is noted of it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ds_hooks.shared.processes.signals import END_SIGNAL
from ds_hooks.shared.study_queue import IDLE_S, SERVES_S, Submission, Submissions, Used
from trials.gate.base import StopRequested
from trials.gate.process import nap
from trials.own_logger import own_logger

LOOK_EVERY_S = 10.0
"""How often a side task that has no study looks for one."""

NOTE_EVERY_S = SERVES_S / 3

log = own_logger(__name__)


class TurnOver(Exception):
    """A side task leaves its study to another worker or turn; `is_idle`: it has nothing to do for it."""

    def __init__(self, *, is_idle: bool = False) -> None:
        super().__init__()
        self.is_idle = is_idle


class Turn:
    """One worker's turn at a study.

    Args:
        submissions: where it was submitted.
        submission: the study.
        worker: this worker's name.
        turn_s: how long the turn takes, if others wait.
        clock_s: the time.

    Attributes:
        submission: the study.
        busy_s: returns how long the device has computed for it in this turn.
        is_done: whether no trial of it is left.
    """

    def __init__(
        self,
        submissions: Submissions,
        submission: Submission,
        worker: str,
        turn_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.submission = submission
        self.busy_s: Callable[[], float] = lambda: 0.0
        self.is_done = False
        self._submissions, self._worker, self._turn_s, self._clock_s = submissions, worker, turn_s, clock_s
        self._began_s = self._noted_s = self._looked_s = clock_s()
        before = submissions.used(submission).get(worker, Used())
        self._used = Used(used_s=before.used_s, until_s=time.time() + SERVES_S)
        self._before_s = before.used_s
        self._note()

    def is_over(self, *, has_trained: bool) -> bool:
        """Note how long the device has computed; return whether it is another study's turn.

        Args:
            has_trained: whether an epoch has ended in it. Else turns that are shorter than a start would train nothing.
        """
        now_s = self._clock_s()
        if now_s < self._noted_s + (min(NOTE_EVERY_S, self._turn_s) if has_trained else NOTE_EVERY_S):
            return False
        self._noted_s = now_s
        self._used = Used(used_s=self._before_s + self.busy_s(), until_s=time.time() + SERVES_S)
        self._note()
        try:
            if self.submission.key not in {each.key for each in self._submissions.waiting()}:
                return True  # it has ended, and may have been submitted again
            found = self._submissions.next(self._worker, self._turn_s)
        except OSError as error:  # the directory is away for a while
            log.warning("the queue cannot be read: %s", error)
            return False
        if found is None or found.key == self.submission.key:
            return False
        is_late = has_trained and now_s >= self._began_s + self._turn_s
        return is_late or found.priority > self.submission.priority

    def may_be_left(self) -> bool:
        """Whether there is another study to serve while this one has nothing to do."""
        now_s = self._clock_s()
        if now_s < self._looked_s + LOOK_EVERY_S:
            return False
        self._looked_s = now_s
        try:
            others = [each for each in self._submissions.waiting() if each.key != self.submission.key]
            used = [self._submissions.used(each).get(self._worker, Used()) for each in others]
        except OSError:  # see `is_over`
            return False
        return not all(of.is_idle(time.time()) for of in used)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note how training it ends.

        Raises:
            OSError: the next process could not know that it has nothing to do there, and would begin again at once.
        """
        try:
            yield
        except (StopRequested, TurnOver) as left:
            if isinstance(left, TurnOver) and left.is_idle:
                self._pause()
            else:
                self._leave()
            raise
        except BaseException as error:
            if getattr(error, "may_pass", False):
                self._pause(str(error))
            else:
                self._leave(reason=f"{type(error).__name__}: {error}")
            raise
        self._leave()
        self.is_done = True

    def may_go_on_elsewhere(self, reason: str) -> bool:
        """Whether another worker has served the study, and has not left it for the same reason as this one."""
        used = self._submissions.used(self.submission)
        return any(of.reason != reason for worker, of in used.items() if worker != self._worker)

    def end(self, how: str) -> None:
        """Note how the study has ended."""
        log.info("study %s: %s", self.submission.name, how)
        self._submissions.end(self.submission, how)

    def _leave(self, reason: str = "") -> None:
        self._used = Used(used_s=self._before_s + self.busy_s(), reason=reason)
        self._note()

    def _pause(self, reason: str = "") -> None:
        self._leave(reason)
        self._used = replace(self._used, idle_until_s=time.time() + IDLE_S)
        self._submissions.note(self.submission, self._worker, self._used)

    def _note(self) -> None:
        try:
            self._submissions.note(self.submission, self._worker, self._used)
        except OSError as error:  # a full disk: shares are a little off
            log.warning("the turn is not noted: %s", error)


def give_up(submissions: Submissions, name: str, worker: str) -> None:
    """Note that a study has failed, because one process of this worker after another has died in it.

    Raises:
        OSError: the directory cannot be written.
    """
    for submission in submissions.waiting():
        if submission.name == name:
            reason = submissions.used(submission).get(worker, Used()).reason or "it was killed"
            submissions.end(submission, f"failed: one process after another died in it; the last: {reason}")


def wait_for_turn(submissions: Submissions, worker: str, turn_s: float) -> Turn | None:
    """Wait until there is a study to serve, and begin its turn. None: the daemon asks for the end."""
    trouble = ""
    while True:
        try:
            found = submissions.next(worker, turn_s)
            if found is not None:
                return Turn(submissions, found, worker, turn_s)
            trouble = ""
        except OSError as error:  # the directory is away for a while, or its user can mend it
            if trouble != str(error):
                log.warning("the queue cannot be read: %s", error)
            trouble = str(error)
        if nap(LOOK_EVERY_S) == END_SIGNAL:
            return None
