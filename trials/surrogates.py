"""What shrinking does to a study's model, and how its surrogates rank trials: `trials shrink` and `trials rank`."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import optuna
from scipy.stats import spearmanr

from trials.fusion.own_code.streams import seed_all, undisturbed
from trials.gate.base import OpenGate
from trials.optim.several import by_phase
from trials.shrinking.errors import ShrinkError, ShrinkWarning
from trials.shrinking.plan import Left, plan_of, work_of
from trials.shrinking.rules import multipliers
from trials.shrinking.settings import Shrink, as_shrink
from trials.shrinking.slicing import warnings_about
from trials.study import Study
from trials.training.group import TrialGroup
from trials.training.member import Member, build, build_member, group_key
from trials.training.scores.objectives import first_of
from trials.training.shrunk import for_target, inputs_of, takes_shrink
from trials.training.transferable import what_transfers


def described(study: Study, scale: int | None) -> dict[str, Any]:
    """What shrinking by `scale` does to the study's model, with hyperparameters drawn at random.

    Args:
        study: the user's.
        scale: how many times narrower; None: as the study says.

    Raises:
        ShrinkError: it cannot be shrunk, or no scale is given.
    """
    settings = settings_of(study, scale)
    params = study.suggest(_draws().ask())
    with shrinking(study, replace(settings, is_target=True)):
        target = build(study, 0, params)
    with shrinking(study, replace(settings, regularizers=True)):
        surrogate = build(study, 0, params)
        found = surrogate.roles
        assert found is not None  # it is a surrogate
        transfers = what_transfers(study)
    scales = {}
    for optimizer in by_phase(surrogate.optimizer).values():
        scales.update(multipliers(found, optimizer))
    with undisturbed():
        batch = inputs_of(study, params)
        before, after = work_of(target.model, batch), work_of(surrogate.model, batch)
        left = [] if takes_shrink(study) else _left(study, settings, params, batch)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (target.model, surrogate.model)]
    return {
        "scale": settings.by,
        "depth": settings.depth,
        "parameters": [
            {
                "name": name,
                "target": list(role.target_shape),
                "surrogate": list(role.shape),
                "role": role.kind,
                "branch": role.branch,
                **({} if name not in scales else asdict(scales[name])),
            }
            for name, role in found.items()
        ],
        "left": [str(each) for each in left],
        "transfers": [str(each) for each in transfers],
        "warnings": list(warnings_about(found, left, (before, after))),
        "target_parameters": sizes[0],
        "surrogate_parameters": sizes[1],
        "target_multiplications": before,
        "surrogate_multiplications": after,
        "surrogates_in_memory_of_one_target": sizes[0] // max(sizes[1], 1),
    }


def lines_of(found: dict[str, Any]) -> list[str]:
    """What `described` found, for a terminal."""
    columns = ("name", "target", "surrogate", "role", "rate", "decay", "eps")
    rows = [columns, *([_cell(each.get(column, "–")) for column in columns] for each in found["parameters"])]
    wide = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip() for row in rows]
    shown = [each for each in found["left"] if "an axis of the" not in each and "rows of an embedding" not in each]
    ratio = found["target_multiplications"] / max(found["surrogate_multiplications"], 1)
    return [
        *table,
        "",
        *(["What does not shrink, beside inputs and outputs:", *(f"  {each}" for each in shown), ""] if shown else []),
        "Hyperparameters:",
        *(f"  {each}" for each in found["transfers"]),
        "",
        *(f"warning: {each}" for each in found["warnings"]),
        f"parameters {found['target_parameters']} → {found['surrogate_parameters']}; multiplications of a forward "
        f"÷ {ratio:.1f}; {found['surrogates_in_memory_of_one_target']} surrogates have a target's parameters",
    ]


Tell = Callable[[float, str], None]
"""Is told after each training step how many trials have trained so far, parts of them included, and what trains now."""


def ranking(
    study: Study, scales: Sequence[int], configurations: int, tell: Tell = lambda done, what: None
) -> dict[str, Any]:
    """Train the same random configurations at full size and at each scale, and compare their ranks.

    Args:
        study: the user's.
        scales: factors of the width.
        configurations: how many.
        tell: see `Tell`.

    Raises:
        ShrinkError: see `described`.
    """
    draws = _draws()
    chosen = [study.suggest(draws.ask()) for _ in range(configurations)]
    settings = settings_of(study, scales[0])
    with shrinking(study, for_target(settings)):
        wanted = trained_scores(study, chosen, lambda done, what: tell(done, f"full size, {what}"))
    found: dict[str, Any] = {"configurations": chosen, "target": wanted, "scales": {}}
    sign = 1 if (study.directions or (study.direction,))[0] == "maximize" else -1
    best = max(range(len(chosen)), key=lambda i: sign * _worst_if_nan(wanted[i], sign))
    for i, scale in enumerate(scales, 1):
        with shrinking(study, replace(settings, by=scale, regularizers=True)):
            scores = trained_scores(study, chosen, partial(_tell_more, tell, i * configurations, scale))
        top = max(range(len(chosen)), key=lambda i: sign * _worst_if_nan(scores[i], sign))
        ranks = [[_worst_if_nan(each, sign) for each in column] for column in (wanted, scores)]
        found["scales"][scale] = {
            "scores": scores,
            "spearman": float(spearmanr(*ranks).statistic),
            "regret": sign * (wanted[best] - wanted[top]),
        }
    return found


def _tell_more(tell: Tell, before: int, scale: int, done: float, what: str) -> None:
    tell(before + done, f"÷ {scale}, {what}")


def trained_scores(study: Study, chosen: Sequence[dict[str, Any]], tell: Tell) -> list[float]:
    """Train trials with these hyperparameters to the end, fused where they can be, and return their scores."""
    members = [build_member(study, number, params) for number, params in enumerate(chosen)]
    scores: dict[int, float] = {}
    done = 0.0
    for alike in that_fuse(members):
        for begin in range(0, len(alike), study.rows):
            group = TrialGroup(study, alike[begin : begin + study.rows], OpenGate())
            for epoch in range(study.epochs):
                for step, batch in enumerate(group.batches(epoch), 1):
                    group.train_step(*batch)
                    tell(done, f"epoch {epoch + 1} of {study.epochs}, batch {step}")
                group.end_epoch()
                done += len(group.numbers) / study.epochs
            for number, score in zip(group.numbers, group.evaluate(), strict=True):
                scores[number] = first_of(score)
    return [scores[number] for number in range(len(chosen))]


def that_fuse(members: Iterable[Member]) -> list[list[Member]]:
    """The trials in groups of those that can be fused."""
    groups: dict[Hashable, list[Member]] = {}
    for member in members:
        groups.setdefault(group_key(member), []).append(member)
    return list(groups.values())


@contextmanager
def shrinking(study: Study, settings: Shrink) -> Iterator[None]:
    """While entered, the study shrinks by `settings`, and says no warning."""
    own = study.shrink
    study.shrink = settings
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShrinkWarning)
            yield
    finally:
        study.shrink = own


def settings_of(study: Study, scale: int | None) -> Shrink:
    """What the study says of its surrogates, at `scale` if one is given.

    Raises:
        ShrinkError: neither is.
    """
    own = as_shrink(study.shrink)
    if own is None and scale is None:
        raise ShrinkError("the study has no attribute shrink; allowed: shrink = 8 there, or --scale 8")
    if own is None:
        assert scale is not None  # seen above
        return Shrink(scale)
    return own if scale is None else replace(own, by=scale)


def _left(study: Study, settings: Shrink, params: dict[str, Any], batch: Any) -> list[Left]:
    seed_all(study.seed(params, 0))
    return list(plan_of(study.model(params), settings.by, batch, settings.divide, settings.keep, settings.depth).left)


def _draws() -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))


def _worst_if_nan(score: float, sign: int) -> float:
    return score if score == score else -sign * float("inf")


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " × ".join(map(str, value)) or "1"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
