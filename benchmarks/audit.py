"""What audits cost a study: trials that are audited against the same trials that are not.

    python -m benchmarks.audit [--quick] [--json FILE]

Two groups of a model train in turns in one process with one thread, an epoch each, in random order; one is audited as
in a run. The figure is the CPU time of an audited epoch ÷ that of the other, with a 95% interval. Audits of first
batches come before. Beside it stands what one audit costs, in steps of the group.
"""

import random
import sys
from collections.abc import Callable, Sequence
from time import process_time_ns
from typing import Any

import torch

from benchmarks.common import finish, kept_runs, parse, ratio_with_ci95
from benchmarks.fusion import MODELS, QUICK_MODELS, Classes
from trials.gate.base import OpenGate
from trials.study import Study
from trials.training.audits.audit import Audit
from trials.training.audits.budget import Budget
from trials.training.group import TrialGroup
from trials.training.member import build_member

NAME = "audit"
ROWS, STEPS, EPOCHS, QUICK_EPOCHS = 16, 50, 24, 6


class Twin:
    """A group of trials that trains in epochs, and the CPU time that it took."""

    def __init__(self, study: Study, batch: tuple[torch.Tensor, torch.Tensor], *, audited: bool) -> None:
        self.spent_ns = 0
        self._batch = batch
        self._began_ns: int | None = None
        self.audit = Audit(study, Budget(self._now_ns)) if audited else None
        members = [build_member(study, row, {"lr": 1e-3 / (1 + row)}) for row in range(ROWS)]
        self._group = TrialGroup(study, members, OpenGate(), self.audit)

    def epoch(self) -> float:
        """Train an epoch. Returns its CPU time in ms."""
        self._began_ns = process_time_ns()
        for _ in range(STEPS):
            self._group.train_step(*self._batch)
        self._group.end_epoch()
        took_ns, self._began_ns = process_time_ns() - self._began_ns, None
        self.spent_ns += took_ns
        return round(took_ns / 1e6, 3)

    def _now_ns(self) -> int:
        """The CPU time of this group alone."""
        return self.spent_ns + (0 if self._began_ns is None else process_time_ns() - self._began_ns)


def main() -> int:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    torch.set_num_threads(1)
    runs = kept_runs(options)
    for name in QUICK_MODELS if options.quick else MODELS:
        if options.only in (None, name):
            runs.append(_measure(name, QUICK_EPOCHS if options.quick else EPOCHS))
            print(name, runs[-1]["audits"], runs[-1]["steps_per_audit"], file=sys.stderr, flush=True)
    finish(NAME, options, runs, _summary(runs))
    return 0


def _measure(name: str, epochs: int) -> dict[str, Any]:
    study = Classes(name)
    audited, plain = Twin(study, study.batch, audited=True), Twin(study, study.batch, audited=False)
    assert audited.audit is not None
    order = random.Random(0)
    for twin in (audited, plain):
        twin.epoch()  # the first audits, and what is measured once
    first, pairs = audited.audit.done, []
    for _ in range(epochs):
        took_ms: dict[bool, float] = {}
        turns: list[tuple[bool, Callable[[], float]]] = [(True, audited.epoch), (False, plain.epoch)]
        for is_audited, epoch in order.sample(turns, 2):
            took_ms[is_audited] = epoch()
        pairs.append((took_ms[True], took_ms[False]))
    budget, step_ns = audited.audit.budget, plain.spent_ns / (STEPS * (1 + epochs))
    return {
        "scenario": name,
        "audits": audited.audit.done - first,
        "mismatches": audited.audit.mismatches,
        "steps_per_audit": round(budget.spent_ns / audited.audit.done / step_ns, 2),
        "pairs_ms": pairs,
    }


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The cost of each model, and of all together."""
    summary: dict[str, Any] = {}
    every: list[tuple[float, float]] = []
    for run in runs:
        every += run["pairs_ms"]
        cost, ci95 = ratio_with_ci95(run["pairs_ms"])
        summary[f"{run['scenario']}_cost"] = round(cost, 4)
        summary[f"{run['scenario']}_cost_ci95"] = [round(bound, 4) for bound in ci95]
        summary[f"{run['scenario']}_steps_per_audit"] = run["steps_per_audit"]
    if every:
        cost, ci95 = ratio_with_ci95(every)
        summary |= {"cost": round(cost, 4), "cost_ci95": [round(bound, 4) for bound in ci95]}
    return summary


if __name__ == "__main__":
    sys.exit(main())
