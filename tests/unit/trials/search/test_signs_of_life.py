"""Signs of life, and looks for workers that give none, by a clock that only they move."""

import threading
from itertools import pairwise

from trials.search.storage.claims import LEASE_S
from trials.search.worker_process import _live

PROMISED_S = 90.0
"""Within this time after its last sign, a worker's trials are there for others: docs/running.md."""

STATEMENTS_S = 0.5
"""What giving a sign or looking may take: a server far away, under load."""


class Clock(threading.Event):
    now_s = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.now_s += timeout
        return self.now_s > 100 * LEASE_S


class Living:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.signs_s, self.looks_s = [0.0], [0.0]

    def renew(self) -> None:
        self._clock.now_s += STATEMENTS_S
        self.signs_s.append(self._clock.now_s)

    def take_over(self) -> None:
        self._clock.now_s += STATEMENTS_S
        self.looks_s.append(self._clock.now_s)


def longest_s(moments_s: list[float]) -> float:
    return max(later - earlier for earlier, later in pairwise(moments_s))


def test_a_busy_worker_finds_the_trials_of_a_dead_one_in_time() -> None:
    clock = Clock()
    living = Living(clock)
    _live(living, LEASE_S, clock, lambda: False)  # type: ignore[arg-type]
    assert len(living.looks_s) > 100
    assert LEASE_S + longest_s(living.looks_s) <= PROMISED_S, "it may have looked just before the lease ran out"
    assert longest_s(living.signs_s) <= LEASE_S / 5, "some may be late, and the worker is alive"
