"""What others do to trials once a worker is gone: release them for the next one, or end them for good."""

import argparse
import os
from pathlib import Path
from typing import NamedTuple

import optuna
from optuna.trial import Trial, TrialState

from ds_hooks.shared import logs
from ds_hooks.shared.secrets import STORAGE_VARIABLE
from ds_hooks.shared.trial_attributes import REASON
from trials.gate.process import run_when_idle
from trials.search.choice.next_trials import requeue
from trials.search.choice.paused import is_paused, last_score
from trials.search.optuna_study import ended_after, known_study
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage


def release_trials(storage: str, name: str, directory: Path, worker: str, *, died: bool) -> int:
    """Let the trials of a worker that is gone wait for another. Returns how many there were.

    Args:
        storage: see `open_storage`.
        name: Optuna's study name.
        directory: the study's.
        worker: its name, or what the names of several begin with.
        died: whether it ended unasked.
    """
    claims = Claims(connect(storage, directory), name, "")
    try:
        with claims.alone() as held:  # a side task may create the study at the same time
            try:
                study = optuna.load_study(study_name=name, storage=open_storage(storage))
            except KeyError:
                return 0  # none has
            ended = ended_after(study)
            released = [trial for each in held.workers(worker) for trial in held.release(each, died=died, ended=ended)]
            requeue(study, held.claimed())
    finally:
        claims.close()
    return len(released)


class Ended(NamedTuple):
    """How many trials were ended."""

    failed: int
    pruned: int


def close_study(storage: str, name: str, reason: str) -> Ended:
    """End every trial that is running or waiting as failed, and those that wait for a promotion as pruned.

    Args:
        storage: see `open_storage`.
        name: Optuna's study name.
        reason: the recorded cause.

    Raises:
        NoStudyError: there is no such study.
    """
    study = known_study(storage, name)
    unfinished = study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING))
    paused = [frozen for frozen in unfinished if is_paused(frozen)]
    for frozen in unfinished:
        Trial(study, frozen._trial_id).set_user_attr(REASON, reason)
        state = TrialState.PRUNED if frozen in paused else TrialState.FAIL
        # `tell` refuses waiting ones
        study._storage.set_trial_state_values(frozen._trial_id, state, last_score(frozen) if frozen in paused else None)
    return Ended(failed=len(unfinished) - len(paused), pruned=len(paused))


def main() -> int:
    """Release what a side task that is gone has left."""
    parser = argparse.ArgumentParser(
        prog="python -m trials.search.close",
        description=f"Let the trials of a worker that is gone wait for another; ${STORAGE_VARIABLE} names the storage.",
    )
    parser.add_argument("--study-name", required=True)
    parser.add_argument("--directory", type=Path, required=True, help="the study's")
    parser.add_argument("--worker", required=True, help="its name, or what several begin with")
    parser.add_argument("--died", action="store_true", help="it ended unasked")
    parser.add_argument("--idle", action="store_true", help="a main job trains: use only its idle time")
    arguments = parser.parse_args()
    logs.set_up()
    logs.adopt("optuna")
    if arguments.idle:
        run_when_idle()
    storage = os.environ[STORAGE_VARIABLE]
    release_trials(storage, arguments.study_name, arguments.directory, arguments.worker, died=arguments.died)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
