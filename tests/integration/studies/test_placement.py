"""Unlike workers share a study: each trains what it trains best, and what is too large for one, another does."""

import signal
from collections import Counter
from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from ds_hooks.shared.secrets import STORAGE_VARIABLE
from ds_hooks.shared.trial_attributes import REASON, WORKER
from tests.support.paths import ROOT
from tests.support.sandbox import Child, Sandbox, wait_for
from trials.search.storage.claim_tables import CLAIM
from trials.search.storage.claim_tables import WORKER as WORKERS
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage

pytestmark = pytest.mark.integration

TWO_KINDS, TWO_SIZES = ROOT / "tests/support/studies/two_kinds.py", ROOT / "tests/support/studies/two_sizes.py"
WIDTHS = 8, 32
LITTLE_MB = 550
"""Torch takes a third of it. A large trial takes 128 MB, and as much again for its row and for its gradient."""


def hire(
    name: str, storage: str, directory: Path, sandbox: Sandbox, *options: str, file: Path = TWO_SIZES, **variables: str
) -> Child:
    command = ["-m", "trials.side_task.main", "--study", str(file), "--study-name", "s", "--worker", name]
    place = ["--directory", str(directory), "--threads", "1", *options]
    environment = {STORAGE_VARIABLE: storage, "TWO_SIZES_GO": str(directory.parent / "go"), "OMP_NUM_THREADS": "1"}
    child: Child = sandbox.start(Child, *command, *place, **environment, **variables)
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


def structures(storage: str, directory: Path) -> int:
    engine = connect(storage, directory)
    try:
        with engine.connect() as c:
            return len(c.execute(sa.select(CLAIM.c.structure).where(CLAIM.c.structure.is_not(None))).all())
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


@pytest.mark.slow
def test_each_of_two_unlike_devices_gets_most_of_what_it_trains_best(sandbox: Sandbox, tmp_path: Path) -> None:
    storage, directory = f"{tmp_path}/study.journal", tmp_path / "study"
    directory.mkdir()
    until_told = {"TWO_KINDS_EPOCH_S": "20 20", "TWO_KINDS_FUSED": "72"}
    first = hire("first", storage, directory, sandbox, file=TWO_KINDS, **until_told)
    wait_for(lambda: structures(storage, directory) == 72, "one that has begun them all")
    first.process.send_signal(signal.SIGTERM)
    first.ended()
    narrow = hire("narrow", storage, directory, sandbox, file=TWO_KINDS, TWO_KINDS_EPOCH_S="0.1 1")
    wide = hire("wide", storage, directory, sandbox, file=TWO_KINDS, TWO_KINDS_EPOCH_S="1 0.1")
    assert (narrow.ended(), wide.ended()) == (0, 0), narrow.said() + wide.said()
    found = trials_of(storage)
    assert [trial.state for trial in found] == [TrialState.COMPLETE] * 72, narrow.said() + wide.said()
    placed = Counter((trial.user_attrs[WORKER], WIDTHS[trial.number % 2]) for trial in found)
    assert placed["narrow", 8] > 2 * placed["narrow", 32] and placed["wide", 32] > 2 * placed["wide", 8]
