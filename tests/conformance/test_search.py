"""Lines to a search worker: the forked one of a side task, and that of tests, which answers at once."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

from tests.support.fused_and_solo import AtOnce, ToyStudy
from tests.support.side_task_runs import Direct
from trials.search.client import Search, SearchClient
from trials.search.storage.optuna_storage import open_storage
from trials.search.worker import SearchWorker, WorkerConfig
from trials.search.worker_process import serve

PATIENCE_S = 60.0


class Asked(ToyStudy):
    """Three trials; one whose point is taken for too large fails."""

    trials, rungs = 3, (1,)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        x = trial.suggest_float("x", 0, 1)
        if trial.number == 1:
            raise ValueError("too large")
        return {"x": x}

    def sampler(self) -> optuna.samplers.BaseSampler:
        return optuna.samplers.RandomSampler(seed=0)

    def pruner(self) -> optuna.pruners.BasePruner:
        return optuna.pruners.ThresholdPruner(upper=1.0)


@pytest.fixture(params=["forked", "in this process"])
def line(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Search]:
    study = Asked(lambda n: nn.Linear(1, 1), torch.optim.SGD)
    config = WorkerConfig(storage=f"{tmp_path}/study.journal", study_name="s", worker="me", directory=tmp_path)
    if request.param == "forked":
        client = SearchClient(partial(serve, study, config, attached=lambda: False))
        yield client
        assert client.close()
    else:
        worker = SearchWorker(study, config, AtOnce())
        yield Direct(worker)
        worker.stop()


def state(tmp_path: Path, number: int) -> TrialState:
    return optuna.load_study(study_name="s", storage=open_storage(f"{tmp_path}/study.journal")).trials[number].state


def awaited(line: Search, count: int) -> list[dict[str, Any]]:
    """The next answers, at least so many."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        more = line.answers(PATIENCE_S)
        assert more, f"only {found}"
        found += more
    return found


def test_without_a_request_there_is_no_answer(line: Search) -> None:
    assert line.answers() == [] == line.answers(0.01)


def test_answers_come_once_and_in_the_order_of_the_requests(line: Search) -> None:
    line.send(ask=1)
    line.send(ask=1)
    first, second = awaited(line, 2)
    assert [trial["number"] for trial in first["trials"]] == [0]
    assert [trial["number"] for trial in second["trials"]] == [2], "the second cannot be begun"
    assert set(first["trials"][0]["params"]) == {"x"}
    assert line.answers() == []


def test_what_needs_no_answer_gets_none_and_is_done(line: Search, tmp_path: Path) -> None:
    line.send(ask=1)
    awaited(line, 1)
    line.send(trained={"0": 1})
    line.send(report=0, epoch=1, value=0.5, final=False)
    line.send(report=0, epoch=2, value=0.25, final=True)
    line.send(report=0, epoch=3, value=0.125, final=True)  # on its way when it was over
    line.send(ask=0)
    kept, found = awaited(line, 2)
    assert kept == {"kept": 0} and found["trials"] == []
    assert state(tmp_path, 0) is TrialState.COMPLETE


def test_a_verdict_names_its_trial(line: Search, tmp_path: Path) -> None:
    line.send(ask=1)
    awaited(line, 1)
    line.send(report=0, epoch=1, value=2.0, final=False)
    assert awaited(line, 1) == [{"pruned": 0}]
    assert state(tmp_path, 0) is TrialState.PRUNED
    line.send(ask=1)
    awaited(line, 1)
    line.send(report=2, epoch=1, value=0.5, final=False)
    assert awaited(line, 1) == [{"kept": 2}], "1 cannot be begun"
    assert state(tmp_path, 2) is TrialState.RUNNING


def test_it_says_when_nothing_is_left(line: Search, tmp_path: Path) -> None:
    line.send(ask=1)
    (found,) = awaited(line, 1)
    assert not found["exhausted"] and not found["over"]
    line.send(ask=9)
    (found,) = awaited(line, 1)
    assert [trial["number"] for trial in found["trials"]] == [2]
    assert found["exhausted"] and found["over"], "no other worker trains any"
    for number in (0, 2):
        line.send(fail=number, reason="diverged")
    line.send(ask=1)
    (last,) = awaited(line, 1)
    assert not last["trials"] and last["exhausted"] and last["over"]
    assert [state(tmp_path, number) for number in range(3)] == [TrialState.FAIL] * 3
