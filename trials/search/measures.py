"""What a worker measures of itself while it trains, for its signs of life."""

import time
from collections.abc import Callable, Mapping
from threading import Lock

from trials.search.choice.deadline import Pace
from trials.search.choice.placement import Speeds, solver
from trials.search.storage.claims import Sign


class Measures:
    """A worker's speeds and pace, and the structures of its trials. Threads may share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._speeds, self._pace = Speeds(), Pace(time.time() - time.monotonic())
        self._structures: dict[int, str] = {}
        self._is_idle: Callable[[], bool] = lambda: False

    def watch(self, busy: Callable[[], int], patience_s: float) -> None:
        """Notice from now on when the device is idle: when `busy` has returned the same for `patience_s`."""
        self._is_idle = _Idle(busy, patience_s)

    def built(self, number: int, structure: str) -> None:
        """A trial has been built, and its structure has this name."""
        with self._lock:
            self._structures[number] = structure

    def structure(self, number: int) -> str | None:
        """The name of a trial's structure, if it has been built here."""
        return self._structures.get(number)

    def ran(self, structure: str, trials: int, samples: int, began_s: float, ended_s: float) -> None:
        """Trials of a structure have trained for an epoch.

        Args:
            structure: its name.
            trials: how many.
            samples: that they trained, summed over trials.
            began_s: when, by `time.monotonic`.
            ended_s: until when.
        """
        with self._lock:
            self._speeds.measure(structure, trials, samples, ended_s - began_s)
            self._pace.add(began_s, ended_s, trials)
            may_choose = len(self._speeds.samples_per_s()) > 1
        if may_choose:
            solver()  # not for the first time under the lock

    def does_not_fit(self, name: str) -> None:
        """See `Speeds`."""
        with self._lock:
            self._speeds.does_not_fit(name)

    def sign(self, trained: Mapping[int, int]) -> Sign:
        """What to report now."""
        with self._lock:
            self._structures = {number: name for number, name in self._structures.items() if number in trained}
            speeds, minutes = self._speeds.samples_per_s(), self._pace.changed()
            return Sign(trained, dict(self._structures), speeds, minutes, self._is_idle())

    def told(self, sign: Sign, date_s: float) -> None:
        """A sign has been given, at that time in seconds since 1970."""
        with self._lock:
            self._pace.told(sign.minutes, date_s - time.monotonic())


class _Idle:
    """Whether a number has not changed for some time."""

    def __init__(self, busy: Callable[[], int], patience_s: float) -> None:
        self._busy, self._patience_s = busy, patience_s
        self._before, self._since_s = busy(), time.monotonic()

    def __call__(self) -> bool:
        busy, now_s = self._busy(), time.monotonic()
        if busy != self._before:
            self._before, self._since_s = busy, now_s
        return now_s >= self._since_s + self._patience_s
