"""A search worker ends at any system call that writes, or the disk is full there: the study goes on from each."""

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from tests.support.crash_points import KILL, NO_SPACE, Call, in_order, missing, traced
from tests.support.fused_and_solo import AtOnce
from tests.support.side_task_runs import Direct
from tests.support.simulated import EPOCHS, Pretended, Trainer, assert_ended
from tests.support.slow_cases import others_slow
from trials.search.files import artifacts
from trials.search.files.bounded_store import BoundedStore
from trials.search.storage import database
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage
from trials.search.worker import SearchWorker, WorkerConfig

pytestmark = pytest.mark.integration

TRIALS = 3

STORAGES = "{}/study.journal", "sqlite:///{}/study.db"
CASES = [(storage, every, how) for storage, every in zip(STORAGES, (60, 300), strict=True) for how in (KILL, NO_SPACE)]


@pytest.fixture(autouse=True)
def strace(monkeypatch: pytest.MonkeyPatch) -> None:
    if (why := missing()) is not None:
        pytest.skip(why)
    monkeypatch.setattr(database, "PAUSES_S", (0.0,))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what is logged is written too
    yield
    optuna.logging.set_verbosity(level)


def study() -> Pretended:
    made = Pretended(TRIALS)
    made.keep_best = 1
    return made


def train(storage: str, directory: Path) -> None:
    """Be a worker until the study is over."""
    config = WorkerConfig(storage=storage.format(directory), study_name="s", worker="w", directory=directory)
    trainer = Trainer(study(), Direct(SearchWorker(study(), config, AtOnce())), directory)
    while not trainer.is_over:
        trainer.turn()


def assert_goes_on(storage: str, directory: Path, where: str) -> None:
    """A successor ends the study, and nothing is missing or there twice."""
    try:
        train(storage, directory)
        named = storage.format(directory)
        trials = optuna.load_study(study_name="s", storage=open_storage(named)).get_trials()
        claims = Claims(connect(named, directory), "s", "a reader")
        assert len(trials) == TRIALS
        assert_ended(trials, claims.spans())
        claims.close()
        completed = [trial for trial in trials if trial.state is TrialState.COMPLETE]
        best = sorted(completed, key=lambda trial: trial.value or 0.0)[-1:]
        index = json.loads((directory / "best" / "best.json").read_text()) if best else []
        assert [entry["number"] for entry in index] == [trial.number for trial in best]
        for trial in best:
            assert (directory / "best" / f"trial-{trial.number}.pt").read_text() == f"of trial {trial.number}"
            assert max(trial.intermediate_values) == EPOCHS
        assert not list(directory.glob("best/*.tmp"))
    except BaseException as error:
        error.add_note(f"after {where}")
        raise


def all_points(storage: str, directory: Path) -> list[tuple[str, int]]:
    """Each call of a whole study, and its how manieth it is."""
    calls = traced(lambda: train(storage, directory))
    assert calls["fsync"] + calls["fdatasync"] > 20 and calls["rename"] > 3 and calls["pwrite64"] > 50
    return [(call, index) for call, count in calls.items() for index in range(1, count + 1)]


def crash(storage: str, how: str, points: list[tuple[str, int]], above: Path) -> None:
    """End a study at each of these calls, and go on."""
    for call, index in points:
        directory = above / f"{call}{index}"
        traced(lambda directory=directory: train(storage, directory), f"{call}:{how}:when={index}")
        assert_goes_on(storage, directory, f"{how} at {call} {index}")
        shutil.rmtree(directory)


@pytest.mark.parametrize(("storage", "every", "how"), others_slow(CASES, [CASES[0], CASES[-1]]))
def test_some_of_them(storage: str, every: int, how: str, tmp_path: Path) -> None:
    crash(storage, how, all_points(storage, tmp_path / "whole")[::every], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", [KILL, NO_SPACE])
@pytest.mark.parametrize("storage", STORAGES)
def test_every_one(storage: str, how: str, tmp_path: Path) -> None:
    crash(storage, how, all_points(storage, tmp_path / "whole"), tmp_path)


def assert_durable(calls: list[Call], names: list[str]) -> None:
    """Each of these names was given to a file whose content was on disk, and then its directory's entry was.

    If the directory was new, its own entry was on disk before, and so were those of all above. Only after that anything
    was written to a database, or the next file got a name.
    """
    named = [(at, call.files) for at, call in enumerate(calls) if call.name in ("rename", "link")]
    assert {Path(files[1]).name for _, files in named} >= set(names), named
    for at, (source, target) in named:
        before = [call.name for call in calls[:at] if call.files[:1] == (source,)]
        assert before[-1] in ("fsync", "fdatasync"), f"{target}: {before}"
        written = [call for call in calls[at + 1 :] if call.name != "unlink"]
        assert written[0] == Call("fsync", (str(Path(target).parent),)), f"{target}: {written[:3]}"
        for folder in Path(target).parents:
            made = Call("mkdir", (str(folder),))
            if made in calls[:at]:
                since = calls[calls.index(made) : at]
                assert Call("fsync", (str(folder.parent),)) in since, f"{folder} is there, and may not last"


@pytest.mark.parametrize("storage", STORAGES)
def test_files_are_durable_before_anything_names_them(storage: str, tmp_path: Path) -> None:
    calls = in_order(lambda: train(storage, tmp_path / "study"))
    checkpoints = [f"2-{fence}.pt" for fence in range(1, TRIALS + 1)]
    assert_durable(calls, ["directory.id", *checkpoints, "best.json"])
    storage_file = str(tmp_path / "study" / storage.rpartition("/")[2])
    before = calls[: next(at for at, call in enumerate(calls) if call.files == (storage_file,))]
    identified = max(at for at, call in enumerate(before) if call.name == "unlink")
    assert Call("fsync", (str(tmp_path / "study"),)) in before[identified:], "the storage is there, and may not last"
    weights = {Path(call.files[-1]).name for call in calls if call.name == "rename"} - {*checkpoints, "best.json"}
    assert weights and weights <= {f"trial-{number}.pt" for number in range(TRIALS)}


def test_weights_that_a_dead_worker_left_are_durable(tmp_path: Path) -> None:
    directory = tmp_path / "study"
    train(STORAGES[0], directory)
    (kept,) = directory.glob("best/*.pt")
    kept.rename(kept.with_suffix(".1.tmp"))
    assert_durable(in_order(lambda: train(STORAGES[0], directory)), [kept.name, "best.json"])


def test_files_from_an_artifact_store_are_durable(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = optuna.artifacts.FileSystemArtifactStore(tmp_path / "store")
    store.write("one", io.BytesIO(b"of no matter"))
    target, temporary = tmp_path / "1-1.pt", tmp_path / "1-1.tmp"
    assert_durable(in_order(lambda: artifacts.fetch(BoundedStore(store), "one", target, temporary)), [target.name])
