"""Brings checkpoints into the artifact store that it did not take when they were saved.

Until then other hosts would train again what a trial has trained since. A trial may wait meanwhile, released by this
worker, or left by one of this host that has ended. As long as nobody has claimed it since, the file's fence is its own.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError

from ds_hooks.shared.trial_attributes import CHECKPOINTS
from trials.search.files import checkpoint_files
from trials.search.files.shared_store import SharedStore
from trials.search.storage.locked_claims import LockedClaims

Alone = Callable[[Callable[[LockedClaims], Any]], Any]
"""Calls a function with the study's claims, locked."""


class LateUploads:
    """The checkpoints of this host that the store lacks.

    Args:
        study: Optuna's.
        store: its artifact store.
        directory: this host's, of the study.
        alone: see `Alone`.
    """

    def __init__(self, study: optuna.Study, store: SharedStore, directory: Path, alone: Alone) -> None:
        self._study, self._store, self._alone = study, store, alone
        for trial in study.get_trials(deepcopy=False):
            here = checkpoint_files.found(checkpoint_files.trial_directory(directory, trial.number))
            if here and not trial.state.is_finished() and here[0].name not in trial.user_attrs.get(CHECKPOINTS, ()):
                store.late[trial.number] = here[0]

    def catch_up(self) -> None:
        """Upload what is missing, unless the store failed a moment ago."""
        if not self._store.late or self._store.has_just_failed():
            return
        fences = self._alone(lambda held: held.fences(since=-1))
        for number, file in tuple(self._store.late.items()):
            if not _is_newest(fences, number, file) or not file.exists():
                del self._store.late[number]
            elif not self._upload(number, file):
                return

    def _upload(self, number: int, file: Path) -> bool:
        """Upload a checkpoint, and write that it is there if it is the trial's newest still. False: the store fails."""
        storage = self._study._storage
        trial_id = storage.get_trial_id_from_study_id_trial_number(self._study._study_id, number)
        names = self._store.upload(number, file, storage.get_trial(trial_id).user_attrs.get(CHECKPOINTS, []))
        if names is None:
            return False

        def note(held: LockedClaims) -> bool:
            if not _is_newest(held.fences(since=-1), number, file):
                return False
            try:
                storage.set_trial_user_attr(trial_id, CHECKPOINTS, names)
            except UpdateFinishedTrialError:
                return False
            return True

        if self._alone(note):
            self._store.keep(number, names)
        else:
            self._store.discard(number, file.name)
        return True


def _is_newest(fences: Mapping[int, tuple[int, bool]], number: int, file: Path) -> bool:
    """Whether nobody has claimed a trial since its checkpoint was written."""
    fence, _ = fences.get(number, (None, False))
    return fence == checkpoint_files.fence_of(file)
