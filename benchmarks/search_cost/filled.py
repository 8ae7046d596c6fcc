"""A study with many trials, as search workers would have left it, but written in seconds."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.samplers import RandomSampler
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial, TrialState

from ds_hooks.shared.trial_attributes import HISTORY, MILESTONE, PARAMS, WORKER
from trials.search.choice.space import as_json
from trials.search.storage.claim_tables import CLAIM, SPAN
from trials.search.storage.database import connect
from trials.search.storage.directory_identity import identity
from trials.study import Study

_WORKER = "an earlier one"


def fill(user_study: Study, study: optuna.Study, storage: str, directory: Path, trials: int) -> None:
    """Add trials that have been trained until there are `trials`.

    Half have completed, the others were pruned at the first two rungs. Under promotion a third gets past each rung; the
    others are paused there.

    Args:
        user_study: says what trials suggest, and when they report.
        study: Optuna's, of the same name.
        storage: where it is.
        directory: the study's, for claims.
        trials: how many.
    """
    numbers = range(len(study.get_trials(deepcopy=False)), trials)
    added = [_trained(user_study, number) for number in numbers]
    backend = getattr(study._storage, "_backend", None)
    if isinstance(backend, optuna.storages.RDBStorage):
        with backend.engine.begin() as c:
            _insert_trials(c, study._study_id, numbers, added)
    else:
        for trial in added:
            study._storage.create_new_trial(study._study_id, template_trial=trial)
    engine = connect(storage, directory)
    with engine.begin() as c:
        _insert_claims(c, study.study_name, identity(directory), numbers, added)
    engine.dispose()


class _Drawn(optuna.trial.FixedTrial):  # type: ignore[misc]  # of an untyped package
    """Suggests random values of whatever is asked for."""

    def __init__(self, seed: int) -> None:
        super().__init__({})
        self._sampler = RandomSampler(seed=seed)

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        self._distributions[name] = distribution
        self._suggested_params[name] = self._sampler.sample_independent(None, None, name, distribution)
        return self._suggested_params[name]


def _trained(user_study: Study, number: int) -> FrozenTrial:
    drawn = _Drawn(number)
    params = user_study.suggest(drawn)
    epochs = (*user_study.rungs, user_study.epochs)
    past = next(n for n in range(len(epochs)) if number % 3 ** (n + 1) or n == len(epochs) - 1)
    trained = epochs[: 1 + past if user_study.promotes else (len(epochs), 1, len(epochs), 2)[number % 4]]
    scores = {epoch: score(number, epoch / user_study.epochs) for epoch in trained}
    attributes: dict[str, Any] = {WORKER: _WORKER, PARAMS: as_json(params), HISTORY: history(scores)}
    stopped = TrialState.PRUNED
    if user_study.promotes:
        attributes[MILESTONE], stopped = trained[-1], TrialState.WAITING
    state = TrialState.COMPLETE if trained == epochs else stopped
    return optuna.trial.create_trial(
        state=state,
        value=scores[trained[-1]] if state.is_finished() else None,
        params=drawn.params,
        distributions=drawn.distributions,
        intermediate_values=scores,
        user_attrs=attributes,
    )


def score(number: int, share: float) -> float:
    """What trial `number` scores after that share of its epochs: more with each, and some trials are better."""
    return share + number * 37 % 96 / 96


def history(scores: dict[int, float]) -> dict[str, Any]:
    """What the side task writes of a trial with each score, see `trials.side_task`."""
    last = max(scores)
    return {"loss": [1 / (1 + epoch) for epoch in range(last)], "score": {str(e): s for e, s in scores.items()}}


def _insert_trials(c: sa.Connection, study_id: int, numbers: Sequence[int], trials: Sequence[FrozenTrial]) -> None:
    """Write what Optuna's `RDBStorage` would, which takes some ten statements per trial."""
    now = datetime.now(UTC).replace(tzinfo=None)
    tables = models.BaseModel.metadata.tables
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ("trials", *_PARTS)}
    rows["trials"] += [
        {"study_id": study_id, "number": n, "state": t.state, "datetime_start": now, "datetime_complete": now}
        for n, t in zip(numbers, trials, strict=True)
    ]
    c.execute(tables["trials"].insert(), rows["trials"])
    found = sa.select(tables["trials"].c.number, tables["trials"].c.trial_id).where(
        tables["trials"].c.study_id == study_id
    )
    ids = {row.number: row.trial_id for row in c.execute(found)}
    for number, trial in zip(numbers, trials, strict=True):
        for name, of in _PARTS.items():
            rows[name] += [{"trial_id": ids[number], **each} for each in of(trial)]
    for name in _PARTS:
        c.execute(tables[name].insert(), rows[name])


def _params(trial: FrozenTrial) -> list[dict[str, Any]]:
    return [
        {
            "param_name": name,
            "param_value": of.to_internal_repr(trial.params[name]),
            "distribution_json": distribution_to_json(of),
        }
        for name, of in trial.distributions.items()
    ]


_FINITE = models.TrialValueModel.TrialValueType.FINITE
_FINITE_STEP = models.TrialIntermediateValueModel.TrialIntermediateValueType.FINITE
_PARTS: dict[str, Any] = {
    "trial_params": _params,
    "trial_values": lambda trial: [
        {"objective": 0, "value": value, "value_type": _FINITE} for value in trial.values or ()
    ],
    "trial_intermediate_values": lambda trial: [
        {"step": step, "intermediate_value": value, "intermediate_value_type": _FINITE_STEP}
        for step, value in trial.intermediate_values.items()
    ],
    "trial_user_attributes": lambda trial: [
        {"key": key, "value_json": json.dumps(value)} for key, value in trial.user_attrs.items()
    ],
}


def _insert_claims(
    c: sa.Connection, study: str, directory: str, numbers: Sequence[int], trials: Sequence[FrozenTrial]
) -> None:
    shared = {"study": study, "fence": 1}
    ended = [(number, trial.last_step) for number, trial in zip(numbers, trials, strict=True)]
    claimed = [
        {**shared, "trial": number, "worker": None, "epoch": last, "trained": last, "deaths": 0, "directory": directory}
        for number, last in ended
    ]
    spans = [
        {**shared, "span": f"{number}", "trial": number, "worker": _WORKER, "from_epoch": 0, "to_epoch": last}
        | {"kept": True}
        for number, last in ended
    ]
    c.execute(CLAIM.insert(), claimed)
    c.execute(SPAN.insert(), spans)
