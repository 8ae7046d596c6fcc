"""The audits of all structures of a study, and what the daemon hears of them."""

from collections.abc import Callable
from functools import partial

from ds_hooks.shared.statuses import Audited, Mismatched, Status
from trials.study import Study
from trials.training.audits.audit import Audit, Mismatch
from trials.training.audits.budget import Budget


class Audits:
    """Those of one side task, which share what they may cost."""

    def __init__(self, study: Study, report: Callable[[Status], None]) -> None:
        """`report` sends a status to the daemon."""
        self._study, self._report = study, report
        self._budget = Budget()
        self._all: list[Audit] = []
        self._reported = Audited(0, 0, 0.0, 0.0, 0.0)

    def new(self) -> Audit:
        """Return that of a further structure."""
        self._all.append(Audit(self._study, self._budget, partial(_report_mismatch, self._report)))
        return self._all[-1]

    @property
    def spent_ns(self) -> int:
        """What they have cost so far, in CPU time."""
        return self._budget.spent_ns

    def report(self) -> None:
        """Report what is new."""
        if not self._study.audit:
            return
        last, budget = self._reported, self._budget
        now = Audited(
            sum(audit.done for audit in self._all),
            sum(audit.mismatches for audit in self._all),
            budget.spent_ns / 1e6,
            budget.first_ns / 1e6,
            budget.all_ns / 1e6,
        )
        self._reported = now
        self._report(
            Audited(
                now.audits - last.audits,
                now.mismatches - last.mismatches,
                round(now.audit_ms - last.audit_ms, 3),
                round(now.first_ms - last.first_ms, 3),
                round(now.all_ms - last.all_ms, 3),
            )
        )


def _report_mismatch(report: Callable[[Status], None], found: Mismatch) -> None:
    report(Mismatched(found.trial, found.trials, found.mode, found.what, found.way, found.then or ""))
