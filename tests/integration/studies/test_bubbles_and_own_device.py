"""Workers in the bubbles of two ranks and one with a device of its own share a study."""

import signal
from collections import Counter
from pathlib import Path

import pytest
from optuna.trial import FrozenTrial

from ds_hooks.shared.study_paths import journal_path, trials_directory
from ds_hooks.shared.trial_attributes import WORKER
from squeezer.records.layout import study_directory
from tests.support.accounts import assert_accounts
from tests.support.paths import STUDIES
from tests.support.sandbox import Child, Sandbox, wait_for
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect

pytestmark = pytest.mark.integration

RANKS = (0, 1)


@pytest.mark.slow
def test_trials_run_takes_what_bubbles_have_not_begun(sandbox: Sandbox, hold: Path) -> None:
    config = sandbox.config("many.py")
    daemons = [sandbox.daemon(config, rank, TINY_HOLD=str(hold)) for rank in RANKS]
    jobs = [sandbox.job("--local-rank", str(rank)) for rank in RANKS]
    wait_for(lambda: all(sandbox.events("progress", rank) for rank in RANKS), "an epoch in the bubbles of each")
    studies = study_directory(sandbox.run)
    command = ["-m", "trials", "run", str(STUDIES / "many.py"), "--directory", str(studies)]
    own: Child = sandbox.start(Child, *command, OMP_NUM_THREADS="1")
    wait_for(lambda: sum(trial.state.is_finished() for trial in sandbox.trials("many")) >= 9, "the end of the others")
    hold.unlink()
    assert own.ended() == 0, own.said()
    wait_for(lambda: all(sandbox.side("finished", rank) for rank in RANKS), "the end of the study")
    assert [job.finish() for job in jobs] == [0, 0]
    assert [daemon.kill(signal.SIGTERM) for daemon in daemons] == [0, 0]
    trials = sandbox.trials("many")
    assert len(trials) == 24 and all(trial.state.is_finished() for trial in trials)
    assert " 0 failed; best score " in own.said()
    workers = Counter(trial.user_attrs[WORKER].rpartition(":")[2] for trial in trials)
    assert workers.keys() == {"rank0", "rank1", "run0"}
    assert workers["rank0"] >= 3 and workers["rank1"] >= 3 and workers["run0"] >= 9
    assert_accounts_of("many", studies, trials)


@pytest.mark.slow
def test_trials_run_gets_those_of_a_standing_daemon_whose_job_has_ended(sandbox: Sandbox, hold: Path) -> None:
    daemon = sandbox.daemon(sandbox.config("impatient.py"), TINY_HOLD=str(hold))
    job = sandbox.job()
    wait_for(lambda: sandbox.events("progress"), "an epoch in bubbles")
    assert job.finish() == 0
    hold.unlink()
    studies = study_directory(sandbox.run)
    command = ["-m", "trials", "run", str(STUDIES / "impatient.py"), "--directory", str(studies)]
    own: Child = sandbox.start(Child, *command, OMP_NUM_THREADS="1")
    assert own.ended() == 0, own.said()
    trials = sandbox.trials("impatient")
    assert len(trials) == 12 and all(trial.state.is_finished() for trial in trials)
    assert {trial.user_attrs[WORKER].rpartition(":")[2] for trial in trials} == {"run0"}
    assert daemon.kill(signal.SIGTERM) == 0
    assert_accounts_of("impatient", studies, trials)


def assert_accounts_of(study: str, studies: Path, trials: list[FrozenTrial]) -> None:
    claims = Claims(connect(str(journal_path(studies)), trials_directory(studies, study)), study, "a reader")
    assert_accounts(claims.spans(), trials)
    claims.close()
