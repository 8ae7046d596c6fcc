"""Starts and ends the processes of a benchmark, with their directories and environment."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.shared.paths import ROOT
from ds_hooks.shared.page.file import DIRECTORY_VARIABLE

PATIENCE_S = 120.0
END_WITHIN_S = 120.0
"""A launcher ends its job and all daemons first."""


@contextmanager
def run_directories() -> Iterator[tuple[Path, Path]]:
    """Make (a directory for results, a private one for pages and sockets), and remove both in the end."""
    with tempfile.TemporaryDirectory(prefix="bsq-", dir="/tmp") as base:
        run, pages = Path(base) / "run", Path(base) / "pages"
        pages.mkdir(mode=0o700)
        yield run, pages


def environment(pages: Path) -> dict[str, str]:
    """The environment of a measured job's processes: one thread each, on the CPU, our packages on the path."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    named = {"DS_ACCELERATOR": "cpu", DIRECTORY_VARIABLE: str(pages), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return {**os.environ, **named}


def last_core() -> str:
    """The core that a ghost stage shares with everything beside it."""
    return str(max(os.sched_getaffinity(0)))


def start(command: Sequence[str], env: Mapping[str, str], ends: ExitStack) -> "subprocess.Popen[bytes]":
    """Start a process; `ends` ends it if it still runs."""
    process = subprocess.Popen(command, env=dict(env), cwd=ROOT, stdout=subprocess.DEVNULL)

    def end() -> None:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    ends.callback(end)
    return process


def wait_for_files(files: Iterable[Path]) -> None:
    """Return when all files exist."""
    missing, deadline_s = [*files], time.monotonic() + PATIENCE_S
    while missing := [file for file in missing if not file.exists()]:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{[str(file) for file in missing]} did not come within {PATIENCE_S:g} s")
        time.sleep(0.05)


@contextmanager
def child(target: Callable[..., object], *arguments: Any, core: int) -> Iterator[int]:
    """Fork a process that runs `target` on `core`, and kill it in the end. Yields its number."""
    pid = os.fork()
    if not pid:
        try:
            os.sched_setaffinity(0, {core})
            target(*arguments)
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
