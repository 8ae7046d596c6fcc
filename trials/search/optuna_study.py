"""Optuna's study, which one worker at a time opens, and what the claims must know of it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import optuna
from optuna.samplers import BaseSampler, CmaEsSampler
from optuna.study import StudyDirection
from optuna.trial import TrialState

from ds_hooks.shared.trial_attributes import HISTORY
from trials.search.cached_storage import with_cache
from trials.search.choice.finite import innermost
from trials.search.config import WorkerConfig
from trials.search.leftovers import refuse_leftovers
from trials.search.source import note_source
from trials.search.storage.database import is_shared
from trials.search.storage.directory_identity import bind
from trials.search.storage.journal import rely_on
from trials.search.storage.locked_claims import LockedClaims
from trials.search.storage.optuna_storage import complete, has_studies, open_storage
from trials.study_error import StudyError

if TYPE_CHECKING:
    from trials.study import Study


class NoStudyError(Exception):
    """There is no such study. The message says which there are."""


def known_study(storage: str, name: str) -> optuna.Study:
    """Open a study that a worker has created.

    Raises:
        NoStudyError: none has.
    """
    if not has_studies(storage):
        raise NoStudyError(f"there is no study {name}; found: none")
    opened = open_storage(storage)
    try:
        return optuna.load_study(study_name=name, storage=opened)
    except KeyError:
        known = ", ".join(optuna.get_all_study_names(opened)) or "none"
        raise NoStudyError(f"there is no study {name}; found: {known}") from None


def safe_sampler(study: "Study", storage: str) -> BaseSampler | None:
    """Return the study's sampler.

    Raises:
        StudyError: it would run what others may have written.
    """
    sampler = study.sampler()
    if isinstance(innermost(sampler), CmaEsSampler) and is_shared(storage):
        raise StudyError(
            "CmaEsSampler unpickles what is in a database, so anyone who writes there can run code here; allowed: "
            "another sampler, or a storage in a file of your own"
        )
    return sampler


def open_study(
    study: "Study", config: WorkerConfig, sampler: BaseSampler | None, directory: str | None, held: LockedClaims
) -> optuna.Study:
    """Open or create a study under its lock: if two created one at once, or its tables, one of them would fail.

    Args:
        study: the user's.
        config: where its trials are.
        sampler: chooses hyperparameters.
        directory: the identity of the study's, see `trials.search.storage.directory_identity`.
        held: its claims, locked.

    Raises:
        StudyError: its claims are in another directory, those there are another study's, or it has other directions.
    """
    wanted = [StudyDirection[each.upper()] for each in study.directions or (study.direction,)]
    pruner = optuna.pruners.NopPruner() if study.promotes else study.pruner()
    opened = optuna.create_study(
        storage=with_cache(complete(open_storage(config.storage)), pruner),
        study_name=config.study_name,
        directions=wanted,
        sampler=sampler,
        pruner=pruner,
        load_if_exists=True,
    )
    if opened.directions != wanted:
        raise StudyError(
            f"study '{opened.study_name}' has another direction in this storage: {_words(opened.directions)} there "
            f"and {_words(wanted)} here; allowed: another study_name"
        )
    refuse_leftovers(opened, held, config)
    if directory is not None and not is_shared(config.storage):
        bind(opened, directory)
    note_source(study, opened, set(held.fleet().directories) - {config.worker})
    for params in study.enqueue():
        opened.enqueue_trial(dict(params), skip_if_exists=True)
    return opened


def _words(directions: Sequence[StudyDirection]) -> str:
    return ", ".join(each.name.lower() for each in directions)


def ended_after(study: optuna.Study) -> Callable[[int], int | None]:
    """Return a function: a trial's number -> after how many epochs it ended; None: it has not.

    No crash of the machine takes back what it says.
    """

    def ended(number: int) -> int | None:
        storage = study._storage
        # never from memory: it says what a worker wrote last
        trial = storage.get_trial(storage.get_trial_id_from_study_id_trial_number(study._study_id, number))
        if not trial.state.is_finished():
            return None
        rely_on(storage)  # whoever asks commits claims, or removes checkpoints
        losses = trial.user_attrs.get(HISTORY, {}).get("loss", [])  # of several objectives Optuna keeps no steps
        return max(trial.last_step or 0, len(losses) if trial.state is TrialState.COMPLETE else 0)

    return ended
