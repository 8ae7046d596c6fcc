"""Ranks on machines that lack what every other machine has: the training goes on, and says why nothing is squeezed."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import DIRECTORY_VARIABLE, page_path
from launch.rank import CONFIG, RUN, daemon_pid_path
from squeezer.records.layout import events_path
from squeezer.records.reader import read_events
from tests.support.forbidden import CALLS
from tests.support.paths import ROOT
from tests.support.slow_cases import others_slow

pytestmark = pytest.mark.integration
FORBIDDEN = "tests.support.forbidden"

TRAIN = """
from pathlib import Path
from ds_hooks import attach
from tests.support.hooked_engine import Engine
engine = Engine(Path("/none"))
handle = attach(engine)
print(handle.enabled, engine.train_batch(), flush=True)
handle.detach()
"""
MOUNTS = {
    "no /proc": "mount --bind {empty} /proc",
    "a hidden /proc": "mount -t proc -o hidepid=2 proc /proc",
    "a full directory of pages": "mount -t tmpfs -o size=4k,mode=700 tmpfs {pages} && echo > {pages}/full",
    "a directory of pages of 1 MiB": "mount -t tmpfs -o size=1M,mode=700 tmpfs {pages}",
}
SAYS = {"no /proc": "/proc is not mounted", "a full directory of pages": "No space left on device"}


def train(
    tmp_path: Path, before: str = "true", script: str = TRAIN, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Start a rank as DeepSpeed does, after a shell's command in mounts of its own."""
    path, config, run = tmp_path / "train.py", tmp_path / "squeezer.toml", tmp_path / "run"
    path.write_text(script)
    config.write_text(f'[run]\ndirectory = "{run}"\npin_cores = false\n')
    for made in (run, tmp_path / "pages", tmp_path / "empty"):
        made.mkdir(mode=0o700)
    command = [sys.executable, str(ROOT / "launch" / "rank.py"), "--local_rank=0", str(path)]
    named = {CONFIG: str(config), RUN: str(run), DIRECTORY_VARIABLE: str(tmp_path / "pages"), "PYTHONPATH": str(ROOT)}
    shell = before.format(empty=tmp_path / "empty", pages=tmp_path / "pages")
    return subprocess.run(
        [*(["unshare", "-m"] if "mount" in before else []), "bash", "-c", f'{shell} && exec "$@"', "bash", *command],
        env={**os.environ, **named, "RANK": "0", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount, so odd mounts are NOT shown to do no harm")
@pytest.mark.parametrize("name", MOUNTS)
def test_in_odd_mounts_it_trains(tmp_path: Path, name: str) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("unshare is not allowed here, so odd mounts are NOT shown to do no harm")
    done = train(tmp_path, MOUNTS[name])
    assert (done.returncode, done.stdout) == (0, f"{name not in SAYS} 0.5\n"), done.stderr
    assert "Traceback" not in done.stderr
    if name in SAYS:
        assert "training continues" in done.stderr and SAYS[name] in done.stderr


ENVIRONMENTS = {
    "no folder for temporary files": {"TMPDIR": "/none"},
    "a home that cannot be written": {"HOME": "/proc"},
    "a locale without UTF-8": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_in_an_odd_environment_it_trains(tmp_path: Path, name: str) -> None:
    done = train(tmp_path, **ENVIRONMENTS[name])
    assert (done.returncode, done.stdout) == (0, "True 0.5\n"), done.stderr
    assert "Traceback" not in done.stderr


NAMELESS = 'unset HOME USER LOGNAME && umask 0 && set -- unshare --map-user=54321 --map-group=54321 "$@"'
"""As in containers whose user is a number: no name and no home can be found."""


def test_for_a_user_without_a_name_it_trains(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--map-user=54321", "true"], capture_output=True).returncode:
        pytest.skip("unshare is not allowed here, so a user without a name is NOT shown to do no harm")
    done = train(tmp_path, NAMELESS)
    assert (done.returncode, done.stdout) == (0, "True 0.5\n"), done.stderr
    assert "Traceback" not in done.stderr
    (log,) = (tmp_path / "run").glob("rank0.log")
    assert log.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("limit", ["ulimit -n 64", "ulimit -v 4000000", "ulimit -f 200"])
def test_with_few_or_short_files_or_little_memory_it_trains(tmp_path: Path, limit: str) -> None:
    done = train(tmp_path, limit)
    assert (done.returncode, done.stdout) == (0, "True 0.5\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_where_a_page_is_too_long_a_file_it_trains_and_says_so(tmp_path: Path) -> None:
    done = train(tmp_path, "ulimit -f 100")
    assert (done.returncode, done.stdout) == (0, "False 0.5\n"), done.stderr
    assert "training continues" in done.stderr and "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "pages").glob("*")) == []


def test_where_proc_is_another_namespaces_it_trains_and_takes_no_number_for_a_process(tmp_path: Path) -> None:
    apart = ["unshare", "--pid", "--fork"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("unshare is not allowed here, so another namespace's /proc is NOT shown to do no harm")
    done = train(tmp_path, f'set -- {" ".join(apart)} "$@"')
    assert (done.returncode, done.stdout) == (0, "False 0.5\n"), done.stderr
    assert done.stderr.count("/proc belongs to another PID namespace") == 2, "no daemon, and no hooks"
    assert "Traceback" not in done.stderr


def test_a_directory_of_pages_may_have_any_bytes_in_its_name(tmp_path: Path) -> None:
    done = train(tmp_path, **{DIRECTORY_VARIABLE: str(tmp_path / os.fsdecode(b"\xff %['\""))})
    assert (done.returncode, done.stdout) == (0, "True 0.5\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert [record["r"] for record in read_events(events_path(tmp_path / "run", 0))][-1] == "end", "the daemon listened"


def test_a_daemon_of_a_job_in_real_time_is_not_in_real_time(tmp_path: Path) -> None:
    if subprocess.run(["chrt", "--fifo", "1", "true"], capture_output=True).returncode:
        pytest.skip("real time is not allowed here, so a daemon is NOT shown to leave it")
    looks = "import os; from pathlib import Path; pid = int(next(Path('pages').glob('*.pid')).read_text())"
    script = f"{looks}\nprint(os.sched_getscheduler(0), os.sched_getscheduler(pid))"
    done = train(tmp_path, 'set -- chrt --fifo 1 "$@"', script=f"import os; os.chdir({str(tmp_path)!r})\n{script}")
    assert (done.returncode, done.stdout) == (0, f"{os.SCHED_FIFO} {os.SCHED_OTHER}\n"), done.stderr


def test_with_too_long_a_name_of_the_directory_of_pages_it_trains_and_says_so(tmp_path: Path) -> None:
    long = tmp_path / ("long" * 15) / ("long" * 15)
    for each in (long.parent, long):
        each.mkdir(mode=0o700)
    done = train(tmp_path, **{DIRECTORY_VARIABLE: str(long)})
    assert (done.returncode, done.stdout) == (0, "False 0.5\n"), done.stderr
    assert "training continues" in done.stderr and "long" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_daemon_that_its_launcher_could_not_find_is_not_left_to_run(tmp_path: Path) -> None:
    taken = "mkdir {pages}/" + daemon_pid_path(Path(), 0).name
    done = train(tmp_path, taken)
    assert (done.returncode, done.stdout) == (0, "True 0.5\n"), done.stderr
    assert "no daemon, so nothing is squeezed; training continues" in done.stderr
    assert list((tmp_path / "run").iterdir()) == [], "it has begun no records"
    assert not page_path(tmp_path / "pages", 0).exists(), "nobody else has held the page"


def forbidding(calls: str, error: str) -> str:
    """The shell's words that have the kernel refuse some system calls to the rank and all that it starts."""
    if subprocess.run([sys.executable, "-m", FORBIDDEN, calls, error, "true"], capture_output=True).returncode:
        pytest.skip("no filter of system calls is allowed here, so sandboxes are NOT shown to do no harm")
    return f'set -- {sys.executable} -m {FORBIDDEN} {calls} {error} "$@"'


NEEDED = {
    "pidfd_open": "pidfd_open",
    "pidfd_send_signal": "pidfd_open",
    "sched_setscheduler": "sched_setscheduler",
    "eventfd2": "eventfd",
    "epoll_create1": "epoll_create",
}
"""What is said of the calls without which nothing is squeezed."""


REFUSALS = [(call, error) for call in CALLS[platform.machine()] for error in ("EPERM", "ENOSYS")]
FALLEN_BACK = {"eventfd2", "epoll_create1", "statx", "membarrier", "waitid"}
"""The calls of which libraries, too, make something else of the one error than of the other."""


@pytest.mark.parametrize(
    ("call", "error"), others_slow(REFUSALS, [each for each in REFUSALS if "ENOSYS" in each or each[0] in FALLEN_BACK])
)
def test_where_a_sandbox_refuses_a_system_call_it_trains(tmp_path: Path, call: str, error: str) -> None:
    done = train(tmp_path, forbidding(call, error))
    assert (done.returncode, done.stdout[-4:]) == (0, "0.5\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert call not in NEEDED or NEEDED[call] in done.stderr
