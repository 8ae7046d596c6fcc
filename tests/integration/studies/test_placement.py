"""Workers of different memory share a study: what is too large for one is trained by another."""

from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from ds_hooks.shared.secrets import STORAGE_VARIABLE
from ds_hooks.shared.trial_attributes import REASON, WORKER
from tests.support.paths import ROOT
from tests.support.sandbox import Child, Sandbox, wait_for
from trials.search.storage.claim_tables import WORKER as WORKERS
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage

pytestmark = pytest.mark.integration

FILE = ROOT / "tests/support/studies/two_sizes.py"
LITTLE_MB = 550
"""Torch takes a third of it. A large trial takes 128 MB, and as much again for its row and for its gradient."""


def hire(name: str, storage: str, directory: Path, sandbox: Sandbox, *options: str) -> Child:
    command = ["-m", "trials.side_task.main", "--study", str(FILE), "--study-name", "s", "--worker", name]
    place = ["--directory", str(directory), "--threads", "1", *options]
    environment = {STORAGE_VARIABLE: storage, "TWO_SIZES_GO": str(directory.parent / "go"), "OMP_NUM_THREADS": "1"}
    child: Child = sandbox.start(Child, *command, *place, **environment)
    return child


def living(storage: str, directory: Path) -> int:
    engine = connect(storage, directory)
    try:
        with engine.connect() as c:
            return len(c.execute(sa.select(WORKERS)).all())
    except sa.exc.OperationalError:
        return 0
    finally:
        engine.dispose()


def trials_of(storage: str) -> list[FrozenTrial]:
    found: list[FrozenTrial] = optuna.load_study(study_name="s", storage=open_storage(storage)).get_trials()
    return found


@pytest.mark.slow
def test_trials_that_are_too_large_for_one_worker_end_on_another(sandbox: Sandbox, tmp_path: Path) -> None:
    storage, directory = f"{tmp_path}/study.journal", tmp_path / "study"
    directory.mkdir()
    little = hire("little", storage, directory, sandbox, "--memory-mb", str(LITTLE_MB))
    roomy = hire("roomy", storage, directory, sandbox)
    wait_for(lambda: living(storage, directory) == 2, "both workers")
    (tmp_path / "go").touch()
    assert (little.ended(), roomy.ended()) == (0, 0), little.said() + roomy.said()
    found = trials_of(storage)
    assert [trial.state for trial in found] == [TrialState.COMPLETE] * 6, little.said()
    assert {trial.user_attrs[WORKER] for trial in found if not trial.number % 3} == {"roomy"}
    assert "little" in {trial.user_attrs[WORKER] for trial in found}, "the small ones"


def test_trials_that_fit_nowhere_fail(sandbox: Sandbox, tmp_path: Path) -> None:
    storage, directory = f"{tmp_path}/study.journal", tmp_path / "study"
    directory.mkdir()
    (tmp_path / "go").touch()
    alone = hire("alone", storage, directory, sandbox, "--memory-mb", str(LITTLE_MB))
    assert alone.ended() == 0, alone.said()
    found = trials_of(storage)
    assert [trial.state for trial in found] == [TrialState.COMPLETE if n % 3 else TrialState.FAIL for n in range(6)]
    assert all("memory" in trial.user_attrs[REASON] for trial in found if not trial.number % 3)
