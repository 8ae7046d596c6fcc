"""When a target may begin before the search has ended."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState, create_trial

from ds_hooks.shared.trial_attributes import MILESTONE
from tests.support.paths import ROOT
from trials import load_study
from trials.search.optuna_study import NoStudyError
from trials.search.storage.optuna_storage import open_storage
from trials.transfer import spent, wait_for_half


def test_it_waits_for_half_of_the_trials_and_for_one_that_has_completed(tmp_path: Path) -> None:
    study, storage = load_study(ROOT / "tests" / "support" / "studies" / "narrow.py"), str(tmp_path / "study.journal")
    known = optuna.create_study(storage=open_storage(storage), study_name="narrow")

    def add(state: TrialState, value: float | None = None, **more: Any) -> None:
        known.add_trial(create_trial(state=state, value=value, **more))

    add(TrialState.PRUNED)
    add(TrialState.RUNNING)
    add(TrialState.WAITING)
    assert spent(known) == 1
    add(TrialState.WAITING, user_attrs={MILESTONE: 1}, intermediate_values={1: 0.5})  # waits for its promotion
    add(TrialState.FAIL)
    assert spent(known) == 3
    heard: Queue[str] = Queue()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_half, study, storage, "narrow", heard.put)
        said = heard.get(timeout=30)
        assert said == "3 of the 6 trials of study narrow have ended; the target begins after 3, one of them completed"
        assert not waiting.done()
        add(TrialState.COMPLETE, 0.5)
        waiting.result(timeout=30)
    assert heard.empty()
    wait_for_half(study, storage, "narrow", heard.put)
    assert heard.empty()


def test_there_must_be_a_study(tmp_path: Path) -> None:
    study = load_study(ROOT / "tests" / "support" / "studies" / "narrow.py")
    with pytest.raises(NoStudyError, match="there is no study narrow; found: none"):
        wait_for_half(study, str(tmp_path / "study.journal"), "narrow", print)
