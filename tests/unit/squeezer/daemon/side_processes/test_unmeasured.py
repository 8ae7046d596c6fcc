"""What a user reads when the dedicated rate could not be measured."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from squeezer.daemon.side_processes.spawner import output_of, unmeasured_because
from squeezer.device import has_ended
from tests.support.paths import ROOT

ENDS_WITHIN_S = 20.0


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import time; time.sleep(600)", "measuring it took longer than 2 s"),
        ("raise SystemExit(3)", "measuring it ended with status 3"),
        ("import os; os.kill(os.getpid(), 9)", "measuring it ended with SIGKILL"),
        ("print('no number')", "what measured it printed nothing that can be read"),
        ("", "what measured it printed nothing that can be read"),
    ],
)
def test_words(program: str, words: str) -> None:
    with pytest.raises((subprocess.SubprocessError, ValueError, IndexError)) as caught:
        timeout_s = 2 if "sleep" in program else 300
        printed = output_of([sys.executable, "-c", program], os.environ, timeout_s, lambda: "")
        json.loads(printed.splitlines()[-1])
    assert unmeasured_because(caught.value) == words


def test_nothing_is_measured_beside_a_job_that_has_begun_again(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    program = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    with pytest.raises(InterruptedError) as caught:
        output_of([sys.executable, "-c", program], os.environ, 300, lambda: "it begins" if begun.exists() else "")
    assert unmeasured_because(caught.value) == "it begins"


MEASURES = """
import os, sys
from squeezer.daemon.side_processes.spawner import output_of
program = "import os, sys, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(600)"
output_of([sys.executable, "-c", program], os.environ, 600, str)
"""


def test_what_measures_ends_with_whoever_waits_for_it_from_its_first_moment_on() -> None:
    """Also before its own program has come to say so: else it would run on, ungated, beside the next job."""
    with subprocess.Popen([sys.executable, "-c", MEASURES], cwd=ROOT, stderr=subprocess.PIPE, text=True) as waits:
        assert waits.stderr is not None
        measures = os.pidfd_open(int(waits.stderr.readline()))
        waits.kill()
    try:
        assert has_ended(measures, ENDS_WITHIN_S)
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(measures, signal.SIGKILL)
        os.close(measures)
