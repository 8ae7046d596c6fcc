"""Verdicts of the pruner: they come before the next epoch, where waiting for them pays."""

import signal
from collections.abc import Collection
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import FrozenTrial, TrialState
from torch import nn

from ds_hooks.shared.processes.signals import END_SIGNAL
from tests.support.fused_and_solo import AtOnce
from tests.support.side_task_runs import Direct, Starving, Widths, data
from trials.gate.base import StopRequested
from trials.search.worker import SearchWorker, WorkerConfig
from trials.side_task.endings import Endings
from trials.side_task.scheduler import Scheduler


class Pruned(Widths):
    """Trials with two rungs; those of odd numbers stop at the first."""

    trials, fused, epochs, rungs = 16, 4, 4, (1, 2)
    prunes = True

    def pruner(self) -> optuna.pruners.BasePruner:
        prunes = self.prunes

        class Odd(optuna.pruners.BasePruner):
            def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
                return prunes and trial.number % 2 == 1

        return Odd()


class Slow(Direct):
    """Its verdicts come only to those who wait for them, or long after."""

    def __init__(self, worker: SearchWorker) -> None:
        super().__init__(worker)
        self.waits = 0
        self.trained: dict[int, int] = {}
        self._looks = 0
        self._late: list[dict[str, Any]] = []

    def send(self, **request: Any) -> None:
        self.trained |= {int(number): epochs for number, epochs in request.get("trained", {}).items()}
        super().send(**request)

    def answers(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        found = super().answers(wait_s)
        self._looks += 1
        self._late += [each for each in found if {"pruned", "kept"} & each.keys()]
        found = [each for each in found if not {"pruned", "kept"} & each.keys()]
        if self.may_answer(wait_s):
            found, self._late = found + self._late, []
        return found

    def may_answer(self, wait_s: float) -> bool:
        self.waits += wait_s > 0 and bool(self._late)
        return wait_s > 0 or self._looks % 3 == 0


def trained(slow: type[Slow] = Slow, prunes: bool = True) -> tuple[Slow, list[FrozenTrial]]:
    """A whole run: the line, and the trials in the end."""
    study = Pruned(
        lambda n: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(),
        lambda n, parameters: torch.optim.SGD(parameters, 0.01),
        data(0, 3),
    )
    study.length, study.prunes = lambda epoch: 3, prunes
    worker = SearchWorker(study, WorkerConfig(storage="sqlite:///:memory:", study_name="s", worker="w"), AtOnce())
    line = slow(worker)
    Scheduler(study, Starving(()), line, lambda status: None).run()
    return line, worker._study.get_trials()


def test_a_pruned_trial_trains_no_epoch_in_vain_once_some_are_known_to_be_pruned() -> None:
    line, trials = trained()
    odd = [trial for trial in trials if trial.number % 2]
    assert all(trial.state is TrialState.PRUNED and trial.last_step == 1 for trial in odd)
    assert [line.trained[trial.number] for trial in odd if trial.number >= 8] == [1] * 4
    assert all(line.trained[trial.number] == 4 for trial in trials if trial.number % 2 == 0)


def test_where_none_is_pruned_nobody_waits_for_verdicts() -> None:
    line, trials = trained(prunes=False)
    assert all(trial.state is TrialState.COMPLETE for trial in trials)
    assert line.waits == 0


def test_verdicts_that_do_not_come_are_waited_for_no_longer_than_they_are_worth() -> None:
    class Slower(Slow):
        def may_answer(self, wait_s: float) -> bool:
            super().may_answer(wait_s)
            return wait_s == 0 and self._looks % 7 == 0

    line, trials = trained(Slower)
    assert line.waits > 0, "it was tried"
    assert all(trial.state.is_finished() for trial in trials)
    assert max(line.trained[trial.number] for trial in trials if trial.number % 2) > 1


@pytest.mark.parametrize("comes", [True, False])
def test_on_one_core_waits_in_vain_become_rare(comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a search worker costs nothing that computes, but one that waits for a lock does."""

    class Elsewhere(Slow):
        def may_answer(self, wait_s: float) -> bool:
            return super().may_answer(wait_s) if comes else wait_s == 0 and self._looks % 7 == 0

    shares: list[float] = []

    def worth_s(endings: Endings, numbers: Collection[int], epoch_s: float, share: float) -> float:
        found = worth(endings, numbers, epoch_s, share)
        shares.extend([share] if found else [])
        return found

    worth = Endings.worth_s
    monkeypatch.setattr(Endings, "worth_s", worth_s)
    monkeypatch.setattr("trials.side_task.results.idle_share", lambda: 0.0)
    _, trials = trained(Elsewhere)
    assert all(trial.state.is_finished() for trial in trials)
    assert len(shares) > 3 and (not any(shares) if comes else shares[:3] == [0.0, 1.0, 0.0])


def test_one_that_is_asked_to_end_waits_for_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Slow):
        """From the first wait on, the daemon asks for the end."""

        def may_answer(self, wait_s: float) -> bool:
            super().may_answer(wait_s)
            assert self.waits < 2, "it waits on"
            if self.waits:
                monkeypatch.setattr(signal, "sigpending", lambda: {END_SIGNAL})
                monkeypatch.setattr(Starving, "use", stop)
            return wait_s == 0 and self._looks % 3 == 0

    def stop(gate: Starving, *_: Any) -> None:
        raise StopRequested

    with pytest.raises(StopRequested):
        trained(Asked)
