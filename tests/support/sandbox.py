"""Where a test's processes live: a private directory, their logs, and proof at the end that nothing is left of them."""

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from ds_hooks.shared.page.file import page_path
from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.study_paths import journal_path
from squeezer.daemon.side_processes.control_group import remove_dead_groups
from squeezer.records.layout import DETAILS, events_path, study_directory
from squeezer.records.reader import read_details, read_events
from tests.support.paths import ROOT, STUDIES
from trials.search.storage.optuna_storage import open_storage

PATIENCE_S = 180.0
"""Until a condition holds; generous, for the machine may be busy."""


def wait_for(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """What `condition` returns once that is true."""
    deadline_s = time.monotonic() + patience_s
    while True:
        asked_s = time.monotonic()
        if found := condition():
            return found
        assert time.monotonic() < deadline_s, f"waited in vain for: {what}"
        # a test shares its core with what it waits for: it may take about a tenth of that
        time.sleep(min(max(0.02, 9 * (time.monotonic() - asked_s)), 0.25))


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    return (stat(pid) or "Z")[0] not in "ZX"


def cpu_ticks(pid: int) -> int:
    """The CPU time of all threads of the process."""
    return sum(int(ticks) for ticks in stat(pid)[11:13])


def children(pid: int) -> list[int]:
    """The process's children."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and stat(int(entry))[1:2] == [str(pid)]]


class Child:
    """A process that the test has started; what it prints goes to a file."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                cwd=log.parent,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        self.pid = self.process.pid

    def said(self) -> str:
        """Its standard output and standard error so far."""
        return self._log.read_text(errors="replace")

    def ended(self, patience_s: float = PATIENCE_S) -> int:
        """Its exit status, once it ends."""
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end; its output:\n{self.said()}") from None

    def kill(self, number: signal.Signals) -> int:
        """Send it a signal; returns its exit status."""
        self.process.send_signal(number)
        return self.ended()


class Job(Child):
    """A metronome."""

    @property
    def step(self) -> int:
        """How many steps are done."""
        return sum(line.startswith("step ") for line in self.said().splitlines())

    def beats(self, steps: int) -> None:
        """Wait until it has done that many steps more."""
        until = self.step + steps
        wait_for(lambda: self.step >= until or not is_alive(self.pid), f"step {until}")
        assert is_alive(self.pid), self.said()

    def change(self, **orders: float | str) -> None:
        """Let its next steps be different."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(orders).encode() + b"\n")
        self.process.stdin.flush()

    def finish(self) -> int:
        """Let it end by itself; returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.ended()


class Sandbox:
    """One directory of pages and sockets, one of records and logs, and the processes that use them."""

    squeezer = "tests.support.eager_daemon"
    """The module whose daemons start here."""

    def __init__(self, directory: Path, files: Path) -> None:
        self.directory, self.files = directory, files
        self.run = files / "run"
        self._children: list[Child] = []

    def start(self, kind: type[Child], *command: str, **environment: str) -> Any:
        """Start `python COMMAND`."""
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        named = {"PYTHONPATH": paths, "DS_ACCELERATOR": "cpu", "SQUEEZER_DIR": str(self.directory)}
        child = kind(
            [sys.executable, *command],
            {**os.environ, **named, **environment},
            self.files / f"log{len(self._children)}",
        )
        self._children.append(child)
        return child

    def run_to_end(self, *command: str, **environment: str) -> tuple[int, str]:
        """(exit status, output) of `python COMMAND`."""
        child: Child = self.start(Child, *command, **environment)
        assert child.process.stdin is not None
        child.process.stdin.close()
        return child.ended(), child.said()

    def job(self, *options: str, **environment: str) -> Job:
        """Start a main job, and wait for its first step."""
        job: Job = self.start(Job, "-m", "tests.support.metronome", *options, **environment)
        wait_for(lambda: job.step or not is_alive(job.pid), "the first step")
        assert job.step, job.said()
        return job

    def config(
        self,
        study: str | None = None,
        max_restarts: int = 1,
        preemptive: bool | str = "stop",
        guard: bool = False,
        studies: Path | None = None,
        queue: Path | None = None,
        priority: str = "idle",
        calibrate_s: float = 0.0,
    ) -> Path:
        """Write a configuration that squeezes all steps but the first six; in a queue, turns take 0.6 s.

        By default no side task is started after the job for its dedicated rate: that takes as long as most tests do.
        """
        lines = ["[squeeze]", "alone_share = 0.0", f"preemptive = {json.dumps(preemptive)}"]
        lines += ["[guard]", f"enabled = {guard}".lower(), "retry_steps = 50"]  # a noisy machine may set it off
        if study is not None:
            assert (STUDIES / study).is_file(), f"{study} is not in studies"
            lines += ["[side]", f'study = "{STUDIES / study}"', f"max_restarts = {max_restarts}"]
            lines += [f'priority = "{priority}"', *([] if studies is None else [f'study_directory = "{studies}"'])]
        if queue is not None:
            lines += ["[side]", f'queue = "{queue}"', "turn_minutes = 0.01"]
        lines += ["[run]", f'directory = "{self.run}"', f"calibrate_s = {calibrate_s}"]
        path = self.files / f"{study}.toml"
        path.write_text("\n".join(lines))
        return path

    def daemon(self, config: Path, local_rank: int = 0, **environment: str) -> Child:
        """Start a daemon, and wait until it listens."""
        options = ("--config", str(config), "--local-rank", str(local_rank))
        daemon: Child = self.start(Child, "-m", self.squeezer, "daemon", *options, **environment)
        wait_for(lambda: "serves device" in daemon.said() or not is_alive(daemon.pid), "the daemon")
        assert is_alive(daemon.pid), daemon.said()
        return daemon

    def daemon_of(self, job: Job, config: Path, **environment: str) -> Child:
        """Start a daemon as a rank does, and wait until it serves `job`; `DAEMON_PID` is a child of this process."""
        options = ("--config", str(config), "--job-pid", str(job.pid))
        daemon: Child = self.start(Child, "-m", self.squeezer, "daemon", *options, **environment)
        wait_for(lambda: self.word(Field.DAEMON_PID) or not is_alive(daemon.pid), "the daemon")
        assert is_alive(daemon.pid), daemon.said()
        return daemon

    def events(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        """The records of one kind."""
        path = events_path(self.run, rank)
        if not path.exists():
            return []
        found = read_details(self.run, rank) if kind in DETAILS else read_events(path)
        return [event for event in found if event["r"] == kind]

    def side(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        """The records of what the side task reported, and what happened to it."""
        return [found for found in self.events("side", rank) if found["event"] == event]

    def trials(self, study: str = "tiny") -> list[FrozenTrial]:
        """What became of the trials of a study."""
        journal = str(journal_path(study_directory(self.run)))
        return optuna.load_study(study_name=study, storage=open_storage(journal)).get_trials()

    def word(self, field: int, local_rank: int = 0) -> int:
        """One word of the page, read without becoming one of its users; 0: there is no page yet."""
        try:
            with page_path(self.directory, local_rank).open("rb", buffering=0) as page:
                return int(struct.unpack("<q", os.pread(page.fileno(), 8, 8 * field))[0])
        except FileNotFoundError:
            return 0

    def works(self) -> None:
        """Wait until the side task does more work."""
        before = self.word(Field.WORK)
        wait_for(lambda: self.word(Field.WORK) > before, "work of the side task")

    def living(self) -> list[int]:
        """Processes that were started here, or by processes that were."""
        mark = f"SQUEEZER_DIR={self.directory}".encode()
        found = []
        for entry in os.listdir("/proc"):
            try:
                if entry.isdecimal() and mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
            except OSError:
                continue
        return found

    def end_all(self) -> list[int]:
        """Kill what still runs; returns which processes those were."""
        for child in self._children:
            assert child.process.stdin is not None
            child.process.stdin.close()
        left = self.living()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for child in self._children:
            child.process.wait()
        return left


@contextmanager
def new_sandbox(files: Path) -> Iterator[Sandbox]:
    """A sandbox with records and logs in `files`; at its end nothing may be left but those.

    Args:
        files: an empty directory.
    """
    shared_before = {path.name for path in Path("/dev/shm").glob("squeezer*")}
    directory = Path(tempfile.mkdtemp(prefix="bsq-", dir="/tmp"))
    sandbox = Sandbox(directory, files)
    try:
        yield sandbox
        wait_for(lambda: not sandbox.living(), "the end of all processes", patience_s=10)
    finally:
        left = sandbox.end_all()
        remove_dead_groups()  # of daemons that a test has killed, as the next daemon does
        files_left = sorted(path.name for path in directory.rglob("*")) if directory.exists() else []
        for name in files_left:
            (directory / name).unlink()
        if directory.exists():
            directory.rmdir()
    assert not left, "processes left behind"
    assert not files_left, "pages or sockets left behind"
    defunct = [pid for pid in children(os.getpid()) if not is_alive(pid)]
    assert not defunct, "defunct children"
    assert {path.name for path in Path("/dev/shm").glob("squeezer*")} <= shared_before, "shared memory left behind"
