"""A study's directory becomes read-only while its trials train: the worker says so, waits, and loses nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.steady_study import assert_all_ended_once, write

pytestmark = [pytest.mark.integration, pytest.mark.slow]

RUN = """
set -e
"$1" -m trials run steady.py 2> said > printed &
until grep -qs '"intermediate_value"' studies/study.journal; do sleep 0.1; done
mount --bind studies studies
mount -o remount,bind,ro studies
until grep -q 'Read-only file system' said; do sleep 0.1; done
sleep 1
umount studies
wait $!
"""


def test_it_is_named_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a bind mount, what is open stays writable; on a disk that fails it does not, as `test_crash_points` shows."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("unshare is not allowed here, so a directory that becomes read-only is NOT shown to lose nothing")
    monkeypatch.chdir(tmp_path)
    write(slow_s=0.05)
    done = subprocess.run(["unshare", "-m", "bash", "-c", RUN, "bash", sys.executable], capture_output=True, text=True)
    said = Path("said").read_text()
    assert done.returncode == 0, done.stderr + said
    assert f"[Errno 30] Read-only file system: '{tmp_path}/studies/study.journal'" in said
    assert " 0 failed; best score" in Path("printed").read_text()
    assert_all_ended_once()
