"""What a user reads when the dedicated rate could not be measured."""

import json
import subprocess
import sys

import pytest

from squeezer.daemon.side_processes.spawner import unmeasured_because


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
        json.loads(subprocess.check_output([sys.executable, "-c", program], timeout=timeout_s).splitlines()[-1])
    assert unmeasured_because(caught.value) == words
