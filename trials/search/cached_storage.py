"""Optuna's cache of a database, made for studies of many workers: what others train is not read again and again."""

import copy
from collections.abc import Iterable, Mapping, Sequence

from optuna.pruners import BasePruner, MedianPruner, NopPruner, PercentilePruner, ThresholdPruner
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.trial import FrozenTrial, TrialState

from ds_hooks.shared.trial_attributes import PARAMS, WORKER
from trials.search.choice.paused import is_paused

_LOOK_AT_ENDED = (NopPruner, MedianPruner, PercentilePruner, ThresholdPruner)
"""Pruners that compare a trial with ended ones, if with any."""


class CachedStorage(_CachedStorage):  # type: ignore[misc]  # of an untyped package
    """Keeps trials in memory that change only with their claims.

    Optuna reads all unfinished trials at each call. Those are all that train anywhere and, under promotion, all that
    are paused, which most trials are for good. But once a trial has begun, its parameters and its state stay as they
    are until its claim ends; a paused one stays until it is claimed. Scores of trials that train are not seen here.
    """

    def __init__(self, backend: RDBStorage) -> None:
        super().__init__(backend)
        self._running: set[int] = set()
        """Numbers of the trials that are kept while they train; a worker has one study."""
        self._created: set[int] = set()
        """Ids of trials that were created here, and not read yet."""

    def look_again(self, study_id: int, numbers: Iterable[int]) -> None:
        """Read these trials of a study anew at the next call."""
        with self._lock:
            for number in numbers:
                self._running.discard(number)
                trial_id = self._study_id_and_number_to_trial_id.get((study_id, number))
                if trial_id is not None and self._get_cached_trial(trial_id) is None:  # it has not ended
                    self._studies[study_id].unfinished_trial_ids.add(trial_id)

    def look_at_changes(self, study_id: int, fences: Mapping[int, tuple[int, bool]], since: int) -> None:
        """Read anew at the next call what has been claimed or let go; see `LockedClaims.fences`."""
        held = {number for number, (_, is_held) in fences.items() if is_held}
        claimed = {number for number, (fence, _) in fences.items() if fence > since}
        self.look_again(study_id, claimed | (self._running - held))

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """See `BaseStorage`."""
        trial_id: int = super().create_new_trial(study_id, template_trial)
        self._created.add(trial_id)
        return trial_id

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """See `BaseStorage`. What was just created here is first read from memory: nobody else may write to it."""
        if trial_id not in self._created:
            return super().get_trial(trial_id)
        self._created.discard(trial_id)
        with self._lock:
            study_id, number = self._trial_id_to_study_id_and_number[trial_id]
            return copy.deepcopy(self._studies[study_id].trials[number])

    def get_trial_number_from_id(self, trial_id: int) -> int:
        """See `BaseStorage`."""
        known = self._trial_id_to_study_id_and_number.get(trial_id)
        number: int = super().get_trial_number_from_id(trial_id) if known is None else known[1]
        return number

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """See `BaseStorage`."""
        is_set: bool = super().set_trial_state_values(trial_id, state, values)
        self._created.discard(trial_id)
        study_id, number = self._trial_id_to_study_id_and_number[trial_id]
        self.look_again(study_id, [number])
        return is_set

    def _read_trials_from_remote_storage(self, study_id: int) -> None:
        super()._read_trials_from_remote_storage(study_id)
        with self._lock:
            study, numbers = self._studies[study_id], self._trial_id_to_study_id_and_number
            # all up to here have been read: Optuna creates a study's trials one after another, under a lock
            study.last_finished_trial_id = max((study.last_finished_trial_id, *study.unfinished_trial_ids))
            for trial_id in tuple(study.unfinished_trial_ids):
                trial = study.trials[numbers[trial_id][1]]
                if _is_begun(trial):
                    self._running.add(trial.number)
                if _is_begun(trial) or is_paused(trial):
                    study.unfinished_trial_ids.discard(trial_id)


def _is_begun(trial: FrozenTrial) -> bool:
    return trial.state is TrialState.RUNNING and WORKER in trial.user_attrs and PARAMS in trial.user_attrs


def with_cache(storage: BaseStorage, pruner: BasePruner | None) -> BaseStorage:
    """Return the storage as a study's workers use it; `pruner` is Optuna's default if it is None."""
    if isinstance(storage, RDBStorage) and (pruner is None or type(pruner) in _LOOK_AT_ENDED):
        return CachedStorage(storage)
    return storage
