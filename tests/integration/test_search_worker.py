"""The search worker as a process: when it takes no more than idle time, and what it does in any case."""

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import optuna
import pytest
from optuna.trial import TrialState

from ds_hooks.shared.processes.priority import HOLDER_NICE
from ds_hooks.shared.trial_attributes import WORKER
from tests.support.paths import STUDIES
from tests.support.sandbox import children, stat, wait_for
from trials.search import callbacks
from trials.search.client import SearchClient
from trials.search.storage.optuna_storage import open_storage
from trials.search.worker import WorkerConfig
from trials.search.worker_process import serve
from trials.study import load_study

pytestmark = pytest.mark.integration


@pytest.fixture
def main_job(tmp_path: Path) -> Path:
    """There is one if this file is there."""
    return tmp_path / "main job"


@pytest.fixture
def search(tmp_path: Path, main_job: Path) -> Iterator[SearchClient]:
    storage = str(tmp_path / "study.journal")
    sandbox = WorkerConfig(storage=storage, study_name="tiny", worker="w", directory=tmp_path)
    line = SearchClient(partial(serve, load_study(STUDIES / "tiny.py"), sandbox, attached=main_job.exists))
    yield line
    assert line.close()


def test_workers_share_a_grid_and_end_when_it_is_done(tmp_path: Path) -> None:
    study = load_study(STUDIES / "tiny.py")
    study.trials = 40
    study.sampler = lambda: optuna.samplers.GridSampler({"a": [0, 1, 2, 3, 4]})  # type: ignore[method-assign]
    study.suggest = lambda trial: {"a": trial.suggest_int("a", 0, 4)}  # type: ignore[method-assign]
    storage = str(tmp_path / "study.journal")
    configs = [WorkerConfig(storage=storage, study_name="grid", worker=name, directory=tmp_path) for name in "ab"]
    lines = [SearchClient(partial(serve, study, config, attached=lambda: False)) for config in configs]
    for line in lines:
        line.send(ask=4)
    found = [answer(line)[0] for line in lines]
    begun = [trial for each in found for trial in each["trials"]]
    assert sorted(trial["params"]["a"] for trial in begun) == [0, 1, 2, 3, 4]
    for line, each in zip(lines, found, strict=True):
        for trial in each["trials"]:
            line.send(report=trial["number"], epoch=3, value=0.5, final=True, weights=None)
        assert line.close()
    trials = optuna.load_study(study_name="grid", storage=open_storage(storage)).trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 5


def test_a_callback_that_hangs_costs_neither_trials_nor_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "PATIENCE_S", 0.1)  # of the workers that are forked now
    called = tmp_path / "called"

    def hang(study: optuna.Study, trial: Any) -> None:
        called.write_text(str(os.sched_getscheduler(0)))
        threading.Event().wait()

    study = load_study(STUDIES / "tiny.py")
    study.callbacks = lambda: [hang]  # type: ignore[method-assign]
    storage = str(tmp_path / "study.journal")
    lease_s = 0.6
    configs = [
        WorkerConfig(storage=storage, study_name="s", worker=name, directory=tmp_path, lease_s=lease_s) for name in "ab"
    ]
    one, other = [SearchClient(partial(serve, study, config, attached=lambda: True)) for config in configs]
    one.send(ask=2)
    first, second = answer(one)[0]["trials"]
    one.send(report=first["number"], epoch=study.epochs, value=0.5, final=True)
    wait_for(called.exists, "the callback")

    def lives_until() -> float:
        with closing(sqlite3.connect(tmp_path / "claims.db")) as c:
            found: float = c.execute("SELECT expires_s FROM squeezer_worker WHERE worker = 'a'").fetchone()[0]
            return found

    began = lives_until()
    wait_for(lambda: lives_until() > began + 2 * lease_s, "signs of life all the while")
    other.send(ask=99)
    assert second["number"] not in [trial["number"] for trial in answer(other)[0]["trials"]]
    one.send(report=second["number"], epoch=study.epochs, value=0.25, final=True)
    one.send(ask=1)
    assert answer(one)[0]["trials"] == []
    assert one.close() and other.close()
    assert called.read_text() == str(os.SCHED_IDLE)
    trials = optuna.load_study(study_name="s", storage=open_storage(storage)).trials
    assert [trials[each["number"]].state for each in (first, second)] == [TrialState.COMPLETE] * 2


def test_trials_of_a_worker_whose_gate_stays_shut_go_to_one_that_has_none(tmp_path: Path) -> None:
    study = load_study(STUDIES / "tiny.py")
    storage = str(tmp_path / "study.journal")
    shut, opened = (
        SearchClient(
            partial(
                serve,
                study,
                WorkerConfig(storage=storage, study_name="s", worker=name, directory=tmp_path, lease_s=0.3),
                attached=lambda: False,
                busy=busy,
            )
        )
        for name, busy in (("shut", lambda: 7), ("open", time.monotonic_ns))
    )
    shut.send(ask=4)
    assert len(answer(shut)[0]["trials"]) == 4

    def trained() -> bool:
        opened.send(ask=4)
        (found,) = answer(opened)
        for trial in found["trials"]:
            opened.send(report=trial["number"], epoch=study.epochs, value=0.5, final=True)
        return bool(found["over"])

    wait_for(trained, "the end of the study")
    assert opened.close()
    trials = optuna.load_study(study_name="s", storage=open_storage(storage)).trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 6
    assert {trial.user_attrs[WORKER] for trial in trials} == {"open"}
    assert shut.close()


@contextmanager
def on(core: int) -> Iterator[None]:
    """What is forked within it runs only there."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def busy(core: int) -> Iterator[None]:
    """A process of usual priority wants all of a core."""
    with on(core):
        pid = os.fork()
    if pid == 0:
        while True:
            pass
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["{}/study.journal", "sqlite:///{}/study.db"])
def test_one_that_holds_the_lock_for_longer_than_a_lease_on_a_busy_core_keeps_its_trials(
    storage: str, tmp_path: Path
) -> None:
    core, other_core, *_ = os.sched_getaffinity(0)
    lease_s = 5.0
    study, storage = load_study(STUDIES / "tiny.py"), storage.format(tmp_path)
    study.sampler = lambda: optuna.samplers.GridSampler({"a": [*range(20)]})  # type: ignore[method-assign]
    study.trials = 20

    def suggest(trial: optuna.Trial) -> dict[str, Any]:
        """Under the lock of all workers, since the sampler has finitely many points."""
        end_s = time.monotonic() + (2 * lease_s if trial.number == 1 else 0.0)
        while time.monotonic() < end_s:
            pass
        return {"a": trial.suggest_int("a", 0, 19)}

    study.suggest = suggest  # type: ignore[method-assign]

    def hire(name: str, *, attached: bool) -> SearchClient:
        config = WorkerConfig(storage=storage, study_name="s", worker=name, directory=tmp_path, lease_s=lease_s)
        return SearchClient(partial(serve, study, config, attached=lambda: attached))

    with on(core):
        one = hire("a", attached=True)
    one.send(ask=1)
    (first,) = answer(one)[0]["trials"]
    with on(other_core):
        other = hire("b", attached=False)
    other.send(ask=0)
    answer(other)
    with busy(core):
        one.send(ask=1)
        time.sleep(lease_s)
        other.send(ask=99)  # which waits for the lock, and looks for trials of the dead at last
        (second,) = answer(one)[0]["trials"]
        found = answer(other)[0]["trials"]
    assert {trial["number"] for trial in found}.isdisjoint({first["number"], second["number"]})
    for line, trials in ((one, [first, second]), (other, found)):
        for trial in trials:
            line.send(report=trial["number"], epoch=study.epochs, value=0.5, final=True)
        assert line.close()
    ended = optuna.load_study(study_name="s", storage=open_storage(storage)).trials
    assert [trial.state for trial in ended] == [TrialState.COMPLETE] * 20
    assert {trial.number for trial in ended if trial.user_attrs[WORKER] == "a"} == {0, 1}


def threads(pid: int) -> dict[int, int]:
    """Each thread's scheduling class."""
    return {thread: os.sched_getscheduler(thread) for thread in map(int, os.listdir(f"/proc/{pid}/task"))}


def answer(search: SearchClient) -> list[dict[str, Any]]:
    return list(wait_for(lambda: search.answers(wait_s=1), "an answer"))


def test_until_a_main_job_is_there_it_does_not_wait_for_idle_time(search: SearchClient, main_job: Path) -> None:
    search.send(ask=4)
    (first,) = answer(search)
    asked = [{"number": number, "params": {"lr": 0.0 if number % 2 else 0.1}} for number in range(4)]
    assert first["trials"] == asked and not first["exhausted"]
    (pid,) = children(os.getpid())
    assert set(threads(pid).values()) == {os.SCHED_OTHER, os.SCHED_BATCH}
    main_job.touch()
    search.send(ask=4)
    (last,) = answer(search)
    assert [trial["number"] for trial in last["trials"]] == [4, 5] and last["exhausted"]
    found = threads(pid)
    assert found[pid] == os.SCHED_IDLE and set(found.values()) == {os.SCHED_BATCH, os.SCHED_IDLE}
    (alive,) = (thread for thread, scheduling in found.items() if scheduling == os.SCHED_BATCH)
    least = min(os.getpriority(os.PRIO_PROCESS, 0) + HOLDER_NICE, 19)
    assert os.getpriority(os.PRIO_PROCESS, alive) == least, "the thread that gives signs of life"


@pytest.mark.parametrize("storage", ["{}/study.journal", "sqlite:///{}/study.db"])
def test_search_workers_that_begin_at_once_make_one_study_and_no_trial_twice(tmp_path: Path, storage: str) -> None:
    study, storage = load_study(STUDIES / "tiny.py"), storage.format(tmp_path)
    lines = []
    for worker in "abcd":
        sandbox = WorkerConfig(storage=storage, study_name="tiny", worker=worker, directory=tmp_path)
        lines.append(SearchClient(partial(serve, study, sandbox, attached=lambda: False)))
    for line in lines:
        line.send(ask=1)
    found = [answer(line)[0]["trials"] for line in lines]
    assert sorted(asked[0]["number"] for asked in found) == [0, 1, 2, 3]
    assert all(line.close() for line in lines)


@pytest.mark.parametrize(
    ("urgent_after_s", "takes_s", "closed"), [(None, 0.5, True), (0.0, 30, False), (0.4, 30, False)]
)
def test_a_search_worker_has_all_the_time_that_it_needs_until_it_is_urgent(
    urgent_after_s: float | None, takes_s: float, closed: bool
) -> None:
    def slowly(requests: TextIO, answers: TextIO) -> int:
        assert requests.readline() == '{"stop": true}\n'
        time.sleep(takes_s)
        return 0

    line, start_s = SearchClient(slowly), time.monotonic()

    def is_urgent() -> bool:
        return urgent_after_s is not None and time.monotonic() > start_s + urgent_after_s

    assert line.close(timeout_s=0.1, is_urgent=is_urgent) is closed
    assert children(os.getpid()) == []


def test_its_end_is_collected_only_after_its_threads_have_had_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the kernel spins in `wait`, beside a main job for as long as that runs."""
    states: list[str] = []
    line = SearchClient(lambda requests, answers: 0)
    monkeypatch.setattr("trials.search.client.time.sleep", lambda seconds: states.extend(stat(line.pid)[:1]))
    line.close(is_urgent=lambda: False, beside_main=True)
    assert states == ["Z"] and children(os.getpid()) == []
