"""Lets strace kill a process at one of its system calls, or make that call fail."""

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.sandbox import wait_for

CALLS = ("fsync", "fdatasync", "rename", "write", "pwrite64", "ftruncate", "unlink")
IN_ORDER = (*CALLS, "link", "mkdir")
KILL, NO_SPACE = "signal=KILL", "error=ENOSPC"


class Call(NamedTuple):
    """A system call, and the files that it names."""

    name: str
    files: tuple[str, ...]


def missing() -> str | None:
    """What is not on this machine, or not allowed here."""
    if shutil.which("strace") is None:
        return "there is no strace: apt-get install strace"
    try:
        traced(lambda: None)
    except AssertionError as error:
        return f"strace may not trace a process here: {error}"
    return None


def traced(do: Callable[[], object], inject: str | None = None) -> Counter[str]:
    """Run `do` in a process of its own. What it raises ends that process and is not seen.

    Args:
        do: calls only what it may in a fork of this process.
        inject: strace's expression, such as `fsync:signal=KILL:when=3`.

    Returns:
        How often it made each of `CALLS`.
    """
    said = _trace(do, CALLS, [] if inject is None else ["-e", f"inject={inject}"])
    return Counter(re.findall(rf"^\d+ +({'|'.join(CALLS)})\(", said, re.MULTILINE))


def in_order(do: Callable[[], object]) -> list[Call]:
    """Run `do` as `traced` does. Returns its calls in the order in which they began; see `IN_ORDER`."""
    begun = re.findall(rf"^\d+ +({'|'.join(IN_ORDER)})\((.*)", _trace(do, IN_ORDER, ["-y", "-s", "0"]), re.MULTILINE)
    of_paths = ("rename", "unlink", "link", "mkdir")
    return [
        Call(name, tuple(re.findall(r'"([^"]+)"' if name in of_paths else r"^\d+<([^>]+)>", rest)))
        for name, rest in begun
        if name != "mkdir" or rest.endswith(" = 0")  # else it was there
    ]


def _trace(do: Callable[[], object], calls: Sequence[str], options: Sequence[str]) -> str:
    """What strace says of `do`."""
    ready_fd, go_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(go_fd)
            silence = os.open(os.devnull, os.O_WRONLY)
            for fd in (1, 2):
                os.dup2(silence, fd)
            os.read(ready_fd, 1)
            do()
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(ready_fd)
    with tempfile.TemporaryDirectory(prefix="bsq-") as folder:
        log, said = Path(folder, "trace"), Path(folder, "said")
        command = ["strace", "-f", "-qqq", "-o", str(log), "-e", f"trace={','.join(calls)}", *options, "-p", str(pid)]
        with said.open("wb") as output:
            tracer = subprocess.Popen(command, stderr=output)
        try:
            wait_for(lambda: tracer.poll() is not None or _is_traced(pid), "strace")
            assert tracer.poll() is None, said.read_text()
        finally:
            os.close(go_fd)
            os.waitpid(pid, 0)
            tracer.wait()
        return log.read_text()


def _is_traced(pid: int) -> bool:
    return re.search(r"^TracerPid:\t0$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) is None
