"""The clerk: a process of its own that talks to Optuna, so that the training process never waits for a database.

The side task's main program forks it once torch and the study are loaded. One JSON object per line. In: `{"ask": n}`,
`{"report": number, "epoch": e, "value": v, "final": bool}`, `{"fail": number, "reason": text}`, `{"stop": reason}`.
Out: `{"trials": [{"number": i, "params": {…}}, …], "exhausted": bool}`, `{"pruned": number}`, `{"error": text}`. Its
core is the main job's too, so it runs only when nothing else wants that core.
"""

import argparse
import fcntl
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import optuna
from optuna.trial import Trial, TrialState

from trials.gate import GATE_SIGNALS
from trials.process import die_with_parent, run_when_idle
from trials.study import Study

WORKER = "squeezer_worker"
PARAMS = "squeezer_params"
REASON = "squeezer_reason"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClerkPlace:
    """Where a clerk works.

    Args:
        storage_url: Optuna's storage.
        study_name: Optuna's study name; made if there is none yet.
        worker: who we are; trials that an earlier process of this name left running are taken over.
        lock_file: workers of one machine ask one at a time under its lock, so that no trial too many is made.
    """

    storage_url: str
    study_name: str
    worker: str
    lock_file: Path


class Clerk:
    """One worker's share in a study, which the user wrote as `study`."""

    def __init__(self, study: Study, place: ClerkPlace) -> None:
        self._user_study = study
        self._worker = place.worker
        self._lock_file = place.lock_file
        with self._alone():
            self._study = optuna.create_study(
                storage=place.storage_url,
                study_name=place.study_name,
                direction=study.direction,
                sampler=study.sampler(),
                pruner=study.pruner(),
                load_if_exists=True,
            )
        self._left_behind = [
            trial
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if trial.user_attrs.get(WORKER) == place.worker
        ]

    def ask(self, most: int) -> dict[str, Any]:
        """Up to `most` trials to train: first those left behind, then new ones."""
        found: list[dict[str, Any]] = []
        exhausted = False
        while len(found) < most and self._left_behind:
            frozen = self._left_behind.pop()
            if PARAMS in frozen.user_attrs:
                params: dict[str, Any] | None = json.loads(frozen.user_attrs[PARAMS])
            else:  # killed while it asked
                params = self._suggest(Trial(self._study, frozen._trial_id))
            if params is not None:
                found.append({"number": frozen.number, "params": params})
        while len(found) < most and not exhausted:
            with self._alone():
                exhausted = len(self._study.get_trials(deepcopy=False)) >= self._user_study.trials
                trial = None if exhausted else self._new_trial()
            if trial is not None:
                params = self._suggest(trial)
                if params is not None:
                    found.append({"number": trial.number, "params": params})
        return {"trials": found, "exhausted": exhausted}

    def report(self, number: int, epoch: int, value: float, final: bool) -> dict[str, Any] | None:
        """Note a score; the answer says so if the trial is pruned."""
        if self._has_ended(number):
            return None  # pruned, and this was on its way already
        trial = self._trial(number)
        trial.report(value, epoch)
        if final:
            self._study.tell(number, value)
        elif trial.should_prune():
            self._study.tell(number, state=TrialState.PRUNED)
            return {"pruned": number}
        return None

    def fail(self, number: int, reason: str) -> None:
        """End a trial as failed, with its reason."""
        if self._has_ended(number):
            return
        self._trial(number).set_user_attr(REASON, reason)
        self._study.tell(number, state=TrialState.FAIL)

    def stop(self, reason: str) -> None:
        """End all trials of this worker that have not ended."""
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial.user_attrs.get(WORKER) == self._worker:
                self.fail(trial.number, reason)

    def _new_trial(self) -> Trial:
        """As `Study.ask`, but the trial is ours from the first moment: killed in between, it would be nobody's."""
        if self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            trial = self._study.ask()  # the user has enqueued it
            trial.set_user_attr(WORKER, self._worker)
            return trial
        ours = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs={WORKER: self._worker})
        return Trial(self._study, self._study._storage.create_new_trial(self._study._study_id, template_trial=ours))

    def _suggest(self, trial: Trial) -> dict[str, Any] | None:
        try:
            params = self._user_study.suggest(trial)
            trial.set_user_attr(PARAMS, json.dumps(params))
        except Exception as error:
            self.fail(trial.number, f"suggest: {type(error).__name__}: {error}")
            return None
        return params

    def _has_ended(self, number: int) -> bool:
        return bool(self._study.get_trials(deepcopy=False)[number].state.is_finished())

    def _trial(self, number: int) -> Trial:
        trial_id = self._study.get_trials(deepcopy=False)[number]._trial_id
        return Trial(self._study, trial_id)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock_file.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def close_study(storage_url: str, name: str, reason: str, worker: str | None = None) -> int:
    """End every trial that is still running or waiting as failed, with its reason. Returns how many.

    Args:
        storage_url: Optuna's storage.
        name: Optuna's study name.
        reason: why they fail.
        worker: only those which this worker has begun; None: all.
    """
    try:
        study = optuna.load_study(study_name=name, storage=storage_url)
    except KeyError:
        return 0  # no side task ever came so far
    unfinished = study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING))
    if worker is not None:
        unfinished = [trial for trial in unfinished if trial.user_attrs.get(WORKER) == worker]
    for frozen in unfinished:
        Trial(study, frozen._trial_id).set_user_attr(REASON, reason)
        study.tell(frozen.number, state=TrialState.FAIL)
    return len(unfinished)


def serve(study: Study, place: ClerkPlace, requests: TextIO, answers: TextIO, *, idle: bool) -> None:
    """Be the clerk: answer requests until they end or one asks to stop.

    Args:
        study: what the user wrote.
        place: where.
        requests: one JSON object per line.
        answers: likewise; what goes wrong is told here before it is raised.
        idle: a main job trains already, so get ready in its idle time.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GATE_SIGNALS)
    die_with_parent()
    if idle:
        run_when_idle()
    try:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        clerk = Clerk(study, place)
        run_when_idle()
        for line in requests:
            request = json.loads(line)
            if "stop" in request:
                clerk.stop(request["stop"])
                return
            answer = _answer(clerk, request)
            if answer is not None:
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        answers.flush()
        raise


def _answer(clerk: Clerk, request: dict[str, Any]) -> dict[str, Any] | None:
    if "ask" in request:
        return clerk.ask(request["ask"])
    if "report" in request:
        return clerk.report(request["report"], request["epoch"], request["value"], request["final"])
    clerk.fail(request["fail"], request["reason"])
    return None


def main() -> int:
    """End what a dead side task left running."""
    parser = argparse.ArgumentParser(prog="python -m trials.clerk", description="End unfinished trials as failed.")
    parser.add_argument("--close", action="store_true", required=True)
    parser.add_argument("--storage", required=True, metavar="URL")
    parser.add_argument("--study-name", required=True)
    parser.add_argument("--worker", help="only its trials")
    parser.add_argument("--reason", default="the run ended")
    parser.add_argument("--idle", action="store_true", help="a main job trains: take only its idle time")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if arguments.idle:
        run_when_idle()
    close_study(arguments.storage, arguments.study_name, arguments.reason, arguments.worker)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
