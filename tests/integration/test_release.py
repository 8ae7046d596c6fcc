"""launch/release.py: at a job's end its trials are released, and nobody who holds a storage's lock keeps it up."""

import fcntl
import os
from pathlib import Path
from threading import Timer

import optuna
import pytest

from ds_hooks.shared.secrets import STORAGE_VARIABLE
from ds_hooks.shared.trial_attributes import WORKER
from launch import release
from squeezer.config import load_config
from tests.support.paths import STUDIES
from trials.search.storage.optuna_storage import open_storage

pytestmark = pytest.mark.integration
HELD_S = 60.0
"""Far longer than a release takes, or may take here."""


def test_a_job_that_has_ended_does_not_wait_for_a_lock_that_another_worker_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "RELEASES_WITHIN_S", 5.0)
    run = tmp_path / "run"
    (tmp_path / "s.toml").write_text(f'[side]\nstudy = "{STUDIES / "tiny.py"}"\n[run]\ndirectory = "{run}"\n')
    config = load_config(str(tmp_path / "s.toml"))
    storage = config.storage(run)
    monkeypatch.setenv(STORAGE_VARIABLE, storage)
    Path(storage).parent.mkdir(parents=True)
    study = optuna.create_study(study_name="tiny", storage=open_storage(storage))
    study.ask().set_user_attr(WORKER, "one that was killed before it noted its claim")
    held = os.open(storage, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    lets_go = Timer(HELD_S, os.close, [held])
    lets_go.start()
    with pytest.raises(RuntimeError, match="trials of tiny wait until their workers' leases end"):
        release.release_trials(run, config)
    lets_go.cancel()
    os.close(held)
    monkeypatch.setattr(release, "RELEASES_WITHIN_S", HELD_S)
    release.release_trials(run, config)
    (trial,) = study.get_trials()
    assert trial.state == optuna.trial.TrialState.WAITING
