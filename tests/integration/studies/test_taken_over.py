"""With the default settings, what a lost worker has trained goes on within 90 s at another one."""

import signal
import time
from pathlib import Path

import optuna
import pytest

from ds_hooks.shared.study_paths import journal_path, trials_directory
from tests.support.accounts import assert_accounts
from tests.support.paths import STUDIES
from tests.support.sandbox import Child, Sandbox, wait_for
from trials.search.storage.claims import LEASE_S, Claims
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage

pytestmark = [pytest.mark.integration, pytest.mark.slow]

WITHIN_S = 1.5 * LEASE_S
"""A promise to users; less than this would do but for a busy machine."""

TRIALS = 3
"""As many as one worker trains at once, so another has nothing to do."""


def test_what_a_lost_worker_has_trained_goes_on_elsewhere(sandbox: Sandbox, hold: Path, tmp_path: Path) -> None:
    counted, studies = tmp_path / "counted", tmp_path / "studies"
    settings = {"COUNTED": str(counted), "COUNTED_TRIALS": str(TRIALS), "COUNTED_EPOCH_S": "1", "TINY_HOLD": str(hold)}
    command = ["-m", "trials", "run", str(STUDIES / "counted.py"), "--directory", str(studies)]

    def begin() -> Child:
        started: Child = sandbox.start(Child, *command, OMP_NUM_THREADS="1", **settings)
        return started

    def epochs(worker: str) -> dict[int, list[int]]:
        """Trial -> the epochs of it that the worker has trained."""
        found: dict[int, list[int]] = {}
        for line in counted.read_text().splitlines() if counted.exists() else []:
            trial, epoch, _, _, by = line.split()
            if by == worker:
                found.setdefault(int(trial), []).append(int(epoch))
        return found

    lost = begin()
    wait_for(lambda: epochs("run0"), "training")
    other = begin()
    wait_for(lambda: max(map(max, epochs("run0").values())) >= 4, "trials under way")
    assert lost.kill(signal.SIGKILL) == -signal.SIGKILL
    lost_s = time.monotonic()
    wait_for(lambda: len(epochs("run1")) == TRIALS, "that another one goes on with all", patience_s=2 * WITHIN_S)
    assert time.monotonic() - lost_s < WITHIN_S
    assert min(map(min, epochs("run1").values())) > 1, "from their checkpoints"
    assert other.ended() == 0, other.said()
    storage = str(journal_path(studies))
    found = optuna.load_study(study_name="counted", storage=open_storage(storage)).get_trials()
    claims = Claims(connect(storage, trials_directory(studies, "counted")), "counted", "a reader")
    assert len(found) == TRIALS and all(trial.state.is_finished() for trial in found)
    assert_accounts(claims.spans(), found)
    claims.close()
