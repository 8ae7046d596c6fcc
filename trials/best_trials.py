"""Shows the best trials of a study: their hyperparameters, their weights, and how to load them."""

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from ds_hooks.shared.private_file import make_dir, write_text
from trials.search.attributes import HISTORY
from trials.search.best_weights import describe_score, params_of, ranked, score_of
from trials.search.checkpoint_files import weights_path
from trials.search.optuna_study import known_study


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
    """

    number: int
    score: float | list[float]
    params: dict[str, Any]
    epochs: int
    history: dict[str, Any]
    weights: Path | None


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


def save(shown: Shown, study: Path, into: Path) -> Shown:
    """Write a trial to `trial-N.json`, and its weights beside it to `trial-N.pt`.

    Args:
        shown: the trial.
        study: the user's file.
        into: a directory, which is made.

    Returns:
        The trial with its weights there.
    """
    make_dir(into)
    if shown.weights is not None:
        copy = into / shown.weights.name
        shutil.copyfile(shown.weights, copy)
        shown = replace(shown, weights=copy)
    described = asdict(shown) | {
        "weights": shown.weights and str(shown.weights),
        "load": loading(study, shown).splitlines(),
    }
    write_text(into / f"trial-{shown.number}.json", json.dumps(described, indent=2) + "\n")
    return shown


def loading(study: Path, shown: Shown) -> str:
    """Python that makes a trial's model, with its weights if they were kept."""
    lines = ["from trials import load_study", f"model = load_study({str(study)!r}).model({shown.params!r})"]
    if shown.weights is not None:
        weights = f"torch.load({str(shown.weights)!r}, weights_only=True)"
        lines = ["import torch", *lines, f"model.load_state_dict({weights})"]
    return "\n".join(lines)


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
    )
