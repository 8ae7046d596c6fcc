"""Whatever ends a side task in the middle of an epoch, its trials end as if nothing had."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hooks.shared.study_paths import journal_path, trials_directory
from squeezer.records.layout import study_directory
from tests.support.accounts import assert_accounts
from tests.support.paths import STUDIES
from tests.support.sandbox import Child, Sandbox, wait_for
from trials.run import INTERRUPTED_STATUS
from trials.search.files.checkpoint_files import found, place_of, trial_directory
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect

pytestmark = pytest.mark.integration

NUMBERS = range(3)


def run(sandbox: Sandbox, studies: Path, **environment: str) -> Child:
    """Start `trials run`."""
    command = ["-m", "trials", "run", str(STUDIES / "long.py"), "--directory", str(studies)]
    child: Child = sandbox.start(Child, *command, OMP_NUM_THREADS="1", **environment)
    return child


def places(studies: Path) -> list[int]:
    """Of the latest checkpoints."""
    of_each = [found(trial_directory(trials_directory(studies, "long"), number)) for number in NUMBERS]
    return [place_of(files[0]) for files in of_each if files]


def result(sandbox: Sandbox, studies: Path) -> tuple[list[Any], dict[str, Any]]:
    """Of all trials: scores and histories, and weights."""
    best = trials_directory(studies, "long") / "best"
    listed = {entry["number"]: entry["score"] for entry in json.loads((best / "best.json").read_text())}
    weights = {
        f"{number} {name}": value.tolist()
        for number in NUMBERS
        for name, value in torch.load(best / f"trial-{number}.pt", weights_only=True).items()
    }
    return [listed[number] for number in NUMBERS], weights


@pytest.mark.slow
@pytest.mark.parametrize("how", ["the job ends", "Ctrl-C", "killed"])
def test_a_study_goes_on_in_the_middle_of_an_epoch(how: str, sandbox: Sandbox) -> None:
    studies, other = study_directory(sandbox.run), sandbox.files / "uninterrupted"
    begun = sandbox.files / "begun"
    slow = {"LONG_BATCH_S": "0.02", "LONG_BEGUN": str(begun)}
    if how == "the job ends":
        job = sandbox.job()
        daemon = sandbox.daemon_of(job, sandbox.config("long.py", priority="nice"), **slow)
        wait_for(begun.exists, "some steps")
        assert job.finish() == 0 and daemon.ended() == 0
        last = sandbox.events("progress")[-1]
        assert last["work"] >= 39 * 8 * len(NUMBERS) and last["lost"] == 0
    else:
        child = run(sandbox, studies, **slow, **({"LONG_PERIOD_S": "0.2"} if how == "killed" else {}))
        wait_for(begun.exists, "some steps")
        if how == "killed":
            wait_for(lambda: len(places(studies)) == len(NUMBERS), "checkpoints")
            child.kill(signal.SIGKILL)
        else:
            assert child.kill(signal.SIGINT) == INTERRUPTED_STATUS
    found = places(studies)
    assert len(found) == len(NUMBERS) and all(found)
    assert run(sandbox, studies).ended() == run(sandbox, other).ended() == 0
    scores, weights = result(sandbox, studies)
    others_scores, others_weights = result(sandbox, other)
    if how == "killed" and len(set(found)) > 1:  # while files were taken, which then continue in several groups
        assert scores == pytest.approx(others_scores, rel=1e-4) and weights.keys() == others_weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(torch.tensor(weight), torch.tensor(others_weights[name]), msg=name)
    else:
        assert len(set(found)) == 1 and (scores, weights) == (others_scores, others_weights)
    claims = Claims(connect(str(journal_path(studies)), trials_directory(studies, "long")), "long", "a reader")
    assert_accounts(claims.spans(), sandbox.trials("long"))
    claims.close()
