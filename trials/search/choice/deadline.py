"""Whether a study ends by its deadline: how much is left to train, how fast workers train, and the date that follows.

A deadline is admitted or refused. That changes nothing that is trained.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate, pairwise

from trials.search.storage.measured import Minute
from trials.settings import TIMES, read_time

SLOW = 0.1
"""The quantile of the study's rate, over minutes, that is expected of the time to come."""

ENOUGH_S = 180.0
"""A rate counts once it has been seen for this long, or for as long as the rest of the study takes at that rate."""

FAR_S = 100 * 365 * 86400.0
"""A later end has no date."""

OFFSET_S = 60.0
"""A clock that is off by more is taken to have been set."""


class Pace:
    """How many epochs of trials a worker has trained in each minute, spread evenly over the time that they took.

    A worker lives from its first epoch's begin; pauses between epochs count.

    Args:
        offset_s: what to add to `time.monotonic` for seconds since 1970.
    """

    def __init__(self, offset_s: float) -> None:
        self._offset_s = offset_s
        self._until_s: float | None = None
        self._minutes: dict[int, Minute] = {}
        self._changed: set[int] = set()

    def add(self, began_s: float, ended_s: float, trials: int) -> None:
        """Count an epoch of so many trials, between two times by `time.monotonic`."""
        began_s, ended_s = began_s + self._offset_s, ended_s + self._offset_s
        lives_s = began_s if self._until_s is None else min(began_s, self._until_s)
        lives_s = max(lives_s, ended_s - 86400.0)
        took_s = max(ended_s - began_s, 1e-9)
        for minute in range(int(lives_s // 60), int(ended_s // 60) + 1):
            lived_s = max(0.0, min(ended_s, 60.0 * minute + 60) - max(lives_s, 60.0 * minute))
            trained_s = max(0.0, min(ended_s, 60.0 * minute + 60) - max(began_s, 60.0 * minute))
            before = self._minutes.get(minute, Minute(minute, 0.0, 0.0))
            epochs = before.epochs + trials * trained_s / took_s
            self._minutes[minute] = Minute(minute, before.lived_s + lived_s, epochs)
            self._changed.add(minute)
        self._until_s = ended_s

    def changed(self) -> list[Minute]:
        """The minutes that have changed since they were told."""
        return [self._minutes[minute] for minute in sorted(self._changed)]

    def told(self, minutes: Sequence[Minute], offset_s: float) -> None:
        """Note that these have been told, and what the clock says: where it was set, later minutes follow it."""
        self._changed -= {each.minute for each in minutes if self._minutes.get(each.minute) == each}
        if self._until_s is not None:
            last = int(self._until_s // 60)
            kept = self._changed | {last}
            self._minutes = {minute: each for minute, each in self._minutes.items() if minute in kept}
        if abs(offset_s - self._offset_s) > OFFSET_S:
            self._offset_s, self._until_s = offset_s, None


@dataclass(frozen=True, slots=True)
class Trained:
    """A trial that has begun, or has been enqueued.

    Attributes:
        epochs: how many it has trained.
        state: "open" if it may train more, "ended" or "failed".
    """

    epochs: int
    state: str


def left_of_trials(trials: Collection[Trained], budget: int, epochs: int) -> float:
    """Return how many epochs a study has left to train, less what its pruner will save.

    It is taken to save the same share as it has of all trials so far, those included that still train.

    Args:
        trials: those so far.
        budget: how many there are in all.
        epochs: of a whole trial.
    """
    unfinished = [epochs - each.epochs for each in trials if each.state == "open"]
    counted = [each for each in trials if each.state != "failed" and (each.epochs or each.state == "ended")]
    saved = sum(max(0, epochs - each.epochs) for each in counted if each.state == "ended")
    share = saved / (epochs * len(counted)) if counted else 0.0
    return (sum(max(0, each) for each in unfinished) + epochs * max(0, budget - len(trials))) * (1 - share)


def left_of_rungs(trials: Collection[Trained], budget: int, epochs: int, rungs: Sequence[int], factor: int) -> float:
    """Return how many epochs a study with promotion has left: Σ over rungs of (r_k − r_{k−1}) ⌊n / η^k⌋, less its own.

    Source: arXiv:1810.05934. At least one trial passes each rung, see `Ranking.last_resort`.

    Args:
        trials: those so far; paused ones are open.
        budget: n, how many there are in all.
        epochs: of a whole trial.
        rungs: before the last epoch.
        factor: η.
    """
    unbegun = max(0, budget - len(trials))
    if not unbegun and all(each.state != "open" for each in trials):
        return 0.0
    first, *_ = steps = [*rungs, epochs]
    passing = unbegun + sum(each.state == "open" or each.epochs >= first for each in trials)
    left = float(unbegun * first + sum(max(0, first - each.epochs) for each in trials if each.state == "open"))
    for before, rung in pairwise(steps):
        passing = max(passing // factor, 1)
        done = sum(min(max(each.epochs - before, 0), rung - before) for each in trials)
        left += max(0, passing * (rung - before) - done)
    return left


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a study trains.

    Attributes:
        slow: epochs per second that the slowest `SLOW` of the time do not exceed.
        mean: the same on average.
        seen_s: for how long it has been seen.
    """

    slow: float
    mean: float
    seen_s: float


def rate_of(minutes: Sequence[Minute], until: int | None, kept_share: float) -> Rate | None:
    """Return a study's rate; None: nothing has been trained.

    Args:
        minutes: of all workers together.
        until: the last one that counts; later ones have not been told by all who train. None: all count.
        kept_share: the share of epochs that count.
    """
    counted = [each for each in minutes if each.lived_s > 0 and (until is None or each.minute <= until)]
    lived_s = {each.minute: each.lived_s for each in counted}
    epochs = {each.minute: each.epochs * kept_share for each in counted}
    seen_s, total = sum(lived_s.values()), sum(epochs.values())
    if not total:
        return None
    ranked = sorted(lived_s, key=lambda minute: epochs[minute] / lived_s[minute])
    passed_s = list(accumulate(lived_s[minute] for minute in ranked))
    tenth = ranked[next(i for i, until_s in enumerate(passed_s) if until_s > SLOW * seen_s)]
    slow = epochs[tenth] / lived_s[tenth]
    return Rate(slow or total / seen_s, total / seen_s, seen_s)  # the mean, if a tenth of the time nothing was trained


@dataclass(frozen=True, slots=True)
class Outlook:
    """How a study stands.

    Attributes:
        ended: how many trials have ended.
        trials: how many there are in all.
        left: epochs that are left to train.
        rate: None: nothing has been trained.
    """

    ended: int
    trials: int
    left: float
    rate: Rate | None

    @property
    def left_s(self) -> float | None:
        """How long it will take; None: that is not known yet."""
        if not self.left:
            return 0.0
        if self.rate is None or self.rate.seen_s < min(ENOUGH_S, self.left / self.rate.mean):
            return None
        return self.left / self.rate.slow


class DeadlineError(ValueError):
    """A text is no deadline. The message says what is allowed."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time in local time, or in a zone of its own.

    Attributes:
        text: as it was given.
        at: when.
        has_zone: whether the text names its zone.
    """

    text: str
    at: datetime
    has_zone: bool

    @classmethod
    def of(cls, text: str) -> "Deadline":
        """Read it.

        Raises:
            DeadlineError: it is none.
        """
        try:
            given = read_time(text)
        except ValueError as error:
            raise DeadlineError(f"{text!r}: {error}; allowed: {TIMES}") from None
        return cls(text, given.astimezone() if given.tzinfo is None else given, given.tzinfo is not None)

    def show(self, moment: datetime) -> str:
        """Another time, written as this one."""
        if self.has_zone:
            return moment.astimezone(self.at.tzinfo).isoformat(" ", "minutes")
        return moment.astimezone().replace(tzinfo=None).isoformat(" ", "minutes")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be said of a deadline.

    Attributes:
        is_admitted: None: it is not known yet.
        text: the same in words.
    """

    is_admitted: bool | None
    text: str


def judge(outlook: Outlook, deadline: Deadline | None, now: datetime) -> Verdict:
    """Say whether a study ends by its deadline, and when.

    Args:
        outlook: how it stands.
        deadline: None: it has none, and any end is admitted.
        now: with a zone.
    """
    named = "no deadline" if deadline is None else f"deadline {deadline.text}"
    left_s, so_far = outlook.left_s, f"{outlook.ended} of {outlook.trials} trials have ended"
    if left_s is None:
        seen = "nothing has been trained" if outlook.rate is None else "too little has been trained"
        return Verdict(None, f"{named}: not known yet, because {seen}; {so_far}")
    if not left_s:
        return Verdict(True, f"{named}: nothing is left to train; {so_far}")
    end = "in more than 100 years"
    if left_s < FAR_S:
        moment = now + timedelta(seconds=left_s)
        end = "by " + (Deadline("", now, False) if deadline is None else deadline).show(moment)
    at_pace = f"at its pace so far the study ends {end}"
    if deadline is None:
        return Verdict(True, f"{named}: {at_pace}; {so_far}")
    time_s = (deadline.at - now).total_seconds()
    if time_s <= 0:
        return Verdict(False, f"{named} has passed; {at_pace}; {so_far}")
    if left_s <= time_s:
        return Verdict(True, f"{named}: admitted, {at_pace}; {so_far}")
    by_then = outlook.ended + math.floor((outlook.trials - outlook.ended) * time_s / left_s)
    return Verdict(
        False, f"{named}: refused, {at_pace}; by the deadline {by_then} of {outlook.trials} trials would have ended"
    )
