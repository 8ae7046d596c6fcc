"""Reads how a study stands, and says in words when that admits or refuses its deadline."""

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import GridSampler
from optuna.trial import TrialState

from trials.search.choice.deadline import (
    Deadline,
    Outlook,
    Trained,
    Verdict,
    judge,
    left_of_rungs,
    left_of_trials,
    rate_of,
)
from trials.search.optuna_study import known_study
from trials.search.storage.claims import Account, read_account
from trials.search.storage.database import connect_to_read
from trials.study import Study

JUDGE_AGAIN_S = 60.0
"""How often a deadline is judged, at most."""


def outlook(user_study: Study, study: optuna.Study, account: Account) -> Outlook:
    """Return how a study stands.

    Args:
        user_study: the user's.
        study: Optuna's.
        account: of its claims.
    """
    found = study.get_trials(deepcopy=False)
    named = {TrialState.FAIL: "failed", TrialState.COMPLETE: "ended", TrialState.PRUNED: "ended"}
    trials = [
        Trained(account.trained.get(each.number, user_study.epochs if each.state.is_finished() else 0), state)
        for each in found
        for state in [named.get(each.state, "open")]
    ]
    budget = max(user_study.trials, len(trials))
    if isinstance(study.sampler, GridSampler):  # it ends when each point has had its trial
        budget = max(len(trials), min(budget, study.sampler._n_min_trials))
    if user_study.promotes:
        rungs = [rung for rung in user_study.rungs if rung < user_study.epochs]
        left = left_of_rungs(trials, budget, user_study.epochs, rungs, user_study.reduction_factor)
    else:
        left = left_of_trials(trials, budget, user_study.epochs)
    rate = rate_of(account.minutes, account.until, account.kept_share)
    return Outlook(sum(each.state != "open" for each in trials), budget, left, rate)


def verdict_on(user_study: Study, storage: str, name: str, directory: Path, by: str | None) -> Verdict:
    """Judge a study as it stands now.

    Args:
        user_study: the user's.
        storage: see `open_storage`.
        name: Optuna's name of it.
        directory: the study's.
        by: its deadline; None: it has none.

    Raises:
        DeadlineError: `by` is no time.
        NoStudyError: no worker has begun it yet.
    """
    deadline = None if by is None else Deadline.of(by)
    study = known_study(storage, name)
    engine = connect_to_read(storage, directory)
    account = Account({}, (), None, 1.0)
    if engine is not None:
        account = read_account(engine, name)
        engine.dispose()
    study.sampler = user_study.sampler() or study.sampler
    return judge(outlook(user_study, study, account), deadline, datetime.now().astimezone())


class DeadlineWatch:
    """Judges a study's deadline now and then, and says each verdict once.

    Args:
        deadline: as the study gives it; None: it has none, and nothing is said.
        look: reads how it stands.
        clock_s: the time.
    """

    def __init__(
        self, deadline: str | None, look: Callable[[], Outlook], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._deadline = None if deadline is None else Deadline.of(deadline)
        self._look, self._clock_s = look, clock_s
        self._again_s = -float("inf")
        self._said: bool | None = None

    def judge(self) -> dict[str, Any] | None:
        """Return what there is to say, as an answer of the search worker's."""
        now_s = self._clock_s()
        if self._deadline is None or now_s < self._again_s:
            return None
        verdict = judge(self._look(), self._deadline, datetime.now().astimezone())
        if verdict.is_admitted is None:
            self._again_s = now_s + JUDGE_AGAIN_S / 12
            return None
        self._again_s = now_s + JUDGE_AGAIN_S
        if verdict.is_admitted is self._said:
            return None
        self._said = verdict.is_admitted
        return {"said": verdict.text, "warns": not verdict.is_admitted}
