"""`trials explain study.py`: how each layer of a study's model is computed for all trials at once, and why."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import optuna

from ds_hooks.shared.endings import USER_ERROR_STATUS
from trials.fusion import FuseError
from trials.gate.base import OpenGate
from trials.study import Study, StudyError, load_study
from trials.training.group import TrialGroup
from trials.training.member import build_member, group_key

TRIALS = 2


class _Names(OpenGate):
    """Remembers the units that a group declares."""

    def __init__(self) -> None:
        self.units: list[str] = []

    def use(self, units: Sequence[str], trials: int) -> None:
        """See `Gate`."""
        self.units = list(units)


def explain(study: Study) -> list[str]:
    """What fusing does with the study's model, found by training two trials on one batch, and scoring them.

    Raises:
        FuseError: the model cannot be fused.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    draws = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    first = build_member(study, 0, study.suggest(draws.ask()))
    second = build_member(study, 1, study.suggest(draws.ask()))
    together = group_key(first) == group_key(second)
    gate = _Names()
    group = TrialGroup(study, [first, second] if together else [first], gate)
    batch = next(group.batches(0), None)
    if batch is None:
        raise FuseError("the study gave no batches in epoch 0; allowed: at least one")
    group.train_step(*batch)
    group.evaluate()
    ways = group.ways()
    width = max((len(name) for name, _ in ways), default=0)
    lines = [f"{name:{width}}  {how}" for name, how in ways]
    lines.append(
        "" if together else "\nThese two trials differ in structure, hence are trained in groups of their own."
    )
    return [*lines, "Units, in the order of a training step:", *(f"  {unit}" for unit in gate.units)]


def main() -> int:
    """The command `trials`."""
    parser = argparse.ArgumentParser(prog="trials", description="Fused training of hyperparameter trials.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("explain", help="print, per layer, how trials are computed together, and why")
    command.add_argument("study", type=Path, help="a Python file that defines one study")
    path = parser.parse_args().study
    try:
        study = load_study(path)
    except StudyError as error:
        print(f"trials explain: {error}", file=sys.stderr)
        return USER_ERROR_STATUS
    try:
        lines = explain(study)
    except Exception as error:
        print(f"trials explain: {path}: {type(error).__name__}: {error}", file=sys.stderr)
        return USER_ERROR_STATUS
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
