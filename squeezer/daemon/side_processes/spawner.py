"""Starts and ends the processes of a side task. Signals go through pidfds, so they never hit another process."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ds_hooks.shared import statuses
from ds_hooks.shared.private_file import make_dir
from ds_hooks.shared.processes.parent import adopt_orphans, die_with_parent
from ds_hooks.shared.processes.priority import MOST_NICE, never_rise, yield_the_core
from ds_hooks.shared.secrets import STORAGE_VARIABLE
from ds_hooks.shared.study_paths import trials_directory
from ds_hooks.shared.user_paths import path_in_name
from squeezer.config import SideTable
from squeezer.daemon.side_processes.control_group import SideGroup, make_side_group
from squeezer.daemon.side_processes.environment import side_environment
from squeezer.daemon.side_processes.orphans import end_orphans, let_clear_up
from squeezer.daemon.side_processes.parent_group import NoGroupError
from squeezer.daemon.side_processes.temporary_folder import make_folder, remove_folder
from squeezer.device import PRIORITIES, Device, SideProcess, has_ended
from squeezer.records.layout import caches_path, side_log_path, temporary_folder_path, units_path

RELEASE = "trials.search.close"
"""Started, like the side task, and never imported; not from the working directory (`-P`), whose files are not ours."""
THREADS_END_S = 1.0
"""How long a side task's threads have to end before it is collected, beside a job of another session.

The kernel spins in `wait` until all entries of /proc for those threads are gone. Threads that end have the idle class
beside that, and between sessions this process's niceness does not count: it took up to half a second of the main job's
core.
"""
_LOOK_EVERY_S = 0.1
_TRIES, _BETWEEN_TRIES_S = 20, 0.05
"""The kernel lets all users together set the niceness of a session ten times a second."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SideFiles:
    """The files that one side task reads and writes.

    Attributes:
        page: of its device.
        run: the directory of the run.
        rank: whose device it is; part of its files' names.
        storage: of the studies, see `trials.search.storage.optuna_storage`.
        studies: the directory in which each study has one for its checkpoints and claims.
        units_bytes: how large the file of its units may grow.
    """

    page: Path
    run: Path
    rank: int
    storage: str
    studies: Path
    units_bytes: int


def worker_name(run: Path, rank: int | None = None) -> str:
    """The name under which a rank's side tasks claim trials; without a rank, what those of all begin with."""
    return f"{os.uname().nodename}:{path_in_name(run)}:rank{'' if rank is None else rank}"


def releasing_command(study_name: str, studies: Path, worker: str) -> list[str]:
    """The command that lets the trials of a worker that is gone wait for another one.

    `STORAGE_VARIABLE` names the storage.
    """
    where = [f"--study-name={study_name}", "--directory", str(trials_directory(studies, study_name))]
    return [sys.executable, "-P", "-m", RELEASE, *where, "--worker", worker]


class Spawner:
    """At most one side task at a time.

    Attributes:
        serves: the study that it trains, or trained last; None: none yet.
        given_up: the submitted study that has failed, which the next process notes; None: none has.
        group: the control group of the process; None: there is none.
        no_group: why there is none; empty: there is one.
    """

    def __init__(self, config: SideTable, device: Device, files: SideFiles) -> None:
        self._config = config
        self._device = device
        self._files = files
        self._worker = worker_name(files.run, files.rank)
        self._folder_record = temporary_folder_path(files.run, files.rank)
        self._folder: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closers: list[subprocess.Popen[bytes]] = []
        self.serves = None if config.study is None else statuses.Serving(str(config.study), config.study_name)
        self.given_up: str | None = None
        self.side: SideProcess | None = None
        self.status_fd = -1
        self.group: SideGroup | None = None
        self.no_group = ""

    @property
    def needs_job(self) -> bool:
        """See `Device`."""
        return self._device.needs_job

    @property
    def recovers(self) -> bool:
        """See `Device`."""
        return self._device.recovers

    def prepare(self, main_pid: int) -> None:
        """See `Device.prepare`."""
        self._device.prepare(main_pid)

    def start(self) -> None:
        """Start the process; `status_fd` becomes readable when it reports something, `side.pidfd` when it ends.

        Raises:
            OSError: this user may start no more processes, or open no more files; or the kernel refuses what ties it to
                this daemon and the main job.
            ValueError: no command line can hold its arguments in this locale.
        """
        files, config = self._files, self._config
        with suppress(OSError):  # a full disk
            make_dir(caches_path(files.run, files.rank).parent)  # builders use the user's umask
        folder = self._folder = make_folder(self._folder_record)
        self._make_group()
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(write_fd, True)
        command = [
            *(sys.executable, "-P", "-m", statuses.SIDE_TASK, "--worker", self._worker),
            *self._what(),
            *("--page", str(files.page), "--units", str(units_path(files.run, files.rank))),
            *("--units-bytes", str(files.units_bytes)),
            *("--rank", str(files.rank), "--log", str(side_log_path(files.run, files.rank))),
            *("--threads", str(config.threads), "--priority", config.priority, "--status-fd", str(write_fd)),
            *([] if self.group is None else ["--search-group", str(self.group.for_search)]),
            *self._limits(),
        ]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(write_fd,),
                env=self._environment() | ({} if folder is None else {"TMPDIR": folder}),
                # In a group of its own: where a stopped process is in a group that loses its terminal, the kernel sends
                # SIGHUP to all of that group, which may be the main job's. In the main job's session, if that is ours:
                # else niceness counts only within its own.
                start_new_session=self._device.own_session,
                process_group=None if self._device.own_session else 0,
                preexec_fn=partial(_tie, os.getpid(), self.group),
            )
            self.side = SideProcess(pid=self._process.pid, pidfd=os.pidfd_open(self._process.pid))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            os.close(read_fd)
            self._kill_unnamed()
            if isinstance(error, subprocess.SubprocessError):
                raise OSError("the kernel does not let it give way to the main job") from error
            raise
        finally:
            os.close(write_fd)
        self.status_fd = read_fd
        if self.group is not None and not self.group.has(self.side.pid) and not has_ended(self.side.pidfd):
            self._close_group()
            self.no_group = "the kernel does not let the side task into it"

    def _kill_unnamed(self) -> None:
        """End a process that cannot be signalled through a pidfd, so that nobody could stop it outside bubbles."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._close_group()
        remove_folder(self._folder_record, self._folder)

    def reap(self) -> int:
        """The exit status of a process that has ended; negative if a signal ended it. What it leaves is killed."""
        assert self._process is not None and self.side is not None
        if self.group is not None:
            self.group.let_clear_up()
        else:
            let_clear_up([self.side.pid, *self._living_closers()])
        with suppress(ProcessLookupError):  # not reaped yet, its number is its own
            os.killpg(self.side.pid, signal.SIGKILL)
        if self._device.own_session:
            time.sleep(THREADS_END_S)
        status = self._process.wait()
        self._close_group()
        self._end_orphans()
        remove_folder(self._folder_record, self._folder)
        os.close(self.side.pidfd)
        os.close(self.status_fd)
        self._process, self.side, self.status_fd = None, None, -1
        return status

    def end(self, timeout_s: float, *, beside_main: bool) -> None:
        """End the process, which `reap` awaits then. See `Device.end`."""
        assert self.side is not None
        self._device.end(self.side, timeout_s, beside_main=beside_main)

    def give_way(self) -> None:
        """Let the process have what `[side] priority` gives it, as it does itself beside a main job."""
        if self.side is not None:
            PRIORITIES[self._config.priority](self.side.pid)

    def release_trials(self, *, died: bool, idle: bool) -> "subprocess.Popen[bytes]":
        """Start to release the trials that this device's side tasks have left, for another worker.

        Args:
            died: whether the side task ended unasked.
            idle: use only the main job's idle time.

        Raises:
            OSError: see `start`.
            ValueError: likewise.
        """
        assert self.serves is not None
        command = releasing_command(self.serves.name, self._files.studies, self._worker)
        command += [*(["--died"] if died else []), *(["--idle"] if idle else [])]
        apart = self._device.own_session
        closer = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=self._environment(),
            start_new_session=apart,
            preexec_fn=_yield_as_a_session if apart else None,
        )
        self._closers.append(closer)
        return closer

    def measure_dedicated(
        self, seconds: float, trials: int, timeout_s: float, why_stop: Callable[[], str]
    ) -> dict[str, Any] | None:
        """The rate of the same side task with this device to itself; None if it cannot be measured."""
        if self.serves is None:
            return None
        config = self._config
        command = [
            sys.executable,
            "-P",
            "-m",
            statuses.SIDE_TASK,
            "--study",
            self.serves.study,
            "--measure",
            str(seconds),
        ]
        command += ["--threads", str(config.threads), "--priority", config.priority, "--trials", str(trials)]
        command += self._limits()
        try:
            printed = output_of(command, self._environment(), timeout_s, why_stop)
            return dict(json.loads(printed.splitlines()[-1]))
        except (OSError, subprocess.SubprocessError, json.JSONDecodeError, IndexError) as error:
            log.warning("no dedicated rate, so no yield: %s", unmeasured_because(error))
            return None
        finally:
            self._end_orphans()

    def _make_group(self) -> None:
        most_mb = self._config.memory_mb
        try:
            self.group, self.no_group = make_side_group(None if most_mb is None else int(most_mb * 2**20)), ""
        except NoGroupError as error:
            self.group, self.no_group = None, str(error)

    def _close_group(self) -> None:
        """Kill what is left in it."""
        if self.group is not None:
            self.group.close()
        self.group = None

    def _living_closers(self) -> list[int]:
        return [closer.pid for closer in self._closers if closer.poll() is None]

    def _end_orphans(self) -> None:
        ended = end_orphans(self._living_closers())
        if ended:
            log.debug("%d processes that the side task had left behind were killed", ended)

    def _what(self) -> list[str]:
        """What to train: a study, or those that take turns."""
        config = self._config
        if config.queue is not None:
            failed = [] if self.given_up is None else [f"--given-up={self.given_up}"]
            return ["--queue", str(config.queue), "--turn", str(60 * config.turn_minutes), *failed]
        directory = trials_directory(self._files.studies, config.study_name)
        return ["--study", str(config.study), f"--study-name={config.study_name}", "--directory", str(directory)]

    def _limits(self) -> list[str]:
        most_mb = self._config.memory_mb
        return [*self._device.arguments(), *([] if most_mb is None else ["--memory-mb", str(most_mb)])]

    def _environment(self) -> dict[str, str]:
        files = self._files
        named = self._device.environment(self._config.threads)
        kept = side_environment(os.environ, caches_path(files.run, files.rank))
        return {**kept, **named, STORAGE_VARIABLE: files.storage}


def _tie(parent_pid: int, group: SideGroup | None) -> None:
    """In a side task before its program starts: it ends with the daemon, is the root of its processes, and yields."""
    die_with_parent(parent_pid)
    yield_the_core()
    never_rise()
    adopt_orphans()
    if os.getsid(0) == os.getpid():
        _yield_as_a_session()
    if group is not None:
        group.enter()


def output_of(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float, why_stop: Callable[[], str]
) -> bytes:
    """What `command` prints. It ends with this process, whatever ends that: what it does is for an idle device only.

    Raises:
        InterruptedError: `why_stop` gave this reason meanwhile, and the process was killed.
        subprocess.SubprocessError: it took too long, or failed.
    """
    end_s = time.monotonic() + timeout_s
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment,
        preexec_fn=partial(die_with_parent, os.getpid()),
    ) as process:
        while True:
            try:
                printed = process.communicate(timeout=_LOOK_EVERY_S)[0]
                break
            except subprocess.TimeoutExpired:
                if (reason := why_stop()) or time.monotonic() > end_s:
                    process.kill()
                    if reason:
                        raise InterruptedError(reason) from None
                    raise subprocess.TimeoutExpired(command, timeout_s) from None
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return printed


def unmeasured_because(error: Exception) -> str:
    """Why a process that was to print what it measured has not; in a user's words, without its command."""
    if isinstance(error, InterruptedError):
        return str(error)
    if isinstance(error, OSError):
        return f"what measures it could not be started: {error.strerror}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"measuring it took longer than {error.timeout:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        status = error.returncode
        return f"measuring it ended with {f'status {status}' if status > 0 else signal.Signals(-status).name}"
    return "what measured it printed nothing that can be read"


def _yield_as_a_session() -> None:
    """Give all of this process's session the least share of a core that another one wants."""
    for _ in range(_TRIES):
        try:
            Path("/proc/self/autogroup").write_text(str(MOST_NICE), encoding="ascii")
            return
        except BlockingIOError:
            time.sleep(_BETWEEN_TRIES_S)
        except OSError:
            return  # the kernel knows no such thing


def wait_or_kill(process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    """Wait for the end of `process`; end it after `timeout_s`."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
