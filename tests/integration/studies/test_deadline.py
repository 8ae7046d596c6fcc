"""A deadline that a real worker cannot meet is refused while it trains, and changes nothing that is trained."""

import signal
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from optuna.trial import TrialState

from tests.support.sandbox import wait_for
from tests.support.steady_study import STUDY, started, told, trials
from trials.run import INTERRUPTED_STATUS
from trials.search.choice import deadline

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SOONER = "from trials.search.choice import deadline\ndeadline.ENOUGH_S = 3.0\n"
"""For the study's file: its pace is known after a few seconds of training."""

TRIALS = 10**6


def ended() -> int:
    return sum(trial.state.is_finished() for trial in trials())


def test_it_is_refused_with_a_date_and_the_trials_that_would_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(deadline, "ENOUGH_S", 3.0)  # the study's file sets it in this process, too
    soon = f"{datetime.now() + timedelta(hours=1):%Y-%m-%d %H:%M}"
    given = f"trials, deadline = {TRIALS}, '{soon}'\n    epochs, fused, rungs = 20, 4"
    Path("steady.py").write_text(
        SOONER + STUDY.format(slow_s=0.02).replace("trials, epochs, fused, rungs = 12, 20, 4", given)
    )
    with started("run", "steady.py") as process:
        assert process.stderr is not None
        said = ""
        while " deadline " not in said:
            line = process.stderr.readline()
            assert line, f"it has ended: {said}"
            said = line
        assert f"deadline {soon}: refused, at its pace so far the study ends by " in said
        assert f" of {TRIALS} trials would have ended" in said
        assert told("deadline", "steady.py", status=1)[0].startswith(f"deadline {soon}: refused, ")
        admitted, _ = told("deadline", "steady.py", "--by", "2099-12-31 08:00")
        assert admitted.startswith("deadline 2099-12-31 08:00: admitted, at its pace so far the study ends by ")
        before = ended()
        wait_for(lambda: ended() > before, "trials that end all the same")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED_STATUS
    assert TrialState.FAIL not in {trial.state for trial in trials()}
