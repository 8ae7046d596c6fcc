"""Begins trials that were claimed: the user's study chooses the hyperparameters of new ones."""

import json
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import Trial, TrialState

from ds_hooks.shared.trial_attributes import PARAMS
from trials.own_logger import own_logger
from trials.search.choice.draws import Draws
from trials.search.choice.next_trials import Claimed
from trials.search.choice.placement import NO_ROOM
from trials.search.choice.space import KeptTrial, as_json
from trials.search.storage.claims import MOST_DEATHS
from trials.search.storage.database import is_away
from trials.study import Study, describe_error
from trials.study_error import StudyError

log = own_logger(__name__)


@dataclass(frozen=True, slots=True)
class Unbegun:
    """A trial that cannot be trained.

    Attributes:
        number: the trial's.
        state: that in which it must end.
        reason: why, if it fails.
        is_refused: maybe by Optuna, because others have begun a study of this name with another space.
    """

    number: int
    state: TrialState = TrialState.FAIL
    reason: str | None = None
    is_refused: bool = False


class Beginner:
    """Makes of claimed trials what the side task gets.

    Args:
        user_study: chooses hyperparameters.
        seen: Optuna's study, as its sampler sees it. The sampler has not drawn yet.
        trials: by number; new ones are added.
    """

    def __init__(self, user_study: Study, seen: optuna.Study, trials: dict[int, Trial]) -> None:
        self._user_study, self._seen, self._trials = user_study, seen, trials
        self._draws = Draws(seen.sampler)
        self._said: set[str] = set()

    def begin(self, claimed: Claimed, again: bool = False) -> dict[str, Any] | Unbegun:
        """Return the trial as the side task gets it. Why trials fail is said once per reason.

        Args:
            claimed: the trial.
            again: whether this was tried before, and may have been done in part.
        """
        begun = self._begun(claimed, is_new=claimed.is_new and not again)
        reason = begun.reason if isinstance(begun, Unbegun) else None
        if reason is not None and reason not in self._said:
            self._said.add(reason)
            log.warning("trial %d failed: %s", claimed.claim.trial, reason)
        return begun

    def _begun(self, claimed: Claimed, *, is_new: bool) -> dict[str, Any] | Unbegun:
        claim = claimed.claim
        number = claim.trial
        params = None if is_new else self._seen._storage.get_trial(claimed.trial_id).user_attrs.get(PARAMS)
        further = {"milestone": claimed.milestone} if self._user_study.promotes else {}
        further |= {"deaths": claim.deaths} if claim.deaths else {}
        if claim.deaths >= MOST_DEATHS:
            reason = f"{claim.deaths} workers died in it, one after another, and left no checkpoint"
            return Unbegun(number, reason=reason)
        if params is None:
            begun = self._suggest(claimed.trial_id, number)
            return {**begun, **further} if isinstance(begun, dict) else begun
        if not claimed.fits:
            return Unbegun(number, reason=f"MemoryError: {NO_ROOM}")
        return {"number": number, "params": json.loads(params), "epoch": claim.epoch, **further}

    def _suggest(self, trial_id: int, number: int) -> dict[str, Any] | Unbegun:
        self._seen._thread_local.cached_all_trials = None  # as in `Study.ask`: the sampler must see new trials
        self._draws.begin(number)
        try:
            trial = self._trials[number] = KeptTrial(self._seen, trial_id)
            params = self._user_study.suggest(trial)
            trial.set_user_attr(PARAMS, as_json(params))
            self._name_unused(trial)
        except optuna.TrialPruned:
            return Unbegun(number, TrialState.PRUNED)
        except StudyError:
            raise
        except (Exception, SystemExit) as error:
            if is_away(error):
                raise
            reason = f"suggest: {describe_error(self._user_study, error)}"
            return Unbegun(number, reason=reason, is_refused=isinstance(error, ValueError))
        return {"number": number, "params": params}

    def _name_unused(self, trial: Trial) -> None:
        """Say what of an enqueued point the study has not asked for: Optuna drops it, and a typing error with it."""
        unused = sorted(trial._fixed_params.keys() - trial.params.keys())
        reason = f"the study suggests no {', '.join(map(repr, unused))}, of which an enqueued point has a value"
        if unused and reason not in self._said:
            self._said.add(reason)
            log.warning("trial %d: %s", trial.number, reason)
