"""What a worker does under the lock of its study's search workers."""

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import optuna

from trials.search.cached_storage import CachedStorage
from trials.search.choice.next_trials import requeue
from trials.search.storage.claims import Claim, Claims, LockedClaims
from trials.search.storage.database import patiently
from trials.search.storage.journal import together

_Result = TypeVar("_Result")


class StudyLock:
    """Holds the lock of a study while it does something.

    Args:
        claims: those of the study.
        holder: runs all work that is done under the lock.
        known: returns the claims of which the worker knows.

    Attributes:
        study: Optuna's, once it is open.
    """

    def __init__(self, claims: Claims, holder: Executor, known: Callable[[], Iterable[Claim]]) -> None:
        self._claims, self._holder, self._known = claims, holder, known
        self._fence = 0
        self.study: optuna.Study | None = None

    def alone(self, do: Callable[[LockedClaims], _Result]) -> _Result:
        """Do something under the lock, and again after what was left of a try without an answer.

        Only the thread that asks for trials may call it, for it alone knows which claims are meant.
        """

        def again(held: LockedClaims) -> _Result:
            held.unclaim_all_but(list(self._known()))
            if self.study is not None:
                requeue(self.study, held.claimed())
            return do(held)

        return patiently(lambda is_again: self.locked(again if is_again else do))

    def locked(self, do: Callable[[LockedClaims], _Result]) -> _Result:
        """Do something under the lock, once."""
        return self.soon(do).result()

    def soon(self, do: Callable[[LockedClaims], _Result]) -> "Future[_Result]":
        """The same, without waiting for it."""

        def locked() -> _Result:
            with self._claims.alone() as held, self._together():
                if self.study is not None and isinstance(self.study._storage, CachedStorage):
                    fences = held.fences(self._fence)
                    self.study._storage.look_at_changes(self.study._study_id, fences, self._fence)
                    self._fence = max((self._fence, *(fence for fence, _ in fences.values())))
                return do(held)

        return self._holder.submit(locked)

    def _together(self) -> AbstractContextManager[None]:
        return nullcontext() if self.study is None else together(self.study._storage)
