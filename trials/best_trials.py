"""Shows the best trials of a study: their hyperparameters, their weights, and how to load them."""

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from optuna.trial import FrozenTrial

from ds_hooks.shared.private_file import make_dir, open_private
from ds_hooks.shared.trial_attributes import HISTORY, SOURCE
from trials.search.choice.constraints import breaks
from trials.search.files.best_weights import describe_score, params_of, ranked, score_of, why_none
from trials.search.files.checkpoint_files import weights_name, weights_path
from trials.search.optuna_study import known_study
from trials.shrinking.settings import as_shrink
from trials.study import Study
from trials.training.shrunk import takes_shrink

MOST_LOOKS = 10
"""How often the best trials are looked up again while workers displace them."""


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
        breaks_constraint: whether it breaks one. The first one does only if all do.
    """

    number: int
    score: float | list[float]
    params: dict[str, Any]
    epochs: int
    history: dict[str, Any]
    weights: Path | None
    is_target: bool
    breaks_constraint: bool


def best_trials(storage: str, name: str, directory: Path) -> list[Shown]:
    """The best trial, and after it those others whose weights are kept; or the front of several objectives.

    The best one's weights may be missing: there was no room, or they are where another worker has its files.

    Args:
        storage: see `open_storage`.
        name: Optuna's name of the study.
        directory: the study's.

    Raises:
        NoStudyError: there is no such study.
        NoTrialError: none of its trials has completed; or, with several objectives, none keeps the constraints.
    """
    study = known_study(storage, name)
    completed = ranked(study)
    if not completed:
        raise NoTrialError(why_none(study))
    if len(study.directions) == 1:
        completed = completed[:1] + [t for t in completed[1:] if weights_path(directory, t.number).exists()]
    return [_shown(trial, directory) for trial in completed]


def describe(shown: Shown) -> list[str]:
    """A trial in lines for the terminal."""
    wide = max((len(name) for name in shown.params), default=0)
    params = [f"    {name:<{wide}}  {value}" for name, value in shown.params.items()]
    weights = "its weights were not kept" if shown.weights is None else f"weights: {shown.weights}"
    score = f"{describe_score(shown.score)}{', but it breaks a constraint,' if shown.breaks_constraint else ''}"
    return [f"trial {shown.number}: {score} after {shown.epochs} epochs; {weights}", *params]


def save(find: Callable[[], list[Shown]], study: Study | None, file: Path, into: Path) -> list[Shown]:
    """Write trials to `trial-N.json`, and their weights beside them to `trial-N.pt`, each file whole or not at all.

    Args:
        find: returns the trials, as `best_trials` does.
        study: the user's; None: its file cannot be loaded.
        file: its file.
        into: a directory, which is made.

    Returns:
        The trials with their weights there.

    Raises:
        OSError: something cannot be read or written.
        Exception: what `find` raises.
    """
    make_dir(into)
    with ExitStack() as opened:
        found = _opened(find, opened)
        return [_saved(shown, weights, study, file, into) for shown, weights in found]


def _opened(find: Callable[[], list[Shown]], stack: ExitStack) -> list[tuple[Shown, BinaryIO | None]]:
    """Return trials with the files of their weights: workers remove the names of those that others displace."""
    looks = 0
    while True:
        looks += 1
        try:
            return [(each, stack.enter_context(each.weights.open("rb")) if each.weights else None) for each in find()]
        except FileNotFoundError:
            if looks == MOST_LOOKS:
                raise


def _saved(shown: Shown, weights: BinaryIO | None, study: Study | None, file: Path, into: Path) -> Shown:
    if weights is not None:
        copy = into / weights_name(shown.number)
        if not (copy.exists() and os.path.samestat(copy.stat(), os.fstat(weights.fileno()))):  # it is there already
            _write(copy, partial(shutil.copyfileobj, weights))
        shown = replace(shown, weights=copy)
    described = asdict(shown) | {
        "weights": shown.weights and str(shown.weights),
        "is_surrogate": is_surrogate(study, shown),
        "load": loading(study, file, shown).splitlines(),
    }
    text = json.dumps(described, indent=2) + "\n"
    _write(into / f"trial-{shown.number}.json", lambda file: file.write(text.encode()))
    return shown


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file in one step: half of it may be taken for all of it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb", opener=open_private) as file:
            write(file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def is_surrogate(study: Study | None, shown: Shown) -> bool:
    """Whether a trial's weights are a surrogate's."""
    settings = None if study is None else as_shrink(study.shrink)
    return settings is not None and not settings.is_target and not shown.is_target


def loading(study: Study | None, file: Path, shown: Shown) -> str:
    """Python that makes a trial's model, with its weights if they were kept."""
    name, loaded, params = "load_study", f"load_study({str(file)!r})", _as_code(shown.params)
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


def _as_code(value: Any) -> str:
    """Python for what JSON has held. That of an infinite number alone would be a name."""
    match value:
        case float() if not math.isfinite(value):
            return f"float('{value}')"
        case dict():
            return f"{{{', '.join(f'{name!r}: {_as_code(each)}' for name, each in value.items())}}}"
        case list():
            return f"[{', '.join(map(_as_code, value))}]"
    return repr(value)


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
        breaks_constraint=breaks(trial),
    )
