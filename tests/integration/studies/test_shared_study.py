"""Search workers share a study, and whatever befalls them or PostgreSQL, no trial is lost or done twice."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import DBAPIError

from benchmarks.shared import postgres as postgresql
from benchmarks.shared.postgres import Server
from ds_hooks.shared.trial_attributes import REASON
from tests.support.fused_and_solo import AtOnce
from tests.support.proxy import proxied
from tests.support.sandbox import wait_for
from tests.support.side_task_runs import Direct
from tests.support.simulated import EPOCHS, Pretended, Process, Trainer, assert_ended, run_until_over, total
from tests.support.slow_cases import others_slow
from trials.search.storage.claims import MOST_DEATHS, Claim, Claims, Sign, Span
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage
from trials.search.worker import SearchWorker, WorkerConfig

pytestmark = pytest.mark.integration

NAME = "s"
TRIALS = 4
KINDS = "journal", "sqlite", "postgresql"


def train_alone(storage: str, directory: Path) -> Trainer:
    """Train a study in this process to its end."""
    study = Pretended(TRIALS)
    config = WorkerConfig(storage=storage, study_name=NAME, worker="w", directory=directory)
    worker = SearchWorker(study, config, AtOnce())
    trainer = Trainer(study, Direct(worker), directory)
    while not trainer.is_over:
        trainer.turn()
    worker.stop()
    return trainer


def outcome(storage: str, directory: Path) -> tuple[list[FrozenTrial], list[Span]]:
    """A study's trials and accounts."""
    claims = Claims(connect(storage, directory), NAME, "a reader")
    found = open_storage(storage)
    try:
        return optuna.load_study(study_name=NAME, storage=found).get_trials(), claims.spans()
    finally:
        claims.close()
        if isinstance(found, RDBStorage):
            found.engine.dispose()


def cut_one_commit(postgres: Server, directory: Path, at: int, is_done: bool) -> int:
    """Train a study with one connection cut. Returns how many commits there were."""
    with postgres.database() as name, proxied(postgres.port, at, is_done=is_done) as proxy:
        trainer = train_alone(postgres.url(name, proxy.port), directory)
        trials, spans = outcome(postgres.url(name), directory)
        assert TRIALS <= len(trials) <= TRIALS + 1, "Optuna itself may create one twice"
        assert_ended(trials, spans)
        assert total(spans, kept=True) == sum(trainer.trained.values()) and total(spans, kept=False) == 0
        return proxy.commits


@pytest.mark.parametrize("is_done", [False, True])
def test_a_commit_whose_answer_is_cut_off_is_neither_lost_nor_done_twice(
    is_done: bool, postgres: Server, tmp_path: Path
) -> None:
    for at in (4, 58) if is_done else (27, 80):
        assert cut_one_commit(postgres, tmp_path / str(at), at, is_done) >= at


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True])
def test_the_same_for_every_commit_of_a_study(is_done: bool, postgres: Server, tmp_path: Path) -> None:
    at, commits = 1, 1
    while at <= commits:
        commits = cut_one_commit(postgres, tmp_path / str(at), at, is_done)
        at += 1
    assert at > 90


def hirer(storage: str, directory: Path, study: Pretended, lease_s: float) -> Callable[[], Process]:
    """Each call begins a worker of a name of its own."""
    names = iter("abcdefghijklmnopqrstuvwxyz" * 10)
    count = iter(range(1000))

    def hire() -> Process:
        name = f"{next(names)}{next(count)}"
        config = WorkerConfig(storage=storage, study_name=NAME, worker=name, directory=directory, lease_s=lease_s)
        return Process(study, config)

    return hire


@pytest.mark.slow
def test_eight_workers_that_begin_at_once_on_an_empty_database_make_one_study(database: str, tmp_path: Path) -> None:
    study = Pretended(20)
    hire = hirer(database, tmp_path, study, lease_s=60)
    everyone = run_until_over([hire() for _ in range(8)], hire, lambda: False)
    trials, spans = outcome(database, tmp_path)
    assert [trial.number for trial in trials] == list(range(20))
    assert_ended(trials, spans)
    assert total(spans, kept=True) == sum(sum(worker.trained.values()) for worker in everyone)


def every(period_s: float, times: int) -> Callable[[], bool]:
    """True so many times, once in a period."""
    due_s = [time.monotonic() + period_s * (1 + index) for index in range(times)]

    def is_due() -> bool:
        return bool(due_s) and time.monotonic() >= due_s[0] and due_s.pop(0) > 0

    return is_due


# of the others' writes `test_crash_points.py` looks at each
@pytest.mark.parametrize("storage_kind", others_slow(KINDS, ["postgresql"]), indirect=True)
@pytest.mark.parametrize(
    ("trials", "lease_s", "period_s", "times"), [(24, 2, 0.3, 3), pytest.param(200, 5, 2.0, 20, marks=pytest.mark.slow)]
)
def test_workers_die_in_the_middle_and_each_trial_ends_once(
    trials: int, lease_s: float, period_s: float, times: int, storage: str, tmp_path: Path
) -> None:
    study = Pretended(trials)
    hire = hirer(storage, tmp_path, study, lease_s=lease_s)
    everyone = run_until_over([hire() for _ in range(4)], hire, every(period_s, times))
    found, spans = outcome(storage, tmp_path)
    deaths = len(everyone) - 4
    assert deaths >= 2 and len(found) == trials
    given_up = [trial for trial in found if trial.state is TrialState.FAIL]  # where luck has hit three times
    assert all("workers died in it" in trial.user_attrs[REASON] for trial in given_up), given_up
    assert MOST_DEATHS * len(given_up) <= deaths * study.rows
    assert_ended([trial for trial in found if trial not in given_up], spans)
    trained = sum(sum(worker.trained.values()) for worker in everyone)
    accounted = total(spans, kept=True) + total(spans, kept=False)
    # a worker that dies has not yet told what it trained since its last sign of life
    assert accounted <= trained <= accounted + deaths * study.rows * study.epochs


@pytest.mark.parametrize("restarts", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_server_that_crashes_again_and_again_loses_nothing(restarts: int, tmp_path: Path) -> None:
    if (missing := postgresql.missing()) is not None:
        pytest.skip(missing)
    study = Pretended(12 * restarts)
    with postgresql.running() as server, server.database() as name:  # its writes are synced: they must survive
        hire, is_due = hirer(server.url(name), tmp_path, study, lease_s=10), every(0.6, restarts)

        def crash() -> bool:
            if is_due():
                server.crash()
                server.start()
            return False

        everyone = run_until_over([hire() for _ in range(3)], hire, crash)
        trials, spans = outcome(server.url(name), tmp_path)
    assert study.trials <= len(trials) <= study.trials + restarts, "Optuna itself may create one twice"
    assert_ended(trials, spans)
    assert total(spans, kept=True) == sum(sum(worker.trained.values()) for worker in everyone), "nobody died"


@pytest.mark.parametrize("storage_kind", others_slow(KINDS, ["journal", "postgresql"]), indirect=True)
def test_a_worker_that_falls_silent_and_comes_back_writes_nothing_of_what_is_anothers_by_then(
    storage: str, tmp_path: Path
) -> None:
    study = Pretended(6, fused=3)
    hire = hirer(storage, tmp_path, study, lease_s=2)
    silent, other = hire(), hire()
    silent.turn()
    wait_for(lambda: silent.turn(0.1) or silent.trained, "a trial of the first worker's")
    silent.client.send(ask=0)  # on one host, a worker that is stopped in mid-write would hold the others up
    wait_for(lambda: any("trials" in answer for answer in silent.client.answers(0.1)), "that it has written all")
    os.kill(silent.client.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: other.turn(0.1) or other.is_over, "the end of the study without the first worker")
    finally:
        os.kill(silent.client.pid, signal.SIGCONT)
    ended, spans = outcome(storage, tmp_path)
    assert_ended(ended, spans)
    for number in tuple(silent._trials):
        silent.search.send(report=number, epoch=EPOCHS, value=9.0, final=True)
    wait_for(lambda: silent.turn(0.1) or silent.is_over, "that the first worker hears of it")
    assert silent.client.close() and other.client.close()
    assert outcome(storage, tmp_path) == (ended, spans)


def test_a_worker_that_falls_silent_under_the_lock_holds_nobody_up_for_ever(database: str, tmp_path: Path) -> None:
    one, other = (Claims(connect(database, tmp_path), NAME, name, lease_s=2) for name in "ab")
    for claims in (one, other):
        claims.renew(Sign({}))
    with pytest.raises(DBAPIError, match="idle-in-transaction timeout"), one.alone() as held:
        mine = held.claim(0)
        with other.alone() as second:  # waits until the server ends the first one's transaction
            assert second.claim(0) == mine
        held.others()
    with other.owned(Claim(0, fence=1, epoch=0, deaths=0)) as owned:
        assert owned is not None
    for claims in (one, other):
        claims.close()


@pytest.mark.parametrize("hours", others_slow([-1, 1], [1]))
def test_the_clock_of_a_worker_does_not_matter(
    hours: int, storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Claims(connect(storage, tmp_path), NAME, "right", lease_s=60)
    right.renew(Sign({}))
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + 3600 * hours)
    wrong = Claims(connect(storage, tmp_path), NAME, "wrong", lease_s=60)
    wrong.renew(Sign({}))
    for claims, number in ((right, 0), (wrong, 1)):
        with claims.alone() as held:
            held.claim(number)
    for claims in (right, wrong):
        with claims.alone() as held:
            assert held.release_expired() == []
        claims.close()
