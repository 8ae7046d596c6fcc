"""What `trials best` shows and keeps, beside workers that go on, too."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.support.fused_and_solo import AtOnce
from tests.support.plain_study import Plain
from trials.best_trials import NoTrialError, Shown, best_trials, describe, loading, save
from trials.search.files import checkpoint_files
from trials.search.storage.optuna_storage import open_storage
from trials.search.worker import SearchWorker, WorkerConfig


@pytest.fixture
def worker(tmp_path: Path) -> SearchWorker:
    directory = tmp_path / "study"
    config = WorkerConfig(storage=f"{tmp_path}/study.journal", study_name="s", worker="w", directory=directory)
    return SearchWorker(Plain(), config, AtOnce())


def complete(worker: SearchWorker) -> None:
    """A trial, which scores its number."""
    (trial,) = worker.ask(1)["trials"]
    assert worker._config.directory is not None
    weights = checkpoint_files.temporary_weights_path(worker._config.directory, trial["number"])
    weights.write_text(f"of {trial['number']}" * 1000)
    worker.report(trial["number"], 1, trial["number"], True, weights=str(weights))


def found(tmp_path: Path) -> list[Shown]:
    return best_trials(f"{tmp_path}/study.journal", "s", tmp_path / "study")


def kept(tmp_path: Path) -> list[str]:
    return sorted(file.name for file in (tmp_path / "kept").iterdir())


def test_one_that_a_better_one_displaces_meanwhile_is_not_what_is_kept(tmp_path: Path, worker: SearchWorker) -> None:
    complete(worker)
    looks = 0

    def find() -> list[Shown]:
        nonlocal looks
        looks += 1
        best = found(tmp_path)
        if looks == 1:
            complete(worker)
        return best

    (shown,) = save(find, None, Path("study.py"), tmp_path / "kept")
    assert (shown.number, shown.weights) == (1, tmp_path / "kept" / "trial-1.pt")
    assert kept(tmp_path) == ["trial-1.json", "trial-1.pt"]
    assert (tmp_path / "kept" / "trial-1.pt").read_text() == "of 1" * 1000
    described = json.loads((tmp_path / "kept" / "trial-1.json").read_text())
    assert described["number"] == 1 and described["weights"] == str(shown.weights)


@contextmanager
def no_file_longer_than(most_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_on_a_full_disk_what_was_kept_before_stays_whole(tmp_path: Path, worker: SearchWorker) -> None:
    complete(worker)
    save(lambda: found(tmp_path), None, Path("study.py"), tmp_path / "kept")
    before = {name: (tmp_path / "kept" / name).read_bytes() for name in kept(tmp_path)}
    with pytest.raises(OSError, match="File too large"), no_file_longer_than(1000):
        save(lambda: found(tmp_path), None, Path("study.py"), tmp_path / "kept")
    assert {name: (tmp_path / "kept" / name).read_bytes() for name in kept(tmp_path)} == before


def constrained(tmp_path: Path, directions: list[str], *values: float) -> None:
    """A study with one trial for each value of a constraint. All score the same."""
    study = optuna.create_study(
        study_name="s", storage=open_storage(f"{tmp_path}/study.journal"), directions=directions
    )
    for value in values:
        attributes = {"constraints:size": value}
        study.add_trial(optuna.trial.create_trial(values=[1.0] * len(directions), system_attrs=attributes))


@pytest.mark.parametrize("broken", [1.0, nan])
def test_the_best_of_those_that_all_break_a_constraint_is_shown_as_such(broken: float, tmp_path: Path) -> None:
    constrained(tmp_path, ["maximize"], broken)
    (shown,) = found(tmp_path)
    assert "score 1, but it breaks a constraint, after" in describe(shown)[0]
    constrained_later = optuna.load_study(study_name="s", storage=open_storage(f"{tmp_path}/study.journal"))
    constrained_later.add_trial(optuna.trial.create_trial(value=0.5, system_attrs={"constraints:size": 0.0}))
    (shown,) = found(tmp_path)
    assert shown.number == 1 and "breaks" not in describe(shown)[0]


def test_a_front_on_which_no_trial_keeps_the_constraints_is_named(tmp_path: Path) -> None:
    constrained(tmp_path, ["maximize", "minimize"], 1.0, 2.0)
    with pytest.raises(NoTrialError, match="every completed trial of study s breaks a constraint"):
        found(tmp_path)


def test_the_code_that_loads_a_model_has_every_hyperparameter(tmp_path: Path) -> None:
    params: dict[str, Any] = {"clip": inf, "more": {"a": [nan, -inf, None, True, "x'y"]}, "ü": 1e-300, "n": 3}
    shown = Shown(
        number=0,
        score=1.0,
        params=params,
        epochs=1,
        history={},
        weights=None,
        is_target=False,
        breaks_constraint=False,
    )
    code = loading(None, Path("study.py"), shown).splitlines()[-1]
    got = eval(code.removeprefix("model = load_study('study.py').model"))
    assert isnan(got["more"]["a"].pop(0)) and isnan(params["more"]["a"].pop(0)) and got == params
