"""Trains a study's target with the best hyperparameters of its surrogates: `trials transfer`.

Two studies are made of the user's, each with a file and a queue of its own: `NAME-confirm` trains the best surrogates
again, and `NAME-target` the target. They are trained, recorded and resumed like any other.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from ds_hooks.shared.private_file import make_dir, write_text
from ds_hooks.shared.trial_attributes import SOURCE
from trials.confirmation import Choice, Confirmed, epochs_of, how_many
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

CONFIRMS = "squeezer_confirms"
"""Optuna's attribute of a trial that trains a surrogate again: whose hyperparameters it has."""

CHOICE = "squeezer_choice"
"""Optuna's attribute of a trial that trains the target: why it has these hyperparameters, in words."""

FIRST_SEED = 1_000_000
"""Of trials that confirm others: no search has as many, so none of its seeds comes again."""

SEED = "squeezer_seed"
"""Optuna's attribute of a trial that trains a surrogate again: its seed."""

_FILE = '''"""{about} `trials transfer` wrote this file."""

from trials import load_study
from trials.transfer import {base}


class Made({base}, type(load_study({study!r}))):
    """{about}"""

    def __init__(self):
        super().__init__({given})
'''


class Queued:
    """What makes a user's study train what is in its queue, each trial to the end.

    Args:
        trials: how many there have been.
    """

    shrink: Any
    keep_best: int

    def __init__(self, trials: int) -> None:
        super().__init__()
        self.trials, self.rungs, self.search = trials, (), None

    def enqueue(self) -> Sequence[Mapping[str, Any]]:
        """They are there."""
        return []

    def pruner(self) -> None:
        """None is needed without rungs."""


class Confirmation(Queued):
    """Trains the best surrogates again, with seeds that are not the search's.

    Args:
        seeds: of all trials, by their numbers.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__(len(seeds))
        self.keep_best = 0
        self._seeds_of_trials = seeds

    def seed(self, params: dict[str, Any], number: int) -> int:
        """Not the user's, which may be the same for all trials."""
        known = self._seeds_of_trials
        return known[number] if number < len(known) else FIRST_SEED + number  # added since this file was written


class Target(Queued):
    """Trains the model itself, once with the hyperparameters of each chosen surrogate."""

    def __init__(self, trials: int) -> None:
        super().__init__(trials)
        self.keep_best = trials
        self.shrink = for_target(self.shrink)


class NothingToTransferError(Exception):
    """There is no trial to take hyperparameters from. The message says why."""


@dataclass(frozen=True, slots=True)
class Made:
    """A study that was made of a user's.

    Attributes:
        file: its Python file.
        name: Optuna's name of it.
        is_over: whether all its trials have ended.
    """

    file: Path
    name: str
    is_over: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A user's study of surrogates.

    Attributes:
        study: the user's.
        file: its file.
        storage: where its trials are.
        name: Optuna's name of it.
        directory: for the files that are written.
    """

    study: Study
    file: Path
    storage: str
    name: str
    directory: Path

    def best(self) -> list[FrozenTrial]:
        """The trials that have completed, the best first; of several objectives, the front.

        Raises:
            ShrinkError: the study does not shrink.
            NoStudyError: there is no such study.
            NothingToTransferError: none of its trials has completed.
        """
        if self.study.shrink is None:
            raise ShrinkError(
                f"{self.file}: the study has no attribute shrink, so its trials are those of the model already"
            )
        known = known_study(self.storage, self.name)
        found = ranked(known)
        if not found:
            raise NothingToTransferError(why_none(known))
        return found

    @property
    def directions(self) -> list[StudyDirection]:
        """Of the objectives."""
        return [StudyDirection[each.upper()] for each in self.study.directions or (self.study.direction,)]

    def label(self, trial: FrozenTrial) -> str:
        """By which the trials of other studies name one of this."""
        return f"{self.name}#{trial.number}"

    def opened(self, kind: str) -> optuna.Study:
        """Open the study of this `kind`, which is created if there is none."""
        return optuna.create_study(
            storage=open_storage(self.storage),
            study_name=f"{self.name}-{kind}",
            directions=self.directions,
            load_if_exists=True,
        )

    def write(self, kind: str, opened: optuna.Study, base: type[Queued], about: str, given: Any) -> Made:
        """Write the file of a study of this `kind`, which trains all that is in its queue; `base` is `given` this."""
        make_dir(self.directory)
        file = self.directory / f"{self.file.stem}_{kind}.py"
        study = str(self.file.resolve())
        write_text(file, _FILE.format(about=about, base=base.__name__, study=study, given=given))
        trials = opened.get_trials(deepcopy=False)
        return Made(file, opened.study_name, all(trial.state.is_finished() for trial in trials))


@dataclass(frozen=True, slots=True)
class Prepared:
    """The study of a target, ready to be trained.

    Attributes:
        made: where it is.
        choices: the surrogates whose hyperparameters it has, the best first.
        zeroed: the readouts that begin at zero.
    """

    made: Made
    choices: list[Choice]
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


def confirm(source: Source, top: int, wanted: int | None, seeds: int) -> tuple[Made, list[int]] | None:
    """Create the study that trains the best surrogates again; one that was there before gets the trials it lacks.

    All have the same further seeds, so that what a seed does to all alike does not decide between them.

    Args:
        source: of the surrogates.
        top: how many targets are trained.
        wanted: how many surrogates the user wants to be confirmed; see `how_many`.
        seeds: how many further seeds each of them gets.

    Returns:
        The study and the surrogates' numbers, the best first; None if there is nothing to choose from.

    Raises:
        as `Source.best`.
    """
    best = source.best()
    trials = known_study(source.storage, source.name).get_trials(deepcopy=False)
    spent_epochs = sum(map(epochs_of, trials))
    candidates = best[: how_many(len(best), source.study.epochs, spent_epochs, seeds, wanted, top)]
    if not candidates:
        return None
    opened = source.opened("confirm")
    have: dict[str, set[int]] = {source.label(trial): set() for trial in candidates}
    for each in _still_valid(source, opened, CONFIRMS, candidates):
        have[each.user_attrs[CONFIRMS]].add(_seed_of(each))
    for done in range(seeds):  # seed by seed: trials that begin together are of different surrogates
        for trial in candidates:
            own = have[source.label(trial)]
            if len(own) <= done:
                seed = next(each for each in count(FIRST_SEED) if each not in own)
                own.add(seed)
                opened.enqueue_trial(trial.params, user_attrs={CONFIRMS: source.label(trial), SEED: seed})
    about = f"The best surrogates of {source.name}, each with the same {seeds} further seeds."
    given = [_seed_of(each) for each in opened.get_trials(deepcopy=False)]
    return source.write("confirm", opened, Confirmation, about, given), [trial.number for trial in candidates]


def confirmed(source: Source) -> list[Confirmed]:
    """The surrogates that were trained again, in the order of the search.

    Raises:
        as `Source.best`.
    """
    best = source.best()
    opened = source.opened("confirm")
    valid = _still_valid(source, opened, CONFIRMS, best)
    found = []
    for trial in best:
        own = [each for each in valid if each.user_attrs[CONFIRMS] == source.label(trial)]
        scores = [each.values for each in own if each.state is TrialState.COMPLETE]
        failed = sum(1 for each in own if each.state.is_finished()) - len(scores)
        if scores or failed:
            found.append(Confirmed(trial, scores, failed))
    return found


def prepare(source: Source, choices: Sequence[Choice]) -> Prepared:
    """Create the study of the target, with the hyperparameters of these surrogates in its queue.

    A study that was there before keeps the trials that it has; those of the same surrogate are not added again.

    Args:
        source: of the surrogates.
        choices: at least one of them.
    """
    opened = source.opened("target")
    valid = _still_valid(source, opened, SOURCE, [each.trial for each in choices])
    have = {trial.user_attrs[SOURCE] for trial in valid}
    for each in choices:
        label = source.label(each.trial)
        if label not in have:
            opened.enqueue_trial(each.trial.params, user_attrs={SOURCE: label, CHOICE: each.why})
    about = f"The target of {source.name}, with the hyperparameters of its best surrogates."
    made = source.write("target", opened, Target, about, len(opened.get_trials(deepcopy=False)))
    return Prepared(made, list(choices), _zeroed(source.study, choices[0].trial))


def _seed_of(trial: FrozenTrial) -> int:
    """With which seed a trial confirms another. It is not written down where an older version has enqueued it."""
    return int(trial.user_attrs.get(SEED, FIRST_SEED + trial.number))


def _still_valid(
    source: Source, opened: optuna.Study, attribute: str, trials: Sequence[FrozenTrial]
) -> list[FrozenTrial]:
    """Those of `opened` that have one of these trials' label and hyperparameters.

    Others are left of a study of the same name that someone has deleted.
    """
    points = {source.label(trial): trial.params for trial in trials}
    return [
        each
        for each in opened.get_trials(deepcopy=False)
        if each.user_attrs.get(attribute) in points and _point(each) == points[each.user_attrs[attribute]]
    ]


def _point(trial: FrozenTrial) -> dict[str, Any]:
    """The hyperparameters that were enqueued."""
    return dict(trial.system_attrs.get("fixed_params", trial.params))


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
