"""Calls the user's callbacks after each result, as Optuna's `Study.optimize` does."""

import atexit
import copy
import os
import threading
import time
from collections.abc import Callable
from queue import Queue

import optuna
from optuna.trial import FrozenTrial

from trials.gate.process import run_when_idle
from trials.own_logger import own_logger
from trials.study import Study

Callback = Callable[[optuna.Study, FrozenTrial], None]

PATIENCE_S, LAST_PATIENCE_S = 5.0, 60.0
"""At the worker's end, how long callbacks may still take: within a study, whose job may be ending, and when it is over.
All results are recorded by then."""

log = own_logger(__name__)


class Callbacks:
    """A study's callbacks, in a thread of their own: none that is slow or hangs delays a result or a sign of life.

    Args:
        user_study: has them.
        study: Optuna's, which they get.

    Raises:
        TypeError: they are not what can be called.
    """

    def __init__(self, user_study: Study, study: optuna.Study) -> None:
        self._study = study
        self._callbacks = _callbacks_of(user_study)
        self._ended: Queue[tuple[int, int] | None] = Queue()
        self._last_s = 0.0
        self._thread: threading.Thread | None = None
        self._said: set[tuple[int, type[BaseException]]] = set()

    def call(self, trial_id: int) -> None:
        """Call them soon, for a trial that has ended. They run only in idle time if this thread does."""
        if not self._callbacks:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="callbacks", daemon=True)
            self._thread.start()
        self._last_s = time.monotonic()
        self._ended.put((trial_id, os.sched_getscheduler(0)))

    @property
    def may_enqueue(self) -> bool:
        """Whether callbacks are due, which may enqueue trials. Those that take too long are not waited for."""
        return self._ended.unfinished_tasks > 0 and time.monotonic() < self._last_s + LAST_PATIENCE_S

    def finish(self, *, is_over: bool) -> None:
        """Wait for those that are due, but not for long.

        Args:
            is_over: whether the study is.
        """
        patience_s = LAST_PATIENCE_S if is_over else PATIENCE_S
        if self._thread is None:
            return
        self._ended.put(None)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            log.warning("Study.callbacks have not ended after %g s: the worker ends without them", patience_s)

    def _run(self) -> None:
        while (ended := self._ended.get()) is not None:
            trial_id, scheduler = ended
            if scheduler == os.SCHED_IDLE != os.sched_getscheduler(0):
                run_when_idle()
            for index, callback in enumerate(self._callbacks):
                try:
                    # a copy: what the storage gives is what it keeps, and a callback may change what it gets
                    callback(self._study, copy.deepcopy(self._study._storage.get_trial(trial_id)))
                except BaseException as error:  # asyncio's CancelledError, say; the next ones are called all the same
                    self._say_once(index, error)
            self._ended.task_done()

    def _say_once(self, index: int, error: BaseException) -> None:
        if (index, type(error)) not in self._said:
            self._said.add((index, type(error)))
            name = getattr(self._callbacks[index], "__qualname__", type(self._callbacks[index]).__qualname__)
            log.warning("Study.callbacks: %s failed: %s: %s", name, type(error).__name__, error)


def run_exit_functions(*, is_over: bool) -> None:
    """Run what callbacks have registered with `atexit`: without, W&B loses what it has not written. Not for long.

    Args:
        is_over: whether the study is.
    """
    if not atexit._ncallbacks():
        return  # a thread that ends now may hold up whoever collects this process's end: see `trials.search.client`
    patience_s = LAST_PATIENCE_S if is_over else PATIENCE_S
    thread = threading.Thread(target=atexit._run_exitfuncs, name="exit functions", daemon=True)
    thread.start()
    thread.join(patience_s)
    if thread.is_alive():
        log.warning("functions of atexit have not ended after %g s: the worker ends without them", patience_s)


def _callbacks_of(user_study: Study) -> list[Callback]:
    try:
        found = user_study.callbacks()
    except (Exception, SystemExit) as error:  # such as a server that is away; the trials continue
        log.warning("Study.callbacks failed, so there are none: %s: %s", type(error).__name__, error)
        return []
    if not isinstance(found, (list, tuple)) or not all(map(callable, found)):
        raise TypeError(
            f"Study.callbacks returned {found!r}; allowed: a list of functions of Optuna's study and the ended trial"
        )
    return list(found)
