"""Workers in the bubbles of two ranks and one with a device of its own share a study while each of them is killed."""

import os
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.study_paths import journal_path, trials_directory
from squeezer.records.layout import study_directory
from tests.support.accounts import assert_accounts
from tests.support.paths import STUDIES
from tests.support.sandbox import Child, Sandbox, wait_for
from trials.run import INTERRUPTED_STATUS
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect

pytestmark = pytest.mark.integration

RANKS = (0, 1)


class Trained(NamedTuple):
    """An epoch that a process has trained."""

    trial: int
    epoch: int
    pid: int
    worker: str


def read(counted: Path) -> list[Trained]:
    """All epochs so far, in order."""
    lines = [*dict.fromkeys(counted.read_text().splitlines())] if counted.exists() else []
    parts = [line.split() for line in lines]
    return [Trained(int(trial), int(epoch), int(pid), worker) for trial, epoch, pid, _, worker in parts]


@pytest.mark.slow
@pytest.mark.parametrize("search", ["", "asha"])
def test_nothing_is_lost_but_what_was_not_saved_whoever_is_killed(search: str, sandbox: Sandbox, hold: Path) -> None:
    counted, studies = sandbox.files / "counted", study_directory(sandbox.run)
    environment = {"COUNTED": str(counted), "COUNTED_SEARCH": search, "TINY_HOLD": str(hold), "OMP_NUM_THREADS": "1"}
    config = sandbox.config("counted.py", max_restarts=3, priority="nice")
    command = ["-m", "trials", "run", str(STUDIES / "counted.py"), "--directory", str(studies)]

    def own() -> Child:
        started: Child = sandbox.start(Child, *command, **environment)
        return started

    def of(worker: str, but: set[int]) -> int:
        """Another process of the worker's, once it has trained three epochs."""
        pids = [each.pid for each in read(counted) if each.worker == worker and each.pid not in but]
        return next((pid for pid in pids if pids.count(pid) >= 3), 0)

    daemons = [sandbox.daemon(config, rank, **environment) for rank in RANKS]
    jobs = [sandbox.job("--local-rank", str(rank)) for rank in RANKS]
    exclusive = own()
    killed, ended = set[int](), set[int]()

    killed.add(wait_for(lambda: of("rank0", killed), "work in the bubbles of rank 0"))
    os.kill(sandbox.word(Field.SIDE_PID, 0), signal.SIGKILL)
    killed.add(wait_for(lambda: of("run0", killed), "work on the device of its own"))
    assert exclusive.kill(signal.SIGKILL) == -signal.SIGKILL
    exclusive = own()
    killed.add(wait_for(lambda: of("rank1", killed), "work in the bubbles of rank 1"))
    assert daemons[1].kill(signal.SIGKILL) == -signal.SIGKILL
    daemons[1] = sandbox.daemon(config, 1, **environment)
    ended.add(wait_for(lambda: of("run0", killed), "work on the device of its own again"))
    assert exclusive.kill(signal.SIGINT) == INTERRUPTED_STATUS
    exclusive = own()
    for worker in ("rank0", "rank1", "run0"):
        wait_for(lambda worker=worker: of(worker, killed | ended), f"work of {worker} after that")

    hold.unlink()
    assert exclusive.ended() == 0, exclusive.said()
    wait_for(lambda: all(sandbox.side("finished", rank) for rank in RANKS), "the end of the study")
    assert [job.finish() for job in jobs] == [0, 0]
    assert [daemon.kill(signal.SIGTERM) for daemon in daemons] == [0, 0]
    trained = read(counted)
    assert_nothing_lost(sandbox, trained, killed, ended)


def assert_nothing_lost(sandbox: Sandbox, trained: list[Trained], killed: set[int], ended: set[int]) -> None:
    """What the processes have trained is what the accounts say, but for the last words of those that were ended."""
    studies, trials = study_directory(sandbox.run), sandbox.trials("counted")
    claims = Claims(connect(str(journal_path(studies)), trials_directory(studies, "counted")), "counted", "a reader")
    spans = claims.spans()
    claims.close()
    assert len(trials) >= 9 and all(trial.state.is_finished() for trial in trials)
    assert not [trial.number for trial in trials if trial.value is None], "each was scored"
    assert_accounts(spans, trials)
    for trial in trials:
        epochs = max(trial.intermediate_values)
        ours = [each for each in trained if each.trial == trial.number]
        highest = 0
        for each in ours:
            assert each.epoch <= highest + 1, f"trial {trial.number}: nobody has trained epoch {highest + 1}"
            highest = max(highest, each.epoch)
        assert highest >= epochs
        lost = sum(span.to_epoch - span.from_epoch for span in spans if span.trial == trial.number and not span.kept)
        untold, pids = len(ours) - epochs - lost, {each.pid for each in ours}
        last_words = len(pids & ended)
        assert untold >= 0, f"trial {trial.number}: more was counted than was trained"
        assert untold <= last_words or pids & killed, f"trial {trial.number}: {untold} epochs are in no account"
