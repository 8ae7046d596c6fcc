"""Processes in other namespaces than the page's: refused in words, and the training goes on."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import Page, make_private_dir, page_path
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration

PID = ("unshare", "--pid", "--fork", "--mount-proc")
TIME = ("unshare", "--time", "--fork", "--monotonic", "1000")
TRAIN = """
import sys
from pathlib import Path
from ds_hooks import attach
from tests.support.hooked_engine import Engine
directory = Path(sys.argv[1])
engine = Engine(directory / "none")
handle = attach(engine, directory=directory, local_rank=0)
print(handle.enabled, engine.train_batch())
"""


def in_namespace(unshare: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python there, or skip the test by name where the machine does not allow it."""
    allowed = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    if allowed.returncode:
        pytest.skip(f"{' '.join(unshare)} is not allowed here, so the refusal is NOT shown: {allowed.stderr.strip()}")
    command = [*unshare, sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory whose page is held here, as a daemon would."""
    made = make_private_dir(tmp_path / "pages")
    page = Page.open(page_path(made, 0))
    yield made
    page.close()


@pytest.mark.parametrize(
    ("unshare", "says"), [(PID, "belongs to PID namespace"), (TIME, "belongs to time namespace")], ids=["pid", "time"]
)
def test_a_main_job_in_another_namespace_trains_without_squeezing(
    directory: Path, unshare: tuple[str, ...], says: str
) -> None:
    done = in_namespace(unshare, "-c", TRAIN, str(directory))
    assert (done.returncode, done.stdout) == (0, "False 0.5\n"), done.stderr
    assert done.stderr.count("\n") == 1 and says in done.stderr


@pytest.mark.parametrize("unshare", [PID, TIME], ids=["pid", "time"])
def test_within_one_namespace_all_is_as_ever(tmp_path: Path, unshare: tuple[str, ...]) -> None:
    done = in_namespace(unshare, "-c", TRAIN, str(tmp_path / "own"))
    assert (done.returncode, done.stdout) == (0, "True 0.5\n"), done.stderr


def test_a_reused_number_of_a_side_task_is_never_signalled(tmp_path: Path) -> None:
    from ds_hooks.shared.page.layout import Field, SideActivity
    from ds_hooks.side_process import SideProcess

    page = Page.open(page_path(tmp_path / "own", 0))
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        page.words[Field.SIDE_PROCESS], page.words[Field.SIDE_PROCESS_START] = stranger.pid, 1
        page.words[Field.SIDE_ACTIVITY] = SideActivity.HOST
        side = SideProcess(page.words)
        assert not side.halt()
        side.wake()
        assert os.waitid(os.P_PID, stranger.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG) is None
    finally:
        stranger.send_signal(signal.SIGKILL)
        stranger.wait()
        page.close()
