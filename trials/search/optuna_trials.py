"""What a worker writes of its trials to Optuna's storage, while it holds them."""

from collections.abc import Callable, Sequence
from math import isnan
from typing import Any

import optuna
from optuna.study._tell import _tell_with_warning
from optuna.trial import FrozenTrial, Trial, TrialState

from ds_hooks.shared.trial_attributes import CHECKPOINTS, HISTORY, REASON
from trials.own_logger import own_logger
from trials.search.choice.constraints import note_constraints
from trials.search.storage.database import is_away

log = own_logger(__name__)


class OptunaTrials:
    """The trials of a study, by number.

    Args:
        study: Optuna's.
        seen: the same, as its sampler sees it.
        ended_after: asks the storage whether a trial has ended, see `trials.search.optuna_study`.

    Attributes:
        known: number -> a trial of this worker's. To find one in the storage reads all that run.
    """

    def __init__(self, study: optuna.Study, seen: optuna.Study, ended_after: Callable[[int], int | None]) -> None:
        self._study, self._seen, self._ended_after = study, seen, ended_after
        self._storage = study._storage
        self.known: dict[int, Trial] = {}

    def trial(self, number: int) -> Trial:
        """Return a trial to which scores can be written."""
        if number not in self.known:
            self.known[number] = Trial(self._seen, self.id(number))
        return self.known[number]

    def id(self, number: int) -> int:
        """Return a trial's id."""
        known = self.known.get(number)
        trial_id: int = (self._study.get_trials(deepcopy=False)[number] if known is None else known)._trial_id
        return trial_id

    def frozen(self, number: int) -> FrozenTrial:
        """Return a trial as the storage has it."""
        return self._storage.get_trial(self.id(number))

    def report(
        self, trial: Trial, epoch: int, value: float | list[float], state: TrialState, history: dict[str, Any] | None
    ) -> None:
        """Write a score, and the state in which the trial is with it."""
        if history is not None:
            self._storage.set_trial_user_attr(trial._trial_id, HISTORY, history)
        is_new = epoch not in trial._cached_frozen_trial.intermediate_values  # Optuna keeps the first, and warns
        if is_new and len(self._study.directions) == 1:  # it reports and prunes for a single objective
            trial.report(value, epoch)
        if state is TrialState.COMPLETE and any(map(isnan, value if isinstance(value, list) else [value])):
            reason = f"its score is {value}"
            log.warning("trial %d failed: %s", trial.number, reason)
            self.end(trial.number, trial._trial_id, TrialState.FAIL, reason)  # Optuna would name no reason
        elif state is TrialState.COMPLETE:
            self.tell(trial.number, value=value)
        elif state is TrialState.WAITING:
            note_constraints(self._study, trial._trial_id)
            self.release(trial._trial_id)

    def note_checkpoints(self, trial_id: int, names: Sequence[str] | None) -> None:
        """Write which checkpoints of a trial are in the study's artifact store; None: it has none."""
        if names is not None:
            self._storage.set_trial_user_attr(trial_id, CHECKPOINTS, list(names))

    def checkpoints(self, trial_id: int) -> list[str]:
        """Return which are there."""
        return list(self._storage.get_trial(trial_id).user_attrs.get(CHECKPOINTS, []))

    def release(self, trial_id: int) -> None:
        """Let a trial wait for another worker."""
        self._storage.set_trial_state_values(trial_id, state=TrialState.WAITING)

    def end(self, number: int, trial_id: int, state: TrialState, reason: str | None) -> None:
        """End a trial without a result."""
        if reason is not None:
            self._storage.set_trial_user_attr(trial_id, REASON, reason)
        self.tell(number, state=state)

    def tell(self, number: int, value: float | list[float] | None = None, state: TrialState | None = None) -> None:
        """End a trial. The sampler is informed; if that fails, the trial has ended all the same."""
        try:
            self._tell(number, value, state)
        except (Exception, SystemExit) as error:
            if not is_away(error) and self.frozen(number).state is TrialState.WAITING:
                # someone has written so; but the claim says whose it is
                self._storage.set_trial_state_values(self.id(number), state=TrialState.RUNNING)
                self._tell(number, value, state)
                return
            if is_away(error) or self._ended_after(number) is None:
                raise
            log.warning("the sampler failed after trial %d: %s: %s", number, type(error).__name__, error)

    def _tell(self, number: int, value: float | list[float] | None, state: TrialState | None) -> None:
        """Do what `Study.tell` does, but for reading what it has just written."""
        _tell_with_warning(self._seen, number, value, state)
