"""The soak hits real processes of its run, and no others; and it sees what they leave."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.soak import leftovers
from benchmarks.soak.faults import Fault, Plan
from benchmarks.soak.injector import Injector
from benchmarks.soak.job import Paths, Terminal
from benchmarks.soak.processes import MARK, Process, Processes, by_role
from tests.support.sandbox import stat, wait_for

pytestmark = pytest.mark.integration
SLEEP = "import time; print(flush=True); time.sleep(600)"


@contextmanager
def sleeper(mark: str, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-c", SLEEP, *words]
    with subprocess.Popen(command, env={**os.environ, MARK: mark}, stdout=subprocess.PIPE) as made:
        assert made.stdout is not None
        made.stdout.readline()
        yield made
        made.kill()


def inject(
    fault: Fault, roles: dict[tuple[str, int], Process], disk: Path, terminal: Terminal | None = None
) -> Injector:
    injector = Injector(Plan(form="detached", faults=(fault,)), terminal, disk)
    injector.look(roles, 5, time.monotonic())
    return injector


def test_only_the_processes_of_the_run_are_found_and_hit(tmp_path: Path) -> None:
    with sleeper("run 7", "squeezer", "daemon") as ours, sleeper("run 8", "squeezer", "daemon") as others:
        processes = Processes("run 7")
        roles = by_role(processes.now())
        assert [process.pid for process in roles.values()] == [ours.pid]
        fault = Fault(what="SIGKILL", victim="keeper", after_step=6)
        assert not inject(fault, roles, tmp_path).is_over, "its step has not come"
        done = inject(Fault(what="SIGKILL", victim="keeper", after_step=5), roles, tmp_path)
        assert done.is_over and done.records[0]["pid"] == ours.pid
        assert ours.wait(30) == -signal.SIGKILL and others.poll() is None
        assert processes.now() == [] and processes.seen == {ours.pid}


def test_a_stopped_process_is_continued_when_its_time_has_come(tmp_path: Path) -> None:
    with sleeper("run 9", "squeezer", "daemon") as ours:
        roles = by_role(Processes("run 9").now())
        injector = inject(Fault(what="SIGSTOP", victim="keeper", lasts_s=0.2), roles, tmp_path)
        wait_for(lambda: stat(ours.pid)[0] == "T", "a stopped process")
        assert injector.records[0]["pid"] == ours.pid
        time.sleep(0.2)
        injector.look(roles, 5, 0.0)
        wait_for(lambda: stat(ours.pid)[0] != "T", "a process that goes on")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a disk that is small enough to fill")
def test_a_disk_is_filled_to_the_last_byte_and_freed(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], check=False).returncode:
        pytest.skip("this root may not mount")
    try:
        injector = inject(Fault(what="full disk", lasts_s=60.0), {}, tmp_path)
        with pytest.raises(OSError, match="No space"):
            (tmp_path / "more").write_bytes(b"x")
        injector.end()
        (tmp_path / "more").write_bytes(b"x")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_terminal_that_hangs_up_ends_its_foreground_job(tmp_path: Path) -> None:
    terminal = Terminal({**os.environ, MARK: "run 10"}, tmp_path)
    terminal.type("sleep 600\n")
    processes = Processes("run 10")
    wait_for(lambda: any(each.words[0] == "sleep" for each in processes.now()), "the job")
    inject(Fault(what="hang-up", victim="foreground"), {}, tmp_path, terminal)
    wait_for(lambda: not processes.now(), "the end of job and shell")
    terminal.close()


def test_what_is_left_is_seen(tmp_path: Path) -> None:
    paths = Paths(tmp_path, tmp_path / "run")
    paths.temporary.mkdir()
    assert leftovers.files(paths) == []
    paths.pages.mkdir()
    (paths.temporary / "pymp-1").mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(paths.pages / "device0.sock"))
    assert leftovers.files(paths) == ["pages", "pages/device0.sock", "tmp/pymp-1"]
