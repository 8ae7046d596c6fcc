"""The search worker as a process, so that the training process never waits for a database.

The side task's main program forks it once torch and the study are loaded. They exchange one JSON object per line:
docs/protocol.md lists the requests and their answers.

Its core belongs to the main job, so it runs only when nothing else wants that core. Three things are exempt: the first
trials, if no main job has come yet; signs of life, if others hold it up, without which its trials would be taken over;
and work under the lock of a database, for which other hosts wait. Those of one host can wait: a busy core still gives
some of its time.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ds_hooks.shared import logs
from ds_hooks.shared.processes.endings import USER_ERROR_STATUS
from ds_hooks.shared.processes.identity import is_stopped
from ds_hooks.shared.processes.parent import die_with_parent
from ds_hooks.shared.processes.priority import yield_the_core
from ds_hooks.shared.secrets import hide_passwords
from trials.gate.process import run_when_idle
from trials.own_logger import own_logger
from trials.search.callbacks import run_exit_functions
from trials.search.damage import refusing_damage
from trials.search.storage.database import PATIENCE_S, StorageError, in_short, is_shared, naming
from trials.search.worker import SearchWorker, WorkerConfig
from trials.study import Study
from trials.study_error import StudyError

SIGNS_PER_LEASE, LOOKS_PER_LEASE = 6, 3
"""How often, per lease, a worker gives a sign of life, and looks for workers that give none."""

IDLE_LEASES = 10.0
"""After how many leases without any training others may take a worker's trials, rather than have none."""

log = own_logger(__name__)


def serve(
    study: Study,
    config: WorkerConfig,
    requests: TextIO,
    answers: TextIO,
    *,
    attached: Callable[[], bool],
    busy: Callable[[], int] | None = None,
) -> int:
    """Be the search worker: answer requests until they end or one asks to stop.

    Args:
        study: the user's.
        config: where its trials are.
        requests: one JSON object per line.
        answers: the same. An error is written here, and raised if it may be a fault of our code.
        attached: whether a main job has come. If so, even the first trials are found in its idle time.
        busy: returns a number that changes while the device trains; None: nobody knows.

    Returns:
        Its exit status.
    """

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    die_with_parent()  # no other signal ends it: it ends when its requests do, with all of them done
    holder, pulse, over = _outside_idle_class(), _outside_idle_class(), threading.Event()
    is_idle = attached()
    if is_idle:
        leave_the_core(holder, config.storage)
    try:
        logs.adopt("optuna")
        with naming(config.storage):
            with refusing_damage(config, None):
                worker = SearchWorker(study, config, holder)
            if busy is not None:
                worker.measures.watch(busy, IDLE_LEASES * config.lease_s)
            # beside a main job it is stopped between bubbles
            is_suspended = partial(is_stopped, os.getppid()) if config.exclusive_rows else lambda: False
            pulse.submit(_live, worker, holder, config.lease_s, over, is_suspended)
            for line in requests:
                if not is_idle and attached():
                    leave_the_core(holder, config.storage)
                    is_idle = True
                request = json.loads(line)
                if "stop" in request:
                    over.set()
                    pulse.shutdown()
                    run_exit_functions(is_over=worker.stop(lambda: say({"recorded": True})))
                    break
                for answer in _answered(worker, request, config):
                    say(answer)
        return 0
    except (Exception, SystemExit) as error:
        status = _status_of(error)
        text = f"the search worker: {type(error).__name__}: {error}" if status is None else _in_words(error, config)
        say({"error": hide_passwords(text), "status": status})
        if status is None:
            raise
        return status
    finally:
        over.set()


def _answered(worker: SearchWorker, request: dict[str, Any], config: WorkerConfig) -> list[dict[str, Any]]:
    """Return the answers. If the study is wrong, its trials wait for one that is right: nobody has died in them."""
    try:
        with refusing_damage(config, worker.trained.keys):
            return answers_to(worker, request)
    except StudyError:
        try:
            worker.stop()
        except Exception as error:  # a storage in which trials are missing; they are left once this worker's lease ends
            log.debug("the trials are not released: %s", in_short(error))
        raise


def _status_of(error: BaseException) -> int | None:
    """The exit status for an error of the user's, or of the storage; None: any other error."""
    if isinstance(error, StudyError):
        return USER_ERROR_STATUS
    return 1 if isinstance(error, (StorageError, OSError)) else None  # a restart may mend it


def _in_words(error: BaseException, config: WorkerConfig) -> str:
    if isinstance(error, OSError) and error.strerror:  # a full disk names no file
        return f"{error.filename or config.directory or config.storage}: {error.strerror}"
    return str(error)


def answers_to(worker: SearchWorker, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Do what `request` asks for. Returns the answer, if there is one, and what else there is to say."""
    answer = _answer_to(worker, request)
    return ([] if answer is None else [answer]) + worker.news()


def _answer_to(worker: SearchWorker, request: dict[str, Any]) -> dict[str, Any] | None:
    match request:
        case {"ask": most, **rest}:
            return worker.ask(most, **rest)
        case {"report": number, "epoch": epoch, "value": value, "final": final, **rest}:
            return worker.report(number, epoch, value, final, **rest)
        case {"checkpoint": number, "file": file}:
            began_s = time.thread_time()
            answer = worker.checkpoint(number, Path(file))
            return {**answer, "cost_s": time.thread_time() - began_s} if answer and "taken" in answer else answer
        case {"trained": epochs}:
            worker.note({int(number): epoch for number, epoch in epochs.items()})
        case {"began": number, "epoch": epoch, **rest}:
            return worker.began(number, epoch, **rest)
        case {"fail": number, "reason": reason}:
            return worker.fail(number, reason)
        case {"unfit": number, "reason": reason}:
            return worker.does_not_fit(number, reason)
        case {"built": number, "structure": structure}:
            worker.measures.built(number, structure)
        case {"ran": structure, **of}:
            worker.measures.ran(structure, **of)
        case _:
            raise ValueError(f"unknown request {request}")
    return None


def _live(
    worker: SearchWorker, holder: Executor, lease_s: float, over: threading.Event, is_suspended: Callable[[], bool]
) -> None:
    """Give signs of life, and take over from those that give none.

    Both need locks, which others may have that run in idle time only. So `holder` waits for them, and meanwhile this
    thread gives signs that need none, for as long as any worker waits.

    A side task that its user suspends trains nothing, so its trials are for others, although this process runs on.
    """
    count, waited_s = 0, 0.0
    last: Future[None] = Future()
    last.set_result(None)
    while not over.wait(lease_s / SIGNS_PER_LEASE):
        if is_suspended():
            continue
        count += 1
        try:
            if not last.done():
                waited_s += lease_s / SIGNS_PER_LEASE
                if waited_s < PATIENCE_S:
                    worker.beat()
                continue
            waited_s = 0.0
            last = holder.submit(worker.renew)
            last.add_done_callback(_say_why_not)
            if count % (SIGNS_PER_LEASE // LOOKS_PER_LEASE) == 0:
                last = worker.take_over()
                last.add_done_callback(_say_why_not)
        except Exception as error:
            _warn(error)


def _say_why_not(done: "Future[None]") -> None:
    error = done.exception()
    if error is not None:
        _warn(error)


def _warn(error: BaseException) -> None:
    """Such as a database that is away for a while; the next try may succeed."""
    log.warning("the lease was not renewed: %s", in_short(error))


def leave_the_core(holder: Executor, storage: str) -> None:
    """Run this thread only in idle time, and `holder`'s as well unless other hosts wait for what it locks."""
    run_when_idle()
    if not is_shared(storage):
        holder.submit(run_when_idle).result()


def _outside_idle_class() -> Executor:
    """Start a thread. `run_when_idle` cannot be undone, but each thread has a scheduling class of its own."""
    started = ThreadPoolExecutor(max_workers=1)
    started.submit(yield_the_core).result()
    return started
