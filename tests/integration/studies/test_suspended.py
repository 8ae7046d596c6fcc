"""A worker that its terminal suspends (Ctrl-Z) gives no sign of life, and comes back to trials that are others'."""

import os
import signal
from pathlib import Path

import optuna
import pytest

from ds_hooks.shared.secrets import STORAGE_VARIABLE
from tests.support.accounts import assert_accounts
from tests.support.real_worker import STUDY_NAME
from tests.support.sandbox import Child, Sandbox, wait_for
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage

pytestmark = pytest.mark.integration

TRIALS = 4
"""As many as one worker trains at once, so another has nothing to do."""


# what others take over of a worker that falls silent, `test_shared_study.py` shows in less time
@pytest.mark.slow
def test_others_take_its_trials_over_and_it_leaves_them_alone(storage: str, sandbox: Sandbox, tmp_path: Path) -> None:
    directory = tmp_path / "study"

    def hire(name: str, epoch_s: float) -> Child:
        options = ["--worker", name, "--directory", str(directory), "--trials", str(TRIALS), "--lease", "2"]
        command = ["-m", "tests.support.real_worker", *options, "--epoch", str(epoch_s)]
        worker: Child = sandbox.start(Child, *command, **{STORAGE_VARIABLE: storage, "OMP_NUM_THREADS": "1"})
        return worker

    def has_saved() -> bool:
        return len({file.parent for file in directory.glob("checkpoints/*/*-*.pt")}) == TRIALS

    suspended = hire("suspended", epoch_s=0.4)
    wait_for(has_saved, "trials under way")
    os.killpg(suspended.pid, signal.SIGTSTP)
    wait_for(lambda: "(stopped)" in Path(f"/proc/{suspended.pid}/status").read_text(), "that it has stopped")
    try:
        other = hire("other", epoch_s=0.0)
        assert other.ended() == 0, other.said()
        ended = optuna.load_study(study_name=STUDY_NAME, storage=open_storage(storage)).get_trials()
        assert [trial.state.name for trial in ended] == ["COMPLETE"] * TRIALS
        best = {file.name: file.read_bytes() for file in (directory / "best").iterdir()}
    finally:
        os.killpg(suspended.pid, signal.SIGCONT)
    assert suspended.ended() == 0, suspended.said()
    assert "this one gave no sign of life for too long" in suspended.said()
    assert optuna.load_study(study_name=STUDY_NAME, storage=open_storage(storage)).get_trials() == ended
    assert {file.name: file.read_bytes() for file in (directory / "best").iterdir()} == best
    claims = Claims(connect(storage, directory), STUDY_NAME, "a reader")
    assert_accounts(claims.spans(), ended)
    claims.close()
    assert not list(directory.glob("checkpoints/*/*")), "of trials that have ended"
