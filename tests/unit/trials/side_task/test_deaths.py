"""Side tasks that are killed, again and again: whoever is innocent ends all the same, and a culprit fails."""

from collections.abc import Callable
from pathlib import Path

import pytest
from optuna.trial import FrozenTrial, TrialState

from tests.support.fused_and_solo import AtOnce, Batch
from tests.support.side_task_runs import Direct, Seven, assert_as_alone, make_study
from tests.support.slow_cases import others_slow
from trials.gate.base import OpenGate
from trials.search.storage.claims import MOST_DEATHS
from trials.search.worker import SearchWorker, WorkerConfig
from trials.side_task import checkpoints, scheduler
from trials.side_task.scheduler import Scheduler

DIVERGES = 1
"""This trial of `Seven` fails in any case."""


class Killed(BaseException):
    """The side task ends here, and does nothing more."""


class Storm(OpenGate):
    """Kills the side task when it is asked for the given time."""

    def __init__(self, at: int) -> None:
        self._left = at

    def enter(self, unit: int) -> None:
        self._left -= 1
        if not self._left:
            raise Killed


def until_over(study: Seven, directory: Path, gate: Callable[[], OpenGate], most: int) -> tuple[list[FrozenTrial], int]:
    """Begin one side task after another, each when the one before was killed. Returns the trials and how many were."""
    for deaths in range(most):
        storage = str(directory / "study.journal")
        config = WorkerConfig(storage=storage, study_name="s", worker="w", directory=directory)
        worker = SearchWorker(study, config, AtOnce())
        try:
            Scheduler(study, gate(), Direct(worker), lambda status: None, directory=directory).run()
        except Killed:
            continue
        return worker._study.get_trials(), deaths
    raise AssertionError("it never ends")


def test_no_trial_fails_because_of_kills_from_outside(tmp_path: Path) -> None:
    """Not even where all come within an epoch and a second."""
    study = make_study(False)
    trials, deaths = until_over(study, tmp_path, lambda: Storm(200), most=60)
    assert deaths > MOST_DEATHS, "a trial takes several lives"
    assert [trial.number for trial in trials if trial.state is TrialState.FAIL] == [DIVERGES]
    assert_as_alone(trials, study)


@pytest.mark.parametrize("epoch", others_slow([0, 2], [2]))
def test_a_trial_that_kills_its_worker_each_time_fails_and_no_other(
    epoch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "SUSPECT_PERIOD_S", 0.0)
    monkeypatch.setattr(checkpoints, "MOST_COST", float("inf"))
    monkeypatch.setattr(scheduler, "ASK_AGAIN_S", 0.01)  # nobody else would take them meanwhile
    study, guilty = make_study(True), 3
    batches = study.trial_batches

    def fatal(params: dict[str, object], number: int, at: int) -> list[Batch] | None:
        if (number, at) == (guilty, epoch):
            raise Killed
        return batches(params, number, at)  # type: ignore[return-value]

    study.trial_batches = fatal  # type: ignore[method-assign, assignment]
    trials, deaths = until_over(study, tmp_path, OpenGate, most=20)
    assert [trial.number for trial in trials if trial.state is TrialState.FAIL] == [DIVERGES, guilty]
    assert trials[guilty].user_attrs["squeezer_reason"].startswith(f"{MOST_DEATHS} workers died in it")
    assert deaths <= MOST_DEATHS + 1, "one more at most, in which nobody had saved anything"
