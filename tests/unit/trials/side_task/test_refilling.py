"""How many trials join at once, by what joining costs; and that rows stay full."""

import random
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import FrozenTrial, TrialState

from tests.support.fused_and_solo import AtOnce
from tests.support.paths import ROOT
from tests.support.side_task_runs import Direct
from trials.gate.base import OpenGate
from trials.search.worker import SearchWorker, WorkerConfig
from trials.side_task.refilling import Refilling
from trials.side_task.scheduler import Scheduler
from trials.study import load_study
from trials.training.group import TrialGroup


def test_until_something_is_known_a_quarter_must_wait() -> None:
    assert [Refilling().least(rows) for rows in (1, 4, 16)] == [1, 1, 4]


def test_a_single_trial_joins_where_an_epoch_is_long_and_a_quarter_where_it_is_short() -> None:
    refilling = Refilling()
    refilling.joined(5_000_000)
    refilling.trained(1_000_000_000)
    assert refilling.least(16) == 1, "a row for an epoch is worth 62 ms"
    for _ in range(50):
        refilling.trained(30_000_000)
    assert refilling.least(16) == 3, "and now 1.9 ms"
    refilling.joined(500_000_000)
    assert refilling.least(16) == 4


@given(st.integers(1, 256), st.integers(1, 10**9), st.integers(1, 10**9))
def test_what_begins_is_worth_more_than_joining_costs(rows: int, joining_ns: int, epoch_ns: int) -> None:
    refilling = Refilling()
    refilling.joined(joining_ns)
    refilling.trained(epoch_ns)
    least = refilling.least(rows)
    assert 1 <= least <= -(-rows // 4)
    assert least * epoch_ns >= rows * joining_ns or least == -(-rows // 4)


class Halving(optuna.pruners.BasePruner):
    """Stops half of the trials at each rung, whatever they score."""

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        return bool(random.Random(f"{trial.number} {trial.last_step}").getrandbits(1))


def test_rows_stay_full_though_half_of_the_trials_stop_at_each_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the last trial is handed out, in the example's study."""
    steps: list[list[int]] = []
    train = TrialGroup.train_step

    def noted(group: TrialGroup, *batch: Any) -> None:
        steps.append(list(group.numbers))
        train(group, *batch)

    monkeypatch.setattr(TrialGroup, "train_step", noted)
    study = load_study(ROOT / "examples" / "digits.py")
    study.trials, study.fused, study.epochs, study.rungs = 48, 16, 12, (2, 5)
    study.pruner = Halving  # type: ignore[method-assign]
    study.sampler = lambda: optuna.samplers.RandomSampler(seed=0)  # type: ignore[method-assign]
    worker = SearchWorker(study, WorkerConfig(storage="sqlite:///:memory:", study_name="s", worker="w"), AtOnce())
    Scheduler(study, OpenGate(), Direct(worker), lambda _: None).run()
    states = [trial.state for trial in worker._study.get_trials()]
    assert states.count(TrialState.PRUNED) > 30
    last = next(at for at, numbers in enumerate(steps) if 47 in numbers)
    assert len(steps[:last]) > 200
    assert sum(map(len, steps[:last])) >= 0.95 * 16 * last
