"""What fusing does with a study's model, and whether the study works at all: `trials explain` and `trials check`."""

import time
from collections import Counter
from collections.abc import Sequence

import optuna

from trials.gate.base import AUDIT_UNITS, OpenGate
from trials.study import Study
from trials.training.audits.audit import Audit
from trials.training.audits.table import audit_lines
from trials.training.group import TrialGroup
from trials.training.inputs.endless import expect_to_be_watched
from trials.training.member import build_member, group_key
from trials.training.scores.objectives import Score


class _Names(OpenGate):
    """Keeps the names of the units that a group declares."""

    def __init__(self) -> None:
        self.units: list[str] = []

    def use(self, units: Sequence[str], trials: int) -> None:
        """See `Gate`."""
        self.units = [name for name in units if not name.startswith(AUDIT_UNITS)]


def explain(study: Study) -> list[str]:
    """How each layer is computed for all trials at once, and why.

    Two trials, drawn at random, are trained on one batch and scored.

    Raises:
        FuseError: the model cannot be fused.
    """
    gate = _Names()
    group = _two_trials(study, gate)
    group.train_step(*next(group.batches(0)))
    group.evaluate()
    ways = group.ways()
    width = max((len(name) for name, _ in ways), default=0)
    lines = [f"{name:{width}}  {how}" for name, how in ways]
    together = "" if group.size == 2 else "\nThe two trials differ in structure: each trains in a group of its own."
    return [*lines, together, "Units, in the order of a training step:", *(f"  {unit}" for unit in gate.units)]


def check(study: Study) -> list[str]:
    """Try the study before a run: a whole epoch of two trials drawn at random, then their scores.

    Raises:
        FuseError: the model cannot be fused, or there is nothing to train on.
    """
    expect_to_be_watched(study)
    audit = Audit(study)
    audit.tables = []
    group = _two_trials(study, OpenGate(), audit)
    begin_s = time.monotonic()
    steps = 0
    for batch in group.batches(0):
        group.train_step(*batch)
        steps += 1
        if steps < AUDITED_STEPS:
            group.unproven.add("training")
    group.end_epoch()
    seconds = time.monotonic() - begin_s
    for _ in range(AUDITED_STEPS - 1 if study.audit else 0):
        group.evaluate()
        group.unproven.add("evaluation")
    scores = ", ".join(map(_shown, group.evaluate()))
    ways = Counter(how.partition(" ")[0].rstrip(":") for _, how in group.ways())
    rungs = f"rungs {', '.join(map(str, study.rungs))}" if study.rungs else "no rungs"
    rungs += f", at which one trial in {study.reduction_factor} is promoted" if study.promotes else ""
    return [
        f"study   {type(study).__name__}: {study.trials} trials of {study.epochs} epochs, up to {study.rows} fused, "
        f"{rungs}; {' and '.join(study.directions or [study.direction])} the score",
        f"layers  {ways['rule']} by rule, {ways['vmap']} by vmap, {ways['loop']} in a loop over the trials",
        f"epoch   {steps} steps of {group.size} trial{'s' * (group.size != 1)} in {seconds:.2f} s; scores {scores}",
        *(audit_lines(audit, group.size) if study.audit else ["audit   none: Study.audit is False"]),
    ]


def _shown(score: Score) -> str:
    return f"({', '.join(map(_shown, score))})" if isinstance(score, list) else f"{score:.4g}"


AUDITED_STEPS = 2


def _two_trials(study: Study, gate: OpenGate, audit: Audit | None = None) -> TrialGroup:
    """Two trials drawn at random as one group; the first alone if they differ in structure."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    draws = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    first = build_member(study, 0, study.suggest(draws.ask()))
    second = build_member(study, 1, study.suggest(draws.ask()))
    together = group_key(first) == group_key(second)
    return TrialGroup(study, [first, second] if together else [first], gate, audit)
