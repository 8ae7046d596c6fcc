"""What is wrong with the settings of a study."""

import importlib.util
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from trials.shrinking.settings import problems_of

WORDS = "'maximize' or 'minimize'"

TIMES = "a date and a time, such as '2099-12-31 08:00', which is local, or with a zone: '2099-12-31 08:00+01:00'"

_NAMES = {
    "shared": "patterns of names, such as ('base.*',)",
    "batch_params": "names of hyperparameters, such as ('batch_size',)",
}


def read_time(text: str) -> datetime:
    """Return the time that `TIMES` describes; without a zone, it is local.

    Raises:
        ValueError: it is none.
    """
    if ":" not in text:
        raise ValueError("not a time")
    read = datetime.fromisoformat(text)
    try:
        read.astimezone()
    except OverflowError as error:
        raise ValueError(f"not a local time: {error}") from None
    return read


def problems(study: Any) -> Iterator[str]:
    """Yield what is wrong, each to follow the name of the study's class.

    Args:
        study: a `Study`, whose attributes may be anything.
    """
    yield from _numbers(study)
    yield from _choices(study)
    yield from _extras(study)
    yield from _search(study)
    yield from problems_of(study.shrink)
    yield from _of_optuna(study)


def _numbers(study: Any) -> Iterator[str]:
    for name in ("trials", "epochs", "accumulate"):
        value = getattr(study, name, None)
        if value is None:
            yield f" lacks the attribute '{name}', a positive whole number"
        elif not _is_whole(value) or value < 1:
            yield f": {name} = {value!r}; allowed: a positive whole number"
    if study.fused != "auto" and (not _is_whole(study.fused) or study.fused < 1):
        yield f": fused = {study.fused!r}; allowed: a positive whole number, or 'auto'"
    rungs = study.rungs
    whole = isinstance(rungs, (tuple, list)) and all(map(_is_whole, rungs))
    if not whole or list(rungs) != sorted(set(rungs)) or any(not 1 <= rung <= study.epochs for rung in rungs):
        yield f": rungs = {rungs!r}; allowed: increasing epochs from 1 to epochs = {study.epochs}"


def _choices(study: Any) -> Iterator[str]:
    if study.direction not in ("maximize", "minimize"):
        yield f": direction = {study.direction!r}; allowed: {WORDS}"
    if study.scheduler_every not in ("epoch", "step"):
        yield f": scheduler_every = {study.scheduler_every!r}; allowed: 'epoch' or 'step'"
    if not isinstance(study.mix_epochs, bool):
        yield f": mix_epochs = {study.mix_epochs!r}; allowed: True or False"
    if study.audit is not False and study.audit not in ("epoch", "start"):
        yield f": audit = {study.audit!r}; allowed: 'epoch', 'start' or False"
    if study.search not in (None, "asha"):
        yield f": search = {study.search!r}; allowed: None or 'asha'"


def _extras(study: Any) -> Iterator[str]:
    if not _is_whole(study.keep_best) or study.keep_best < 0:
        yield f": keep_best = {study.keep_best!r}; allowed: a whole number, 0 or more"
    if study.metric is not None and not (_is_metric(study) and study.has_metrics):
        several = f"; with directions, {len(study.directions)} of them" if study.directions else ""
        yield (
            f": metric = {study.metric!r}; allowed: None, or the name of a number that its method 'metrics' "
            f"returns{several}"
        )
    for name, example in _NAMES.items():
        given = getattr(study, name)
        if not isinstance(given, (tuple, list)) or not all(isinstance(each, str) and each for each in given):
            yield f": {name} = {given!r}; allowed: {example}"


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(read_time(value))
    except ValueError:
        return False


def _search(study: Any) -> Iterator[str]:
    if study.deadline is not None and not _is_time(study.deadline):
        yield f": deadline = {study.deadline!r}; allowed: None, or {TIMES}"
    several = study.directions
    if (
        not isinstance(several, (tuple, list))
        or len(several) == 1
        or any(each not in ("maximize", "minimize") for each in several)
    ):
        yield f": directions = {several!r}; allowed: none, or two or more of {WORDS}"
    if several and study.search is not None:
        yield f": search = {study.search!r} with several directions; allowed: a single direction"
    if several and study.rungs:
        yield f": rungs = {study.rungs!r} with several directions; allowed: none, as Optuna prunes no such trial"
    factor = study.reduction_factor
    if not _is_whole(factor) or factor < 2:
        yield f": reduction_factor = {factor!r}; allowed: a whole number, 2 or more"
    if study.search is not None and not any(rung < study.epochs for rung in study.rungs):
        yield f": search = {study.search!r} with rungs = {study.rungs!r}; allowed: with a rung before the last epoch"


def _of_optuna(study: Any) -> Iterator[str]:
    """Yield what is wrong with the sampler, the pruner and the enqueued points."""
    import optuna  # takes a second, and who only imports `trials` does not need it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the search worker makes them again, and gives the warnings then
        try:
            sampler, pruner, points = study.sampler(), study.pruner(), study.enqueue()
        except Exception as error:
            install = f"; install it: pip install {error.name}" if isinstance(error, ImportError) and error.name else ""
            yield f": its sampler, pruner or enqueue failed: {type(error).__name__}: {error}{install}"
            return
    if sampler is not None and not isinstance(sampler, optuna.samplers.BaseSampler):
        yield f": sampler() returned {sampler!r}; allowed: a sampler of Optuna's, or None"
    if pruner is not None and not isinstance(pruner, optuna.pruners.BasePruner):
        yield f": pruner() returned {pruner!r}; allowed: a pruner of Optuna's, or None"
    if pruner is not None and study.search is not None:
        yield f": pruner() returned {pruner!r} with search = {study.search!r}; allowed: one of the two"
    if pruner is not None and study.directions:
        yield f": pruner() returned {pruner!r} with several directions; allowed: None, as Optuna prunes no such trial"
    if isinstance(sampler, optuna.samplers.CmaEsSampler) and study.directions:
        yield ": CmaEsSampler with several directions; allowed: others, such as NSGAIISampler"
    if isinstance(sampler, optuna.samplers.CmaEsSampler) and importlib.util.find_spec("cmaes") is None:
        yield ": CmaEsSampler needs the package cmaes; install it: pip install cmaes"
    if not isinstance(points, (tuple, list)) or not all(isinstance(point, Mapping) for point in points):
        yield f": enqueue() returned {points!r}; allowed: a list of dicts, parameters by name"
    else:
        yield from _of_points(points)


def _of_points(points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for point in points:
        try:
            json.dumps(dict(point))
        except (TypeError, ValueError) as error:
            yield f": enqueue() has {point!r}: {error}; allowed: values that JSON can hold"


def _is_metric(study: Any) -> bool:
    if not study.directions:
        return isinstance(study.metric, str)
    several = study.metric
    return (
        isinstance(several, (tuple, list))
        and all(isinstance(each, str) for each in several)
        and len(several) == len(study.directions)
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
