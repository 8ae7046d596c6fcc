"""What another study of the same name has left: one that was deleted, or that is in another storage."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from ds_hooks.shared.trial_attributes import WORKER
from trials.own_logger import own_logger
from trials.search.config import WorkerConfig
from trials.search.files.checkpoint_files import best_directory
from trials.search.storage.database import is_shared
from trials.search.storage.locked_claims import LockedClaims
from trials.study_error import StudyError

log = own_logger(__name__)


def check_numbers(study_name: str, trials: Sequence[FrozenTrial]) -> None:
    """Refuse a study without one of its trials: their numbers are their places, here and elsewhere.

    Raises:
        StudyError: one is gone.
    """
    for place, trial in enumerate(trials):
        if trial.number != place:
            raise deleted(study_name, place)


def deleted(study_name: str, number: int) -> StudyError:
    """Say that a trial is gone. Optuna numbers a new one by how many there are, so no further one can begin."""
    return StudyError(
        f"trial {number} of study '{study_name}' is no longer in its storage: someone has deleted it, and Optuna would "
        "give its number, or another trial's, to a new one. Allowed: to put it back from a copy of the storage, or "
        "another study_name"
    )


def refuse_leftovers(study: optuna.Study, held: LockedClaims, config: WorkerConfig) -> None:
    """Refuse a directory with another study's files: its trials would pass for this one's, and its best weights go.

    Claims in the study's own database are a deleted study's, and are forgotten.

    Args:
        study: Optuna's.
        held: its claims, locked.
        config: where its trials are.

    Raises:
        StudyError: such files are there, or a trial is gone.
    """
    trials = study.get_trials(deepcopy=False)
    check_numbers(study.study_name, trials)
    # one that someone has closed while a worker claimed it has no worker
    begun = {trial.number for trial in trials if WORKER in trial.user_attrs or trial.state.is_finished()}
    completed = {trial.number for trial in trials if trial.state is TrialState.COMPLETE}
    are_claims_ours = held.fences(since=-1).keys() <= begun
    if not are_claims_ours and is_shared(config.storage):
        log.info("claims of an earlier study '%s', which was deleted, are forgotten", study.study_name)
        held.forget_all()
        are_claims_ours = True
    if not are_claims_ours or (config.directory is not None and not _kept(config.directory) <= completed):
        raise StudyError(
            f"{config.directory} has the trials of another study '{study.study_name}', which is not in this storage; "
            "allowed: another study_name or directory, or remove it"
        )


def _kept(directory: Path) -> set[int]:
    """The trials whose weights are there."""
    with suppress(FileNotFoundError, ValueError, TypeError, KeyError):  # one that is damaged is written anew
        entries = json.loads((best_directory(directory) / "best.json").read_text(encoding="utf-8"))
        return {entry["number"] for entry in entries}
    return set()
