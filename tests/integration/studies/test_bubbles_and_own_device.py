"""A worker in bubbles and one with a device of its own share a study."""

import signal
from collections import Counter
from pathlib import Path

import pytest

from ds_hooks.shared.study_files import journal_path, trials_directory
from squeezer.records.layout import study_directory
from tests.support.accounts import assert_accounts
from tests.support.paths import STUDIES
from tests.support.sandbox import Child, Sandbox, wait_for
from trials.search.attributes import WORKER
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect

pytestmark = pytest.mark.integration


def test_trials_run_takes_what_bubbles_have_not_begun(sandbox: Sandbox, hold: Path) -> None:
    daemon = sandbox.daemon(sandbox.config("many.py"), TINY_HOLD=str(hold))
    job = sandbox.job()
    wait_for(lambda: sandbox.events("progress"), "an epoch in bubbles")
    studies = study_directory(sandbox.run)
    command = ["-m", "trials", "run", str(STUDIES / "many.py"), "--directory", str(studies)]
    own: Child = sandbox.start(Child, *command, OMP_NUM_THREADS="1")
    wait_for(lambda: sum(trial.state.is_finished() for trial in sandbox.trials("many")) >= 12, "the end of the others")
    hold.unlink()
    assert own.ended() == 0, own.said()
    wait_for(lambda: sandbox.side("finished"), "the end of the study")
    assert job.finish() == 0
    assert daemon.kill(signal.SIGTERM) == 0
    trials = sandbox.trials("many")
    assert len(trials) == 24 and all(trial.state.is_finished() for trial in trials)
    assert " 0 failed; best score " in own.said()
    workers = Counter(trial.user_attrs[WORKER].rpartition(":")[2] for trial in trials)
    assert workers.keys() == {"rank0", "run0"} and workers["rank0"] >= 3 and workers["run0"] >= 12
    claims = Claims(connect(str(journal_path(studies)), trials_directory(studies, "many")), "many", "a reader")
    assert_accounts(claims.spans(), trials)
    claims.close()
