"""Real workers share a study while they are killed at random, and every trial scores as it would alone."""

import os
import random
import signal
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from ds_hooks.shared.secrets import STORAGE_VARIABLE
from tests.support.fused_and_solo import Solo, close
from tests.support.real_worker import STUDY_NAME, Small
from tests.support.sandbox import Child, Sandbox, is_alive
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage

pytestmark = pytest.mark.integration

WORKERS = 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trials", "period_s", "epoch_s", "most_deaths"),
    # a busy machine may take longer to start a worker than until the next dies, and never end
    [(16, 3.0, 0.1, 2), (200, 15.0, 0.5, 100)],
)
def test_each_trial_ends_once_as_it_would_alone_though_workers_are_killed(
    trials: int, period_s: float, epoch_s: float, most_deaths: int, database: str, sandbox: Sandbox, tmp_path: Path
) -> None:
    directory = tmp_path / "study"
    begun = 0

    def hire() -> Child:
        nonlocal begun
        begun += 1
        options = ["--worker", f"w{begun}", "--directory", str(directory), "--trials", str(trials), "--lease", "5"]
        command = ["-m", "tests.support.real_worker", *options, "--epoch", str(epoch_s)]
        worker: Child = sandbox.start(Child, *command, **{STORAGE_VARIABLE: database, "OMP_NUM_THREADS": "1"})
        return worker

    workers = [hire() for _ in range(WORKERS)]
    kill_s, deaths = time.monotonic() + 2 * period_s, 0
    while any(is_alive(worker.pid) for worker in workers):
        time.sleep(0.05)
        living = [worker for worker in workers if is_alive(worker.pid)]
        if time.monotonic() > kill_s and len(living) == WORKERS and deaths < most_deaths:
            random.choice(living).kill(signal.SIGKILL)
            deaths, kill_s = deaths + 1, time.monotonic() + random.uniform(0.5, 1.5) * period_s
            workers.append(hire())
    assert deaths, "it was over before anyone was killed"
    assert sum(worker.ended() == -signal.SIGKILL for worker in workers) == deaths, [w.said() for w in workers]
    assert sum(worker.ended() == 0 for worker in workers) == WORKERS, [w.said() for w in workers]
    study = Small(trials)
    found = optuna.load_study(study_name=STUDY_NAME, storage=open_storage(database)).get_trials()
    assert [trial.number for trial in found] == list(range(trials))
    spans = Claims(connect(database, directory), STUDY_NAME, "a reader").spans()
    for trial in found:
        assert trial.state is TrialState.COMPLETE
        kept = sorted(
            epoch
            for span in spans
            if span.trial == trial.number and span.kept
            for epoch in range(span.from_epoch, span.to_epoch)
        )
        assert kept == list(range(study.epochs))
        solo = Solo(study, trial.number, {"lr": trial.params["lr"], "n": trial.number})
        for epoch in range(study.epochs):
            for inputs, targets in study.batches(epoch):
                solo.step(inputs, targets)
            if epoch + 1 in study.rungs:
                close(trial.intermediate_values[epoch + 1], solo.score(), f"trial {trial.number}, epoch {epoch + 1}")
        close(trial.value, solo.score(), f"trial {trial.number}")
    print(f"{deaths} deaths; lost {sum(s.to_epoch - s.from_epoch for s in spans if not s.kept)} epochs")
    assert not os.listdir(directory / "checkpoints"), "of trials that have ended"
