"""Workers of two hosts whose clocks differ by a quarter of an hour share a study: the server's clock is what counts."""

import signal
from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from ds_hooks.shared.secrets import STORAGE_VARIABLE
from ds_hooks.shared.trial_attributes import WORKER
from tests.support.accounts import assert_accounts
from tests.support.paths import ROOT
from tests.support.real_worker import STUDY_NAME
from tests.support.sandbox import Child, Sandbox, wait_for
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SET = "import time\nright_s = time.time\ntime.time = lambda: right_s() + {minutes} * 60\n"
"""Python runs it in each process before all else."""


def test_one_that_is_ahead_dies_and_one_that_is_behind_takes_over(
    database: str, sandbox: Sandbox, tmp_path: Path
) -> None:
    directory = tmp_path / "study"

    def hire(name: str, minutes: int) -> Child:
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(SET.format(minutes=minutes))
        options = ["--worker", name, "--directory", str(directory), "--trials", "24", "--lease", "5", "--epoch", "1"]
        environment = {STORAGE_VARIABLE: database, "PYTHONPATH": f"{tmp_path / name}:{ROOT}", "OMP_NUM_THREADS": "1"}
        worker: Child = sandbox.start(Child, "-m", "tests.support.real_worker", *options, **environment)
        return worker

    def trials() -> list[FrozenTrial]:
        try:
            return optuna.load_study(study_name=STUDY_NAME, storage=open_storage(database)).get_trials()
        except KeyError:  # none has made the study yet
            return []

    def of(name: str) -> set[int]:
        """The trials that this worker trains, with a score."""
        running = (trial for trial in trials() if trial.state is TrialState.RUNNING and trial.intermediate_values)
        return {trial.number for trial in running if trial.user_attrs.get(WORKER) == name}

    ahead, behind = hire("ahead", 8), hire("behind", -7)
    wait_for(lambda: of("ahead") and of("behind"), "that both train")
    assert ahead.kill(signal.SIGKILL) == -signal.SIGKILL
    left = of("ahead")
    assert behind.ended() == 0, behind.said()
    ended = trials()
    assert [trial.number for trial in ended] == list(range(24))
    assert {trial.state for trial in ended} == {TrialState.COMPLETE}
    assert left and {ended[number].user_attrs[WORKER] for number in left} == {"behind"}
    claims = Claims(connect(database, directory), STUDY_NAME, "a reader")
    assert_accounts(claims.spans(), ended)
    claims.close()
