"""The side task's accounts, by a clock that stands."""

import pytest

from trials.gate.base import OpenGate
from trials.side_task.accounts import Accounts

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
        assert accounts.progress(trials_running=4, lost=64).training_ms == 7.0, "in the middle of it"
    gate.now_ns += 5 * MS
    with pytest.raises(ValueError, match="such as a study's"), accounts.training():
        gate.now_ns += 1 * MS
        accounts.count(6, 3)
        raise ValueError("such as a study's")
    accounts.epochs += 4
    found = accounts.progress(trials_running=3, lost=2)
    assert (found.work, found.samples, found.epochs) == (70, 18.0, 4) and gate.work == 70
    assert (found.training_ms, found.busy_ms) == (8.0, 15.0)
    assert (found.trials_running, found.lost) == (3, 2)
