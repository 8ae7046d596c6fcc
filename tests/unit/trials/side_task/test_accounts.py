"""The side task's accounts, by a clock that stands."""

import pytest

from trials.gate.base import OpenGate
from trials.side_task.accounts import LONG_EPOCH_S, Accounts

MS = 1_000_000


class Clocked(OpenGate):
    now_ns = 500 * MS
    work = 0

    def busy_ns(self) -> int:
        return self.now_ns

    def add_work(self, trial_samples: int) -> None:
        self.work += trial_samples


class Spending:
    spent_ns = 0


def test_training_is_the_time_inside_but_for_audits() -> None:
    gate, audits = Clocked(), Spending()
    accounts = Accounts(gate, audits)  # type: ignore[arg-type]
    with accounts.training():
        gate.now_ns += 9 * MS
        audits.spent_ns += 2 * MS
        accounts.count(64, 4)
    gate.now_ns += 5 * MS
    with pytest.raises(ValueError, match="such as a study's"), accounts.training():
        gate.now_ns += 1 * MS
        accounts.count(6, 3)
        raise ValueError("such as a study's")
    accounts.epochs += 4
    found = accounts.progress(trials_running=3, unsaved_epochs=2)
    assert (found.work, found.samples, found.epochs) == (70, 18.0, 4) and gate.work == 70
    assert (found.training_ms, found.busy_ms) == (8.0, 15.0)
    assert (found.trials_running, found.unsaved_epochs) == (3, 2)


def test_a_long_epoch_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 1e6
    accounts = Accounts(Clocked(), Spending(), lambda: now_s)  # type: ignore[arg-type]
    for _ in range(3):
        with accounts.training():
            now_s += LONG_EPOCH_S - 1
            accounts.count(64, 4)
    assert not caplog.records, "none of them is long"
    for _ in range(2):
        with accounts.training():
            for _ in range(3):
                now_s += LONG_EPOCH_S / 2
                accounts.count(64, 4)
    (record,) = caplog.records
    assert record.getMessage().startswith("an epoch has taken 15 minutes so far, for 2 steps.")
