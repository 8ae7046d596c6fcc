"""What another study of the same name has left: one that was deleted, or that is in another storage."""

import json
from contextlib import suppress
from pathlib import Path

import optuna
from optuna.trial import TrialState

from ds_hooks.shared.trial_attributes import WORKER
from trials.own_logger import own_logger
from trials.search.config import WorkerConfig
from trials.search.files.checkpoint_files import best_directory
from trials.search.storage.database import is_shared
from trials.search.storage.locked_claims import LockedClaims
from trials.study_error import StudyError

log = own_logger(__name__)


def refuse_leftovers(study: optuna.Study, held: LockedClaims, config: WorkerConfig) -> None:
    """Refuse a directory with another study's files: its trials would pass for this one's, and its best weights go.

    Claims in the study's own database are a deleted study's, and are forgotten.

    Args:
        study: Optuna's.
        held: its claims, locked.
        config: where its trials are.

    Raises:
        StudyError: such files are there.
    """
    trials = study.get_trials(deepcopy=False)
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
