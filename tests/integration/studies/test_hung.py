"""A worker on a device of its own hangs in the study's code: its trials are not held for ever."""

from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from ds_hooks.shared.study_paths import journal_path, trials_directory
from tests.support.accounts import assert_accounts
from tests.support.paths import STUDIES
from tests.support.sandbox import Child, Sandbox, wait_for
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_another_that_has_none_left_gets_its_trials(sandbox: Sandbox, tmp_path: Path) -> None:
    studies, hangs = tmp_path / "studies", tmp_path / "hangs"
    hangs.touch()
    command = ["-m", "trials", "run", str(STUDIES / "hangs.py"), "--directory", str(studies)]

    def begun() -> list[TrialState]:
        storage = open_storage(str(journal_path(studies)))
        names = optuna.get_all_study_names(storage)
        return (
            [trial.state for trial in optuna.load_study(study_name=names[0], storage=storage).trials] if names else []
        )

    hung: Child = sandbox.start(Child, *command, OMP_NUM_THREADS="1", HANGS=str(hangs))
    wait_for(lambda: journal_path(studies).exists() and len(begun()) >= 3, "trials of the one that hangs")
    other: Child = sandbox.start(Child, *command, OMP_NUM_THREADS="1")
    assert other.ended() == 0, other.said()
    assert "come from a worker that has trained nothing for long" in other.said()
    trials = optuna.load_study(study_name="hangs", storage=open_storage(str(journal_path(studies)))).trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETE, TrialState.PRUNED] * 3
    hangs.unlink()
    assert hung.ended() == 0, hung.said()
    assert "is another worker's" in hung.said()
    assert optuna.load_study(study_name="hangs", storage=open_storage(str(journal_path(studies)))).trials == trials
    claims = Claims(connect(str(journal_path(studies)), trials_directory(studies, "hangs")), "hangs", "a reader")
    assert_accounts(claims.spans(), trials)
    claims.close()
