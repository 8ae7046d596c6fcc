"""Trains a study's target with the best hyperparameters of its surrogates: `trials transfer`."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from ds_hooks.shared.private_file import make_dir, write_text
from ds_hooks.shared.trial_attributes import SOURCE
from trials.search.choice.paused import is_paused
from trials.search.files.best_weights import ranked, why_none
from trials.search.optuna_study import known_study
from trials.search.storage.optuna_storage import open_storage
from trials.shrinking.errors import ShrinkError
from trials.study import Study
from trials.training.member import build
from trials.training.shrunk import for_target, model_of

LOOK_EVERY_S = 1.0
"""How often a study is read that has not got far enough."""

_FILE = '''"""A study's target, with the best hyperparameters of its surrogates. `trials transfer` wrote this file."""

from trials import load_study
from trials.transfer import as_target

_study = load_study({study!r})


class Target(type(_study)):
    """Trains the model itself, once for each of the best."""

    trials, rungs, search, keep_best = {top}, (), None, {top}

    def __init__(self):
        super().__init__()
        as_target(self)

    def enqueue(self):
        return []

    def pruner(self):
        return None
'''


class NothingToTransferError(Exception):
    """There is no trial to take hyperparameters from. The message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """The study of a target.

    Attributes:
        file: its Python file.
        name: Optuna's name of it.
        sources: the numbers of the surrogates whose hyperparameters it has, the best first.
        zeroed: the readouts that begin at zero.
    """

    file: Path
    name: str
    sources: list[int]
    zeroed: list[str]


def spent(study: optuna.Study) -> int:
    """How many trials have had their share of the search: they have ended, or wait at a rung for a promotion."""
    return sum(1 for t in study.get_trials(deepcopy=False) if t.state.is_finished() or is_paused(t))


def wait_for_half(study: Study, storage: str, name: str, say: Callable[[str], None]) -> None:
    """Wait until half of the search for surrogates is spent, and a trial has completed.

    Args:
        study: the user's.
        storage: where its trials are.
        name: Optuna's name of it.
        say: is told what it waits for, once.

    Raises:
        NoStudyError: there is no such study.
    """
    known, said = known_study(storage, name), False
    while True:
        done = spent(known)
        has_one = bool(known.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
        if 2 * done >= study.trials and has_one:
            return
        if not said:
            least = -(-study.trials // 2)
            ended = f"{done} of the {study.trials} trials of study {name} have ended"
            say(f"{ended}; the target begins after {least}, one of them completed")
            said = True
        time.sleep(LOOK_EVERY_S)


def prepare(study: Study, file: Path, storage: str, name: str, directory: Path, top: int) -> Target:
    """Create the study of the target of `study`, with the hyperparameters of its best trials in its queue.

    A study that was there before keeps the trials that it has; those of the same source are not added again.

    Args:
        study: the user's.
        file: its file.
        storage: where its trials are.
        name: Optuna's name of it.
        directory: for the file that is written.
        top: how many trials.

    Raises:
        ShrinkError: the study does not shrink.
        NothingToTransferError: none of its trials has completed.
    """
    if study.shrink is None:
        raise ShrinkError(f"{file}: the study has no attribute shrink, so its trials are those of the model already")
    known = known_study(storage, name)
    best = ranked(known)[:top]
    if not best:
        raise NothingToTransferError(why_none(known))
    target = f"{name}-target"
    wanted = [StudyDirection[each.upper()] for each in study.directions or (study.direction,)]
    made = optuna.create_study(storage=open_storage(storage), study_name=target, directions=wanted, load_if_exists=True)
    have = {trial.user_attrs.get(SOURCE) for trial in made.get_trials(deepcopy=False)}
    for trial in best:
        source = f"{name}#{trial.number}"
        if source not in have:
            made.enqueue_trial(trial.params, user_attrs={SOURCE: source})
    make_dir(directory)
    written = directory / f"{file.stem}_target.py"
    trials = len(made.get_trials(deepcopy=False))
    write_text(written, _FILE.format(study=str(file.resolve()), top=trials))
    return Target(written, target, [trial.number for trial in best], _zeroed(study, best[0]))


def as_target(study: Study) -> None:
    """Let a study train its target."""
    assert study.shrink is not None  # seen before the file was written
    study.shrink = for_target(study.shrink)


def lines_for_a_script(zeroed: list[str]) -> list[str]:
    """What a training script of the user's own must do, so that the target begins as it did here."""
    return [f"torch.nn.init.zeros_(model.get_parameter({name!r}))" for name in zeroed]


def _zeroed(study: Study, trial: FrozenTrial) -> list[str]:
    """The names of the readouts that begin at zero in the target."""
    params: dict[str, Any] = study.suggest(optuna.trial.FixedTrial(trial.params))
    own = study.shrink
    assert own is not None  # the caller looked
    study.shrink = for_target(own)
    try:
        model, _ = model_of(study, params)
    finally:
        study.shrink = own
    plain = build(study, 0, params).roles
    assert plain is not None  # it shrinks
    return [n for n, p in model.named_parameters() if n in plain and plain[n].kind == "output" and not p.any()]
