"""Callbacks run after each result; those that fail, are slow or hang cost no result."""

import atexit
import os
import select
import signal
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.study import MaxTrialsCallback
from optuna.terminator import BaseTerminator, TerminatorCallback
from optuna.trial import FrozenTrial, TrialState
from torch import nn

from tests.support.fused_and_solo import AtOnce, ToyStudy
from tests.support.logged import logged
from tests.support.sandbox import wait_for
from trials.search import callbacks as callbacks_module
from trials.search.client import SearchClient, SearchError
from trials.search.worker import SearchWorker, WorkerConfig
from trials.search.worker_process import serve


class Called(ToyStudy):
    trials = 9

    def __init__(self, *callbacks: Any) -> None:
        super().__init__(lambda n: nn.Linear(1, 1), torch.optim.SGD)
        self.called: Any = list(callbacks)

    def callbacks(self) -> Sequence[Any]:
        found: Sequence[Any] = self.called() if callable(self.called) else self.called
        return found

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        if trial.number == 2:
            raise ValueError("no")
        return {}

    def pruner(self) -> optuna.pruners.BasePruner:
        return optuna.pruners.ThresholdPruner(lower=0.0)


def hire(study: Called, directory: Path) -> SearchWorker:
    config = WorkerConfig(storage=f"{directory}/study.journal", study_name="s", worker="me", directory=directory)
    return SearchWorker(study, config, AtOnce())


Heard = list[tuple[int, TrialState, float | None]]


def listener(heard: Heard) -> Any:
    return lambda study, trial: heard.append((trial.number, trial.state, trial.value))


def train(worker: SearchWorker) -> None:
    """The first trial completes, the second is pruned, the third fails, the fourth goes on."""
    worker.ask(3)
    worker.report(0, 1, 0.5, True)
    worker.report(1, 1, -1.0, False)


RESULTS: Heard = [(0, TrialState.COMPLETE, 0.5), (1, TrialState.PRUNED, -1.0), (2, TrialState.FAIL, None)]


def test_they_hear_each_result_once_it_is_recorded(tmp_path: Path) -> None:
    heard: Heard = []
    worker = hire(Called(listener(heard)), tmp_path)
    train(worker)
    worker.stop()
    assert sorted(heard) == RESULTS


def test_one_that_fails_is_logged_once_per_kind_and_the_others_hear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(study: optuna.Study, trial: FrozenTrial) -> None:
        raise (ValueError("value"), SystemExit("exit"), CancelledError("stop"))[trial.number]

    heard: Heard = []
    worker = hire(Called(broken, listener(heard)), tmp_path)
    with logged():
        train(worker)
        worker.stop()
    assert sorted(heard) == RESULTS
    said = capsys.readouterr().err
    for reason in ("ValueError: value", "SystemExit: exit", "CancelledError: stop"):
        assert said.count(f"broken failed: {reason}") == 1


def test_what_a_callback_enqueues_last_is_trained_too(tmp_path: Path) -> None:
    goes_on = threading.Event()

    def enqueue(study: optuna.Study, trial: FrozenTrial) -> None:
        goes_on.wait()
        if trial.number == 0:
            study.enqueue_trial({})

    study = Called(enqueue)
    study.trials = 1
    worker = hire(study, tmp_path)
    worker.ask(1)
    worker.report(0, 1, 0.5, True)
    answer = worker.ask(1)
    assert answer["exhausted"] and not answer["over"]
    goes_on.set()
    (trial,) = wait_for(lambda: worker.ask(1)["trials"], "the trial")
    worker.report(trial["number"], 1, 0.5, True)
    wait_for(lambda: worker.ask(1)["over"], "the end of the study")
    worker.stop()
    assert [trial.state for trial in worker._study.get_trials()] == [TrialState.COMPLETE] * 2


def test_a_study_is_over_though_a_callback_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATIENCE_S", "LAST_PATIENCE_S"):
        monkeypatch.setattr(callbacks_module, name, 0.01)
    over = threading.Event()
    study = Called(lambda study, trial: over.wait())
    study.trials = 1
    worker = hire(study, tmp_path)
    worker.ask(1)
    worker.report(0, 1, 0.5, True)
    wait_for(lambda: worker.ask(1)["over"], "the end of the study")
    worker.stop()
    over.set()


def test_one_that_hangs_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(callbacks_module, "PATIENCE_S", 0.01)
    over = threading.Event()
    worker = hire(Called(lambda study, trial: over.wait()), tmp_path)
    with logged():
        train(worker)
        worker.renew()
        worker.stop()
    trials = worker._study.get_trials()
    assert [(trial.number, trial.state) for trial in trials[:3]] == [(n, state) for n, state, _ in RESULTS]
    assert trials[3].state is TrialState.WAITING, "released"
    assert "have not ended after 0.01 s" in capsys.readouterr().err
    over.set()


@pytest.mark.parametrize("last", [partial(time.sleep, 0), partial(time.sleep, 99), partial(os._exit, 3)])
def test_what_they_have_registered_for_the_processs_end_runs_then(
    last: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def registers() -> Any:
        atexit.register(last)  # registered first, it runs last
        atexit.register((tmp_path / "written").touch)
        return [listener([])]

    monkeypatch.setattr(callbacks_module, "PATIENCE_S", 0.5)
    parents = tmp_path / "of the parent"
    study = Called()
    study.called = registers
    config = WorkerConfig(storage=f"{tmp_path}/study.journal", study_name="s", worker="me", directory=tmp_path)
    atexit.register(parents.touch)
    try:
        client = SearchClient(partial(serve, study, config, attached=lambda: False))
        assert client.close()
    finally:
        atexit.unregister(parents.touch)
    assert (tmp_path / "written").exists() and not parents.exists()


def test_a_worker_that_is_killed_in_them_has_recorded_everything(tmp_path: Path) -> None:
    study = Called(lambda study, trial: time.sleep(99))
    config = WorkerConfig(storage=f"{tmp_path}/study.journal", study_name="s", worker="me", directory=tmp_path)
    client = SearchClient(partial(serve, study, config, attached=lambda: False))
    client.send(ask=3, here=[])
    assert client.answers(wait_s=60)
    assert client.close(timeout_s=0.0, is_urgent=lambda: bool(select.select([client._receive_fd], [], [], 0.0)[0]))


def test_what_they_print_is_written_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Called(lambda study, trial: print(f"trial {trial.number} has ended"))
    config = WorkerConfig(storage=f"{tmp_path}/study.journal", study_name="s", worker="me", directory=tmp_path)
    with open(tmp_path / "printed", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        print("the study begins")
        client = SearchClient(partial(serve, study, config, attached=lambda: False))
        client.send(ask=3, here=[])
        assert client.close()
    assert (tmp_path / "printed").read_text() == "the study begins\ntrial 2 has ended\n"


class Second(BaseTerminator):
    def should_terminate(self, study: optuna.Study) -> bool:
        return any(trial.state is TrialState.COMPLETE for trial in study.trials)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("ends", [lambda: TerminatorCallback(Second()), lambda: MaxTrialsCallback(1)])
def test_optunas_own_end_the_search(ends: Any, tmp_path: Path) -> None:
    worker = hire(Called(ends()), tmp_path)
    train(worker)
    worker._callbacks.finish(is_over=False)
    answer = worker.ask(5)
    assert answer["exhausted"] and not answer["trials"]


def test_a_failure_to_make_them_ends_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def away() -> Any:
        raise ConnectionError("the server is away")

    study = Called()
    study.called = away
    with logged():
        worker = hire(study, tmp_path)
    train(worker)
    assert "Study.callbacks failed, so there are none: ConnectionError: the server is away" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [[1], None, {"a": 1}])
def test_what_cannot_be_called_is_refused(wrong: Any, tmp_path: Path) -> None:
    study = Called()
    study.called = lambda: wrong
    with pytest.raises(TypeError, match=r"Study\.callbacks returned .*; allowed: a list of functions"):
        hire(study, tmp_path)


@pytest.mark.parametrize("storage", ["{}/study.journal", "sqlite:///{}/study.db"])
def test_what_they_do_to_the_trial_that_they_get_is_theirs(storage: str, tmp_path: Path) -> None:
    def spoils(study: optuna.Study, trial: FrozenTrial) -> None:
        trial.number, trial.values = 99, None
        trial.user_attrs["mine"] = trial.intermediate_values[1] = 7.0

    heard: Heard = []
    study = Called(spoils, listener(heard))
    config = WorkerConfig(storage=storage.format(tmp_path), study_name="s", worker="me", directory=tmp_path)
    worker = SearchWorker(study, config, AtOnce())
    train(worker)
    worker._callbacks.finish(is_over=False)
    first = worker._study.get_trials(deepcopy=False)[0]
    assert sorted(heard) == RESULTS
    assert (first.number, first.values, first.intermediate_values) == (0, [0.5], {1: 0.5})
    assert "mine" not in first.user_attrs


def test_what_they_fork_does_not_hide_the_search_workers_end(tmp_path: Path) -> None:
    def forks(study: optuna.Study, trial: FrozenTrial) -> None:
        child = os.fork()
        if child == 0:
            signal.pause()
        (tmp_path / "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)

    study = Called(forks)
    config = WorkerConfig(storage=f"{tmp_path}/study.journal", study_name="s", worker="me", directory=tmp_path)
    client = SearchClient(partial(serve, study, config, attached=lambda: False))
    client.send(ask=3, here=[])
    try:
        with pytest.raises(SearchError, match="the search worker has ended"):
            while True:
                client.answers(wait_s=60)
    finally:
        client.close()
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
