"""Workers in bubbles leave promoted trials to one with a device of its own, and get the new ones."""

import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from squeezer.records.layout import study_directory
from tests.support.paths import STUDIES
from tests.support.sandbox import Child, Sandbox, wait_for
from trials.run import INTERRUPTED_STATUS

pytestmark = [pytest.mark.integration, pytest.mark.slow]

FIRST_RUNG = 2
"""Of `counted.py`."""


class Trained(NamedTuple):
    """An epoch, and who has trained it."""

    trial: int
    epoch: int
    worker: str


def read(counted: Path) -> list[Trained]:
    lines = [line.split() for line in counted.read_text().splitlines()] if counted.exists() else []
    return [Trained(int(trial), int(epoch), worker) for trial, epoch, _, _, worker in lines]


def test_the_exclusive_worker_trains_them(sandbox: Sandbox, hold: Path) -> None:
    counted = sandbox.files / "counted"
    environment = {"COUNTED": str(counted), "COUNTED_SEARCH": "asha", "TINY_HOLD": str(hold), "OMP_NUM_THREADS": "1"}
    studies = study_directory(sandbox.run)
    command = ["-m", "trials", "run", str(STUDIES / "counted.py"), "--directory", str(studies)]

    def trained(worker: str, *, promoted: bool) -> int:
        """How many epochs, before or after the first rung."""
        return sum(each.worker == worker and (each.epoch > FIRST_RUNG) is promoted for each in read(counted))

    own: Child = sandbox.start(Child, *command, **environment)
    wait_for(lambda: trained("run0", promoted=False), "the exclusive worker")
    daemon = sandbox.daemon(sandbox.config("counted.py", priority="nice"), 0, **environment)
    job = sandbox.job()
    wait_for(lambda: trained("rank0", promoted=False) >= 12, "new trials in bubbles")
    before = trained("run0", promoted=True)
    wait_for(lambda: trained("run0", promoted=True) >= before + 12, "promoted trials on the device of its own")
    wait_for(lambda: trained("rank0", promoted=False) >= 24, "more new trials in bubbles")
    in_bubbles = trained("rank0", promoted=True)
    assert 4 * in_bubbles < trained("rank0", promoted=False), "only what the exclusive one has no room for"
    assert own.kill(signal.SIGINT) == INTERRUPTED_STATUS
    wait_for(lambda: trained("rank0", promoted=True) > in_bubbles, "promoted trials in bubbles once it has left")
    hold.unlink()
    wait_for(lambda: sandbox.side("finished"), "the end of the study")
    assert job.finish() == 0
    assert daemon.kill(signal.SIGTERM) == 0
    assert all(trial.state.is_finished() for trial in sandbox.trials("counted"))
