"""A study that was deleted, or that is in another storage, leaves nothing that passes for another one's of its name."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from tests.support.fused_and_solo import AtOnce
from tests.support.side_task_runs import Direct
from tests.support.simulated import Pretended, Trainer, assert_ended
from tests.support.slow_cases import others_slow
from trials.search.storage.optuna_storage import open_storage
from trials.search.worker import SearchWorker, WorkerConfig
from trials.study_error import StudyError

KINDS = "journal", "sqlite", "postgresql"


def hire(storage: str, directory: Path, name: str = "w") -> SearchWorker:
    study = Pretended(4)
    study.keep_best = 1
    config = WorkerConfig(storage=storage, study_name="s", worker=name, directory=directory)
    return SearchWorker(study, config, AtOnce())


def train(worker: SearchWorker, directory: Path) -> None:
    study: Any = worker._user_study
    trainer = Trainer(study, Direct(worker), directory)
    while not trainer.is_over:
        trainer.turn()
    worker.stop()


def delete(storage: str) -> None:
    optuna.delete_study(study_name="s", storage=open_storage(storage))


def best(directory: Path) -> list[int]:
    return [entry["number"] for entry in json.loads((directory / "best" / "best.json").read_text())]


@pytest.mark.parametrize(
    ("storage_kind", "is_done"),
    others_slow(product(KINDS, [True, False]), [("journal", False), ("postgresql", True)]),
    indirect=["storage_kind"],
)
def test_a_study_that_was_deleted_begins_anew(is_done: bool, storage: str, tmp_path: Path) -> None:
    directory = tmp_path / "study"
    for _ in range(3):  # workers that died in the deleted study's trials do not count
        worker = hire(storage, directory)
        train(worker, directory) if is_done else worker.ask(2)
        delete(storage)
        if not storage.startswith("postgresql"):
            with pytest.raises(StudyError, match=f"{directory} has the trials of another study 's', .*or remove it"):
                hire(storage, directory)
            delete(storage)
        directory = tmp_path / f"{directory.name} again"
    worker = hire(storage, directory)
    train(worker, directory)
    trials = worker._study.get_trials()
    assert_ended(trials, worker._claims.spans())
    assert len(trials) == 4
    completed = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    assert best(directory) == [t.number for t in sorted(completed, key=lambda t: -(t.value or 0.0))[:1]]


@pytest.mark.parametrize(
    ("storage_kind", "other"),
    others_slow(
        product(KINDS, ["sqlite:///{}/other.db", "{}/other.journal"]),
        [("journal", "sqlite:///{}/other.db"), ("postgresql", "{}/other.journal")],
    ),
    indirect=["storage_kind"],
)
def test_another_storage_does_not_take_a_directory_that_is_in_use(other: str, storage: str, tmp_path: Path) -> None:
    directory = tmp_path / "study"
    train(hire(storage, directory), directory)
    kept = best(directory)
    with pytest.raises(StudyError, match="which is not in this storage"):
        hire(other.format(tmp_path), directory)
    assert best(directory) == kept and (directory / "best" / f"trial-{kept[0]}.pt").exists()
    assert hire(storage, directory).ask(1)["over"], "the first is as it was"


def test_a_trial_that_someone_has_closed_while_it_was_claimed_is_no_other_studys(storage: str, tmp_path: Path) -> None:
    directory = tmp_path / "study"
    worker = hire(storage, directory)
    worker._study.enqueue_trial({})
    (waiting,) = worker._study.get_trials(states=(TrialState.WAITING,))
    worker._study._storage.set_trial_state_values(waiting._trial_id, state=TrialState.FAIL)
    with worker._claims.alone() as held:
        assert held.claim(waiting.number) is not None
        held.unclaim(waiting.number)
    worker.stop()
    assert hire(storage, directory).ask(1)["trials"]


@pytest.mark.parametrize(
    ("storage_kind", "index"),
    others_slow(product(KINDS, ["", "[{}]"]), [("journal", ""), ("journal", "[{}]")]),
    indirect=["storage_kind"],
)
def test_a_damaged_index_of_the_best_holds_nobody_up(index: str, storage: str, tmp_path: Path) -> None:
    directory = tmp_path / "study"
    worker = hire(storage, directory)
    (directory / "best").mkdir(exist_ok=True)
    (directory / "best" / "best.json").write_text(index)
    worker.stop()
    train(hire(storage, directory), directory)
    assert len(best(directory)) == 1


@pytest.mark.parametrize("storage_kind", others_slow(KINDS, ["journal", "postgresql"]), indirect=True)
def test_a_worker_that_begins_takes_no_claims_from_those_that_live(storage: str, tmp_path: Path) -> None:
    """Whatever trials there are: begun, enqueued, added as ended, closed by others."""
    directory = tmp_path / "study"
    first = hire(storage, directory)
    first._study.enqueue_trial({"x": 0.5})
    first._study.add_trial(optuna.trial.create_trial(value=0.1))
    numbers = [trial["number"] for trial in first.ask(2)["trials"]]
    first._study.enqueue_trial({"x": 0.25})
    optuna.load_study(study_name="s", storage=open_storage(storage)).tell(numbers[0], state=TrialState.FAIL)
    second = hire(storage, directory, "another")
    with second._claims.alone() as held:
        assert held.claimed() == numbers
    assert first.report(numbers[1], 1, 0.5, False) == {"kept": numbers[1]} and numbers[1] in first._held
