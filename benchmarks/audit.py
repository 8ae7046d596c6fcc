"""What audits cost a study: epochs that are audited against epochs of the same trials that are not.

    python -m benchmarks.audit [--quick] [--json FILE]

A group of each model trains in one process with one thread, in pairs of epochs: one is audited as in a run, the other
is not, in random order. The figure is the CPU time of all audited epochs ÷ that of the others, less 1, with a 95%
interval. Audits of first batches come before. Beside it stand the direct cost, which is the CPU time that the audits of
these epochs and the asking for them have counted themselves ÷ the rest of theirs, and what one audit costs, in steps of
the group. The direct cost has next to no noise, but leaves out what an audit does to the steps after it.
"""

import math
import random
import sys
from collections.abc import Sequence
from statistics import fmean, variance
from time import monotonic, process_time_ns
from typing import Any

import torch

from benchmarks.shared.fused_models import MODELS, QUICK_MODELS, Classes
from benchmarks.shared.intervals import Pairs
from benchmarks.shared.results import finish, kept_runs, parse
from squeezer.reports.student_t import t_quantile_975
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit
from trials.training.audits.budget import Budget
from trials.training.group import TrialGroup
from trials.training.member import build_member

NAME = "audit"
ROWS, STEPS, LEAST_PAIRS = 16, 10, 24
MODEL_S, QUICK_MODEL_S = 150, 15
"""How long each model is measured: a cheap one is audited as seldom, so it takes more epochs."""


class Trained:
    """A group of trials that trains in epochs, some of them audited, and the CPU time that those took."""

    def __init__(self, name: str) -> None:
        self.study = Classes(name)
        self._batch = self.study.batch
        self._audited_ns = 0
        self._began_ns: int | None = None
        self.audit = Audit(self.study, Budget(self._now_ns))
        members = [build_member(self.study, row, {"lr": 1e-3 / (1 + row)}) for row in range(ROWS)]
        self._group = TrialGroup(self.study, members, OpenGate(), self.audit)

    def epoch(self, *, audited: bool) -> float:
        """Train an epoch. Returns its CPU time in ms."""
        self.study.audit = "epoch" if audited else False
        began_ns = process_time_ns()
        self._began_ns = began_ns if audited else None
        for _ in range(STEPS):
            self._group.train_step(*self._batch)
        self._group.end_epoch()
        took_ns, self._began_ns = process_time_ns() - began_ns, None
        if audited:
            self._audited_ns += took_ns
        return round(took_ns / 1e6, 3)

    def _now_ns(self) -> int:
        """The CPU time of audited epochs alone: the budget is a share of it."""
        return self._audited_ns + (0 if self._began_ns is None else process_time_ns() - self._began_ns)


def main() -> int:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    torch.set_num_threads(1)
    runs = kept_runs(options)
    for name in QUICK_MODELS if options.quick else MODELS:
        if options.only in (None, name):
            runs.append(_measure(name, LEAST_PAIRS, QUICK_MODEL_S if options.quick else MODEL_S))
            print(name, runs[-1]["audits"], runs[-1]["steps_per_audit"], file=sys.stderr, flush=True)
    finish(NAME, options, runs, _summary(runs))
    return 0


def _measure(name: str, least_pairs: int, model_s: float) -> dict[str, Any]:
    trained, order = Trained(name), random.Random(0)
    audit = trained.audit
    trained.epoch(audited=True)  # the first audits, and what is measured once
    trained.epoch(audited=False)
    first, spent_ns, end_s = audit.done, audit.budget.spent_ns, monotonic() + model_s
    pairs: list[tuple[float, float]] = []
    while len(pairs) < least_pairs or monotonic() < end_s:
        took_ms = {audited: trained.epoch(audited=audited) for audited in order.sample((True, False), 2)}
        pairs.append((took_ms[True], took_ms[False]))
    audit_ms = round((audit.budget.spent_ns - spent_ns) / 1e6, 3)
    step_ns = 1e6 * sum(plain_ms for _, plain_ms in pairs) / (STEPS * len(pairs))
    return {
        "scenario": name,
        "audits": audit.done - first,
        "mismatches": audit.mismatches,
        "steps_per_audit": round(audit.budget.spent_ns / audit.done / step_ns, 2),
        "audit_ms": audit_ms,
        "pairs_ms": pairs,
    }


def _cost(pairs: Pairs) -> tuple[float, float]:
    """(all of a ÷ all of b, less 1, and its standard error): audits are rare and dear, so a mean of logarithms errs."""
    ratio = sum(a for a, _ in pairs) / sum(b for _, b in pairs)
    errors = [a - ratio * b for a, b in pairs]
    return ratio - 1, math.sqrt(variance(errors) / len(pairs)) / fmean(b for _, b in pairs)


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The cost of each model, and their mean."""
    summary: dict[str, Any] = {}
    costs: list[tuple[float, float]] = []
    direct: list[float] = []
    for run in runs:
        costs.append(_cost(run["pairs_ms"]))
        summary |= _with_ci95(f"{run['scenario']}_cost", *costs[-1], len(run["pairs_ms"]))
        summary[f"{run['scenario']}_steps_per_audit"] = run["steps_per_audit"]
        if "audit_ms" in run:
            direct.append(run["audit_ms"] / (sum(audited_ms for audited_ms, _ in run["pairs_ms"]) - run["audit_ms"]))
            summary[f"{run['scenario']}_direct_cost"] = round(direct[-1], 5)
        summary[f"{run['scenario']}_pairs"] = len(run["pairs_ms"])
    if costs:
        error = math.sqrt(sum(error**2 for _, error in costs)) / len(costs)
        summary |= _with_ci95(
            "cost", fmean(cost for cost, _ in costs), error, sum(len(run["pairs_ms"]) for run in runs)
        )
        summary |= {"direct_cost": round(fmean(direct), 5)} if direct else {}
        summary["pairs"] = sum(len(run["pairs_ms"]) for run in runs)
    return summary


def _with_ci95(key: str, cost: float, error: float, pairs: int) -> dict[str, Any]:
    half = t_quantile_975(pairs - 1) * error
    return {key: round(cost, 4), f"{key}_ci95": [round(cost - half, 4), round(cost + half, 4)]}


if __name__ == "__main__":
    sys.exit(main())
