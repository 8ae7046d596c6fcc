"""Shows the best trials of a study: their hyperparameters, their weights, and how to load them."""

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from ds_hooks.shared.private_file import make_dir, write_text
from ds_hooks.shared.trial_attributes import HISTORY, SOURCE
from trials.search.files.best_weights import describe_score, params_of, ranked, score_of
from trials.search.files.checkpoint_files import weights_path
from trials.search.optuna_study import known_study
from trials.shrinking.settings import as_shrink
from trials.study import Study
from trials.training.shrunk import takes_shrink


class NoTrialError(Exception):
    """There is no trial to show. The message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """One of the best trials.

    Attributes:
        number: its number in the study.
        score: its score, or one for each objective.
        params: what the study's `suggest` returned for it.
        epochs: how many it was trained.
        history: its losses, scores and metrics by epoch.
        weights: the file of its weights; None: it was not kept.
        is_target: whether `trials transfer` trained it, with the hyperparameters of a surrogate.
    """

    number: int
    score: float | list[float]
    params: dict[str, Any]
    epochs: int
    history: dict[str, Any]
    weights: Path | None
    is_target: bool


def best_trials(storage: str, name: str, directory: Path) -> list[Shown]:
    """The best trial, and after it those others whose weights are kept; or the front of several objectives.

    The best one's weights may be missing: there was no room, or they are where another worker has its files.

    Args:
        storage: see `open_storage`.
        name: Optuna's name of the study.
        directory: the study's.

    Raises:
        NoStudyError: there is no such study.
        NoTrialError: none of its trials has completed.
    """
    study = known_study(storage, name)
    completed = ranked(study)
    if not completed:
        raise NoTrialError(f"no trial of study {name} has completed yet")
    if len(study.directions) == 1:
        completed = completed[:1] + [t for t in completed[1:] if weights_path(directory, t.number).exists()]
    return [_shown(trial, directory) for trial in completed]


def describe(shown: Shown) -> list[str]:
    """A trial in lines for the terminal."""
    wide = max((len(name) for name in shown.params), default=0)
    params = [f"    {name:<{wide}}  {value}" for name, value in shown.params.items()]
    weights = "its weights were not kept" if shown.weights is None else f"weights: {shown.weights}"
    return [f"trial {shown.number}: {describe_score(shown.score)} after {shown.epochs} epochs; {weights}", *params]


def save(shown: Shown, study: Study | None, file: Path, into: Path) -> Shown:
    """Write a trial to `trial-N.json`, and its weights beside it to `trial-N.pt`.

    Args:
        shown: the trial.
        study: the user's; None: its file cannot be loaded.
        file: its file.
        into: a directory, which is made.

    Returns:
        The trial with its weights there.
    """
    make_dir(into)
    if shown.weights is not None:
        copy = into / shown.weights.name
        with suppress(shutil.SameFileError):  # they are there already
            shutil.copyfile(shown.weights, copy)
        shown = replace(shown, weights=copy)
    described = asdict(shown) | {
        "weights": shown.weights and str(shown.weights),
        "is_surrogate": is_surrogate(study, shown),
        "load": loading(study, file, shown).splitlines(),
    }
    write_text(into / f"trial-{shown.number}.json", json.dumps(described, indent=2) + "\n")
    return shown


def is_surrogate(study: Study | None, shown: Shown) -> bool:
    """Whether a trial's weights are a surrogate's."""
    settings = None if study is None else as_shrink(study.shrink)
    return settings is not None and not settings.is_target and not shown.is_target


def loading(study: Study | None, file: Path, shown: Shown) -> str:
    """Python that makes a trial's model, with its weights if they were kept."""
    name, loaded, params = "load_study", f"load_study({str(file)!r})", repr(shown.params)
    if is_surrogate(study, shown):
        name, made = "build_member, load_study", f"build_member({loaded}, {shown.number}, {params}).model"
    elif study is not None and takes_shrink(study):
        made = f"{loaded}.model({params}, 1)"
    else:
        made = f"{loaded}.model({params})"
    lines = [f"from trials import {name}", f"model = {made}"]
    if shown.weights is not None:
        weights = f"torch.load({str(shown.weights)!r}, weights_only=True)"
        lines = ["import torch", *lines, f"model.load_state_dict({weights})"]
    return "\n".join(lines)


def about_surrogates(study: Study | None, shown: Shown) -> list[str]:
    """What a surrogate is good for; nothing for other trials."""
    settings = None if study is None else as_shrink(study.shrink)
    if settings is None or not is_surrogate(study, shown):
        return []
    shallower = f" and {settings.depth} times shallower" if settings.depth > 1 else ""
    return [
        f"These weights are a surrogate's, {settings.by} times narrower{shallower} than the model itself, for which "
        "its hyperparameters are meant:",
        json.dumps(shown.params),
    ]


def _shown(trial: FrozenTrial, directory: Path) -> Shown:
    weights = weights_path(directory, trial.number)
    score, history = score_of(trial), trial.user_attrs.get(HISTORY, {})
    assert score is not None
    return Shown(
        number=trial.number,
        score=score,
        params=params_of(trial),
        epochs=trial.last_step or len(history.get("loss", [])),  # Optuna keeps no steps of several objectives
        history=history,
        weights=weights if weights.exists() else None,
        is_target=SOURCE in trial.user_attrs,
    )
