"""The search worker: a process that talks to Optuna, so that the training process never waits for a database.

The side task's main program forks it once torch and the study are loaded. They exchange one JSON object per line.

- Requests: `{"ask": n}`, `{"report": number, "epoch": e, "value": v, "final": bool}`,
  `{"fail": number, "reason": text}`, `{"stop": reason}`.
- Answers: `{"trials": [{"number": i, "params": {…}}, …], "exhausted": bool}`, `{"pruned": number}`, `{"error": text}`.

Its core belongs to the main job, so it runs only when nothing else wants that core. Two things are exempt: the first
trials, if no main job has come yet, and work under the lock for which other search workers wait.
"""

import argparse
import fcntl
import json
import os
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

import optuna
from optuna.trial import Trial, TrialState

from ds_hooks.shared import logs
from ds_hooks.shared.parent import die_with_parent
from ds_hooks.shared.private_file import open_private
from ds_hooks.shared.secrets import STORAGE_VARIABLE, hide_passwords
from trials.gate.process import run_when_idle
from trials.own_logger import own_logger
from trials.search.finite import has_begun_all, is_finite
from trials.search.storage import open_storage
from trials.study import Study

WORKER = "squeezer_worker"
PARAMS = "squeezer_params"
REASON = "squeezer_reason"

HOLDER_NICE = 10
"""The niceness of work under the lock, a few ms per trial. A busy main job still keeps nine tenths of its core."""

log = own_logger("trials.search.worker")  # as a program its name is __main__

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Where a search worker keeps its trials, and its name.

    Args:
        storage: a database's URL or a journal's path, see `open_storage`.
        study_name: Optuna's study name; the study is created if it does not exist.
        worker: this worker's name. It takes over trials that an earlier process of this name left running.
        lock_file: workers of one machine take trials under its lock, so that they create no more than the study wants.
    """

    storage: str
    study_name: str
    worker: str
    lock_file: Path


class SearchWorker:
    """One worker's share in a study.

    Args:
        study: the user's.
        config: where its trials are.
        holder: runs the work that is done under the lock.
    """

    def __init__(self, study: Study, config: WorkerConfig, holder: Executor) -> None:
        self._user_study = study
        self._worker = config.worker
        self._lock_file = config.lock_file
        self._holder = holder
        self._study: optuna.Study = self._alone(partial(_open_study, study, config))
        self._study.stop = self._stop_asking  # Optuna's own raises outside `optimize`
        self._stopped = False
        self._is_finite = is_finite(self._study.sampler)
        self._storage = self._study._storage
        self._trials: dict[int, Trial] = {}  # by number: to find one in the storage reads all that run
        self._left_behind = [
            trial
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if trial.user_attrs.get(WORKER) == config.worker
        ]

    def ask(self, most: int) -> dict[str, Any]:
        """Return up to `most` trials to train: first those left behind, then new ones.

        They are exhausted if the study has as many trials as it wants, if a sampler of finitely many points has begun
        them all, or if someone has called Optuna's `Study.stop`: the sampler, the pruner or the user's `suggest`.
        """
        found: list[dict[str, Any]] = []
        while len(found) < most and self._left_behind:
            frozen = self._left_behind.pop()
            if PARAMS in frozen.user_attrs:
                found.append({"number": frozen.number, "params": json.loads(frozen.user_attrs[PARAMS])})
            else:  # its worker was killed while it asked
                found += self._begin([frozen._trial_id])
        exhausted = False
        while len(found) < most and not exhausted:
            # one by one under the lock, so that the sampler knows what others have begun, and repeats no point
            wanted = 1 if self._is_finite else most - len(found)
            if self._is_finite:
                claimed, begun = self._alone(self._claim_and_begin)
            else:
                claimed = self._alone(partial(self._claim, wanted))
                begun = self._begin(claimed)
            exhausted = len(claimed) < wanted
            found += begun
        return {"trials": found, "exhausted": exhausted}

    def report(self, number: int, epoch: int, value: float, final: bool) -> dict[str, Any] | None:
        """Record a score. Returns an answer if the trial is pruned, or if the pruner fails on it."""
        if self._has_ended(number):
            return None  # it was pruned while this score was on its way
        trial = self._trial(number)
        trial.report(value, epoch)
        if final:
            self._tell(number, value=value)
            return None
        try:
            if not trial.should_prune():
                return None
        except Exception as error:
            self.fail(number, f"pruner: {type(error).__name__}: {error}")
        else:
            self._tell(number, state=TrialState.PRUNED)
        return {"pruned": number}

    def fail(self, number: int, reason: str) -> None:
        """End trial `number` as failed for `reason`."""
        if self._has_ended(number):
            return
        self._storage.set_trial_user_attr(self._id(number), REASON, reason)
        self._tell(number, state=TrialState.FAIL)

    def stop(self, reason: str) -> None:
        """End all trials of this worker that have not ended."""
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial.user_attrs.get(WORKER) == self._worker:
                self.fail(trial.number, reason)

    def _stop_asking(self) -> None:
        self._stopped = True

    def _tell(self, number: int, value: float | None = None, state: TrialState | None = None) -> None:
        """End a trial. The sampler hears of it, and an error of its own changes nothing any more."""
        try:
            self._study.tell(number, value, state=state)
        except Exception as error:
            if not self._has_ended(number):
                raise
            log.warning("the sampler failed after trial %d: %s: %s", number, type(error).__name__, error)

    def _claim_and_begin(self) -> tuple[list[int], list[dict[str, Any]]]:
        claimed = self._claim(1)
        return claimed, self._begin(claimed)

    def _claim(self, most: int) -> list[int]:
        """Claim up to `most` trials, first those that the user has enqueued, then new ones. Returns their ids.

        Like `Study.ask`, but new trials carry this worker's name from the start. Otherwise,
        if it were killed before writing its name, no worker would take them over.
        """
        known = self._study.get_trials(deepcopy=False)
        claimed: list[int] = []
        for trial in known:
            if len(claimed) == most or trial.state is not TrialState.WAITING:
                continue
            if self._storage.set_trial_state_values(trial._trial_id, state=TrialState.RUNNING):
                self._storage.set_trial_user_attr(trial._trial_id, WORKER, self._worker)
                claimed.append(trial._trial_id)
        if self._stopped or (len(claimed) < most and has_begun_all(self._study)):
            return claimed
        ours = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs={WORKER: self._worker})
        for _ in range(min(most - len(claimed), self._user_study.trials - len(known))):
            claimed.append(self._storage.create_new_trial(self._study._study_id, template_trial=ours))
        return claimed

    def _begin(self, trial_ids: list[int]) -> list[dict[str, Any]]:
        """Let the user's study choose hyperparameters. Return the trials for which it did."""
        return [begun for trial_id in trial_ids if (begun := self._suggest(trial_id)) is not None]

    def _suggest(self, trial_id: int) -> dict[str, Any] | None:
        self._study._thread_local.cached_all_trials = None  # as in `Study.ask`: the sampler must see new trials
        number = self._storage.get_trial(trial_id).number
        try:
            trial = self._trials[number] = Trial(self._study, trial_id)
            params = self._user_study.suggest(trial)
            trial.set_user_attr(PARAMS, json.dumps(params))
        except optuna.TrialPruned:
            self._tell(number, state=TrialState.PRUNED)
            return None
        except Exception as error:
            self.fail(number, f"suggest: {type(error).__name__}: {error}")
            return None
        return {"number": number, "params": params}

    def _has_ended(self, number: int) -> bool:
        return bool(self._storage.get_trial(self._id(number)).state.is_finished())

    def _trial(self, number: int) -> Trial:
        if number not in self._trials:
            self._trials[number] = Trial(self._study, self._id(number))
        return self._trials[number]

    def _id(self, number: int) -> int:
        """Return a trial's id. To find it in the storage reads all that run."""
        known = self._trials.get(number)
        trial_id: int = (self._study.get_trials(deepcopy=False)[number] if known is None else known)._trial_id
        return trial_id

    def _alone(self, do: Callable[[], _Result]) -> _Result:
        def locked() -> _Result:
            with open(self._lock_file, "w", opener=open_private) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                return do()

        return self._holder.submit(locked).result()


def _open_study(study: Study, config: WorkerConfig) -> optuna.Study:
    """Call it under the lock: if two create the tables of a new storage at once, or its study, one of them fails."""
    return optuna.create_study(
        storage=open_storage(config.storage),
        study_name=config.study_name,
        direction=study.direction,
        sampler=study.sampler(),
        pruner=study.pruner(),
        load_if_exists=True,
    )


def close_study(storage: str, name: str, reason: str, worker: str | None = None) -> int:
    """End every trial that is still running or waiting as failed. Returns how many.

    Args:
        storage: see `open_storage`.
        name: Optuna's study name.
        reason: the recorded cause.
        worker: end only trials that this worker has begun; None: all.
    """
    try:
        study = optuna.load_study(study_name=name, storage=open_storage(storage))
    except KeyError:
        return 0  # no side task has created it
    unfinished = study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING))
    if worker is not None:
        unfinished = [trial for trial in unfinished if trial.user_attrs.get(WORKER) == worker]
    for frozen in unfinished:
        Trial(study, frozen._trial_id).set_user_attr(REASON, reason)
        study._storage.set_trial_state_values(frozen._trial_id, state=TrialState.FAIL)  # `tell` refuses waiting ones
    return len(unfinished)


def serve(
    study: Study, config: WorkerConfig, requests: TextIO, answers: TextIO, *, attached: Callable[[], bool]
) -> None:
    """Be the search worker: answer requests until they end or one asks to stop.

    Args:
        study: the user's.
        config: where its trials are.
        requests: one JSON object per line.
        answers: the same. An error is written here before it is raised.
        attached: whether a main job has come. If so, even the first trials are found in its idle time.
    """
    die_with_parent()  # no other signal ends it: it ends when its requests do, with all of them done
    holder = _start_holder()
    is_idle = attached()
    if is_idle:
        run_when_idle()
    try:
        logs.adopt("optuna")
        worker = SearchWorker(study, config, holder)
        for line in requests:
            if not is_idle and attached():
                run_when_idle()
                is_idle = True
            request = json.loads(line)
            if "stop" in request:
                worker.stop(request["stop"])
                return
            answer = _answer(worker, request)
            if answer is not None:
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
    except Exception as error:
        answers.write(json.dumps({"error": hide_passwords(f"{type(error).__name__}: {error}")}) + "\n")
        answers.flush()
        raise


def _start_holder() -> Executor:
    """Start a thread for work under the lock. It is outside the idle class, because others wait for the lock.

    `run_when_idle` cannot be undone, but each thread has a scheduling class and a niceness of its own.
    """
    holder = ThreadPoolExecutor(max_workers=1)
    holder.submit(os.nice, HOLDER_NICE).result()
    return holder


def _answer(worker: SearchWorker, request: dict[str, Any]) -> dict[str, Any] | None:
    if "ask" in request:
        return worker.ask(request["ask"])
    if "report" in request:
        return worker.report(request["report"], request["epoch"], request["value"], request["final"])
    worker.fail(request["fail"], request["reason"])
    return None


def main() -> int:
    """End what a dead side task left running."""
    parser = argparse.ArgumentParser(
        prog="python -m trials.search.worker",
        description=f"Mark the unfinished trials of a study as failed; ${STORAGE_VARIABLE} names the storage.",
    )
    parser.add_argument("--close", action="store_true", required=True)
    parser.add_argument("--study-name", required=True)
    parser.add_argument("--worker", help="only its trials")
    parser.add_argument("--reason", default="the run ended")
    parser.add_argument("--idle", action="store_true", help="a main job trains: use only its idle time")
    arguments = parser.parse_args()
    logs.set_up()
    logs.adopt("optuna")
    if arguments.idle:
        run_when_idle()
    close_study(os.environ[STORAGE_VARIABLE], arguments.study_name, arguments.reason, arguments.worker)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
