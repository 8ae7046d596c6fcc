"""Signs of life, and looks for workers that give none, by a clock that only they move."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

from tests.support.fused_and_solo import AtOnce
from trials.search.storage.claims import LEASE_S
from trials.search.storage.database import PATIENCE_S
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

    def beat(self) -> None:
        self.signs_s.append(self._clock.now_s)

    def take_over(self) -> "Future[None]":
        self._clock.now_s += STATEMENTS_S
        self.looks_s.append(self._clock.now_s)
        return AtOnce().submit(lambda: None)


def longest_s(moments_s: list[float]) -> float:
    return max(later - earlier for earlier, later in pairwise(moments_s))


def test_a_busy_worker_finds_the_trials_of_a_dead_one_in_time() -> None:
    clock = Clock()
    living = Living(clock)
    _live(living, AtOnce(), LEASE_S, clock, lambda: False)  # type: ignore[arg-type]
    assert len(living.looks_s) > 100
    assert LEASE_S + longest_s(living.looks_s) <= PROMISED_S, "it may have looked just before the lease ran out"
    assert longest_s(living.signs_s) <= LEASE_S / 5, "some may be late, and the worker is alive"


def test_one_that_waits_for_a_lock_gives_signs_as_long_as_it_may_wait() -> None:
    clock, is_free = Clock(), threading.Event()
    living = Living(clock)
    with ThreadPoolExecutor(1) as holder:
        holder.submit(is_free.wait)
        _live(living, holder, LEASE_S, clock, lambda: False)  # type: ignore[arg-type]
        assert living.looks_s == [0.0]
        assert longest_s(living.signs_s) <= LEASE_S / 2
        assert PATIENCE_S - LEASE_S < living.signs_s[-1] < PATIENCE_S + LEASE_S < clock.now_s, "then it hangs for good"
        is_free.set()
