"""Trains a study on devices of its own: *exclusive* workers, with no main job.

Each worker is the side task's own program with a gate that is always open, so a study that works here works in bubbles.
Exclusive workers and those in bubbles can share a study.
"""

import fcntl
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, Generic, TypeVar

import optuna
from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from ds_hooks.shared import statuses
from ds_hooks.shared.private_file import make_dir, open_private
from ds_hooks.shared.processes.endings import true_status
from ds_hooks.shared.processes.parent import die_with_parent
from ds_hooks.shared.secrets import STORAGE_VARIABLE
from ds_hooks.shared.status_reader import StatusReader
from ds_hooks.shared.status_text import differs, too_large
from ds_hooks.shared.statuses import SIDE_TASK
from ds_hooks.shared.trial_attributes import REASON, WORKER
from ds_hooks.shared.user_paths import path_in_name
from trials.own_logger import own_logger
from trials.requests_to_end import RequestsToEnd
from trials.search.choice.constraints import breaks
from trials.search.files.best_weights import ranked
from trials.search.optuna_study import NoStudyError, known_study
from trials.search.storage.optuna_storage import storage_file

INTERRUPTED_STATUS = 130
"""As a shell reports a command that Ctrl-C has ended."""

FAILED_STATUS = 1
"""Not one of the trials has ended as anything but failed."""

LOOK_EVERY_S = 1.0
"""How often the study is read for the progress bar."""

LOOKS_S, LOOKS_LAST_S = 0.5, 10.0
"""How long a look may hold up what else there is to do, and the last one the end of the run."""

LINE_EVERY_S = 30.0
"""Where there is no terminal, a line takes the bar's place."""

log = own_logger(__name__)

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """What is trained, and where.

    Args:
        study: the user's file.
        name: Optuna's name of the study.
        storage: a database's URL or a journal's path, see `open_storage`.
        directory: the study's, for claims, checkpoints and logs.
        device: "cpu" or "cuda"; of several workers on CUDA, each has a device of its own.
        threads: of each worker.
        workers: how many.
    """

    study: Path
    name: str
    storage: str
    directory: Path
    device: str
    threads: int
    workers: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: its exit status.
        lines: what became of the study so far.
        has_best: whether a trial has completed.
    """

    status: int
    lines: list[str]
    has_best: bool


def run(config: RunConfig) -> Outcome:
    """Train the study until no trial is left for this run, or until it is interrupted.

    Ctrl-C, or whatever else asks a process to end, releases all trials, and the next run resumes them. Another Ctrl-C
    ends the workers at once.

    Raises:
        OSError: the directory cannot be used.
    """
    for directory in (config.directory.parent, config.directory):
        make_dir(directory)
    with ExitStack() as stack:
        bar = stack.enter_context(_Bar(config))
        numbers = islice(_free_numbers(config.directory, stack), config.workers)
        # in this order: a worker that is started later must not inherit an earlier one's pipe
        workers = [stack.enter_context(_Worker(config, number, row)) for row, number in enumerate(numbers)]
        asked = RequestsToEnd([worker.process for worker in workers], stack)
        while any(not worker.has_ended for worker in workers):
            _wait(workers)
            if news := asked.news():
                log.info("%s", news)
            bar.show(workers)
        lines, has_best = bar.summary()
        if asked:
            return Outcome(INTERRUPTED_STATUS, [*lines, "Interrupted. The same command resumes them."], has_best)
        ended = [worker.status() for worker in workers]
        for status in ended:
            if status < 0:  # such as by the kernel, where memory ran out
                log.error("a worker was ended by %s", signal.Signals(-status).name)
        failure = bar.failure([worker.name for worker in workers]) if lines and not any(ended) else None
        if failure is not None:
            log.error("every trial failed, such as %s", failure)
            ended.append(FAILED_STATUS)
        return Outcome(max(status if status >= 0 else 128 - status for status in ended), lines, has_best)


def _free_numbers(directory: Path, stack: ExitStack) -> Iterator[int]:
    """Numbers that no living run of this machine uses, so that a worker has the name of a dead one, and its trials."""
    for number in count():
        file = stack.enter_context(_lock_file(directory / f"{os.uname().nodename}.run{number}.lock"))
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield number


def _lock_file(path: Path) -> BinaryIO:
    return open(path, "ab", opener=open_private)


class _Worker:
    """The process of one worker, and its latest reports.

    Args:
        config: the run's.
        number: its number on this machine.
        row: its number in this run.

    Attributes:
        name: by which its trials are known.
    """

    def __init__(self, config: RunConfig, number: int, row: int) -> None:
        self.name = f"{os.uname().nodename}:{path_in_name(config.directory.absolute())}:run{number}"
        self.log = config.directory / f"{os.uname().nodename}.run{number}.log"
        self.trials: int | None = None
        self.running = 0
        self._has_left = False
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(write_fd, True)
        self.process = subprocess.Popen(
            [
                # with an equals sign: any of them may look like an option
                *(sys.executable, "-m", SIDE_TASK, f"--study={config.study}", f"--study-name={config.name}"),
                *("--worker", self.name, f"--directory={config.directory}"),
                *("--device", config.device, "--threads", str(config.threads)),
                *(f"--log={self.log}", "--status-fd", str(write_fd)),
            ],
            pass_fds=(write_fd,),
            env=os.environ | {STORAGE_VARIABLE: config.storage} | _device(config, row),
            preexec_fn=partial(_tie, os.getpid()),
        )
        os.close(write_fd)
        self.status_fd = read_fd
        self._reader = StatusReader(read_fd, log.warning)

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.status_fd)

    @property
    def has_ended(self) -> bool:
        """Whether it reports no more."""
        return self._reader.is_over

    def status(self) -> int:
        """Its exit status, once it ends."""
        found = self.process.wait()
        status = true_status(found, has_said_so=self._has_left)
        if status != found:
            log.error("the study's code has ended a worker's process")
        return status

    def read(self) -> None:
        """Take what it has reported."""
        for status in self._reader.read():
            match status:
                case statuses.Ready(trials=trials):
                    self.trials = trials
                case statuses.Progress(trials_running=running):
                    self.running = running
                case statuses.OutOfMemory():
                    log.warning("%s", too_large(status))
                case statuses.Mismatched():
                    log.warning("%s", differs(status))
                case statuses.Left():
                    self._has_left = True
                case statuses.Error(message):
                    log.error("%s", message)


def _tie(parent_pid: int) -> None:
    """In a worker before its program starts: it ends with this process, which alone takes Ctrl-C."""
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _device(config: RunConfig, row: int) -> dict[str, str]:
    """The CUDA device of the worker with number `row`, as its environment."""
    if config.device != "cuda" or config.workers == 1:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(number) for number in range(config.workers)] if visible is None else visible.split(",")
    return {"CUDA_VISIBLE_DEVICES": devices[row] if row < len(devices) else ""}


def _wait(workers: Sequence[_Worker]) -> None:
    """Read what workers report within a second."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            if not worker.has_ended:
                selector.register(worker.status_fd, selectors.EVENT_READ, worker)
        for key, _ in selector.select(LOOK_EVERY_S):
            key.data.read()


class _Bar:
    """A progress bar of the study's trials, those of other workers included; lines where there is no terminal."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._study: optuna.Study | None = None
        self._bar: tqdm[Any] | None = None
        self._trials: list[FrozenTrial] = []
        self._look = _Look(self._read)
        self._best = ""
        self._ended_before = _ended_trials(config)
        self._looked_s = self._said_s = time.monotonic()

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, workers: Sequence[_Worker]) -> None:
        """Bring it up to date, at most once a second."""
        now_s = time.monotonic()
        wanted = next((worker.trials for worker in workers if worker.trials is not None), None)
        if wanted is None or now_s < self._looked_s + LOOK_EVERY_S:
            return
        self._looked_s = now_s
        try:
            counts = self._counts(LOOKS_S)
        except Exception as error:  # no worker has created it yet, or its database is away
            log.debug("the study cannot be read: %s: %s", type(error).__name__, error)
            return
        running = sum(worker.running for worker in workers)
        if self._bar is None:
            self._bar = tqdm(total=wanted, initial=_ended(counts), unit="trial", disable=None, dynamic_ncols=True)
        self._bar.n = _ended(counts)
        self._bar.set_postfix_str(f"{running} running, {self._best}")
        if self._bar.disable and now_s >= self._said_s + LINE_EVERY_S:
            self._said_s = now_s
            log.info("%d of %d trials have ended, %d are running, %s", _ended(counts), wanted, running, self._best)

    def summary(self) -> tuple[list[str], bool]:
        """How the study stands, and whether a trial has completed."""
        try:
            counts = self._counts(LOOKS_LAST_S)
        except Exception as error:
            log.debug("the study cannot be read: %s: %s", type(error).__name__, error)
            return [], False
        named = {TrialState.COMPLETE: "completed", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
        ended = ", ".join(f"{counts[state]} {name}" for state, name in named.items())
        waiting = counts[TrialState.WAITING] + counts[TrialState.RUNNING]
        unfinished = f", {waiting} unfinished" if waiting else ""
        return [f"study {self._config.name}: {ended}{unfinished}; {self._best}"], counts[TrialState.COMPLETE] > 0

    def failure(self, workers: Collection[str]) -> str | None:
        """A trial and why it failed, if all that ended did: of these workers' in this run or, if none has, of all."""
        ended = [trial for trial in self._trials if trial.state.is_finished()]
        new = [t for t in ended if t.number not in self._ended_before and t.user_attrs.get(WORKER) in workers]
        if not ended or any(trial.state is not TrialState.FAIL for trial in new or ended):
            return None
        first = (new or ended)[0]
        return f"trial {first.number}: {first.user_attrs.get(REASON, 'it has no reason')}"

    def _counts(self, patience_s: float) -> Counter[TrialState]:
        self._trials, self._best = self._look.result(patience_s)
        return Counter(trial.state for trial in self._trials)

    def _read(self) -> tuple[list[FrozenTrial], str]:
        """The trials, and the best of them in words."""
        if self._study is None:
            self._study = _known(self._config)
        trials, best = self._study.get_trials(deepcopy=False), ranked(self._study)
        if not best:
            has_scores = any(trial.state is TrialState.COMPLETE for trial in trials)
            return trials, "every score breaks a constraint" if has_scores else "no score yet"
        if len(self._study.directions) > 1:
            return trials, f"{len(best)} on the front"
        broken = ", which breaks a constraint" if breaks(best[0]) else ""
        return trials, f"best score {best[0].value:.4g} (trial {best[0].number}{broken})"


class _Look(Generic[_Result]):
    """Calls `read`, in threads that may hang: a server that has stopped answers nobody, and Ctrl-C must not wait."""

    def __init__(self, read: Callable[[], _Result]) -> None:
        self._read = read
        self._thread: Thread | None = None
        self._found: Future[_Result] = Future()

    def result(self, patience_s: float) -> _Result:
        """What `read` returns or raises.

        Raises:
            TimeoutError: it takes longer; the next call waits for the same.
        """
        if self._thread is None:
            self._found = Future()
            self._thread = Thread(target=self._run, args=(self._found,), daemon=True)
            self._thread.start()
        try:
            return self._found.result(patience_s)
        finally:
            self._thread = None if self._found.done() else self._thread

    def _run(self, found: "Future[_Result]") -> None:
        try:
            found.set_result(self._read())
        except Exception as error:
            found.set_exception(error)


def _known(config: RunConfig) -> optuna.Study:
    """The study, once a worker has made it: whoever opens a storage before makes its tables, at once with the worker.

    Raises:
        NoStudyError: no worker has.
    """
    file = storage_file(config.storage)
    if file is not None and not Path(file).exists():
        raise NoStudyError(f"there is no {file}")
    return known_study(config.storage, config.name)


def _ended_trials(config: RunConfig) -> set[int]:
    """The trials that have ended; none if there is no study yet, or its storage is away: its workers say so."""
    try:
        trials = _known(config).get_trials(deepcopy=False)
    except Exception as error:
        log.debug("the study cannot be read yet: %s: %s", type(error).__name__, error)
        return set()
    return {trial.number for trial in trials if trial.state.is_finished()}


def _ended(counts: Counter[TrialState]) -> int:
    return sum(number for state, number in counts.items() if state.is_finished())
