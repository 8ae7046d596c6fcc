"""Starts the main job, alone or under `ds_squeeze`, without a terminal or on one of its own."""

import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared.paths import ROOT
from benchmarks.shared.processes import environment
from benchmarks.soak.faults import Plan
from benchmarks.soak.processes import MARK
from launch.ports import free_port
from squeezer.daemon.deepspeed_buffers import remove_buffers

_PROMPT_S = 30.0
_ALONE_S = 600.0

CONFIG = """
[squeeze]
observe_steps = 4
min_bubble_ms = 0.1
[side]
study = "{study}"
[run]
directory = "{run}"
calibrate_s = 0.0
"""


@dataclass(frozen=True, slots=True)
class Paths:
    """Where one run has its files.

    Attributes:
        base: all others lie in it.
        run: records and logs; on a disk of its own in runs whose disk is filled.
    """

    base: Path
    run: Path

    @property
    def pages(self) -> Path:
        """The place of pages and sockets."""
        return self.base / "pages"

    @property
    def losses(self) -> Path:
        """What the main job writes."""
        return self.base / "losses"

    @property
    def log(self) -> Path:
        """All that is printed."""
        return self.base / "log"

    @property
    def temporary(self) -> Path:
        """Where processes make their temporary files."""
        return self.base / "tmp"


def pretrain(losses: Path, seed: int, steps: int) -> list[str]:
    """The example's training script, small."""
    options = ("--steps", steps, "--width", 128, "--seed", seed, "--losses", losses)
    return [str(ROOT / "examples" / "pretrain.py"), *map(str, options)]


def job_environment(paths: Paths, mark: str) -> dict[str, str]:
    """The environment of all of a run's processes."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    named = {MARK: mark, "TMPDIR": str(paths.temporary), "TORCHINDUCTOR_CACHE_DIR": str(paths.base / "inductor")}
    return {**environment(paths.pages), "PATH": tools, **named}


def losses_alone(paths: Paths, seed: int, steps: int) -> list[str]:
    """Train with DeepSpeed's own command and none of our code; returns the losses' bits.

    Raises:
        RuntimeError: that failed.
    """
    paths.temporary.mkdir(exist_ok=True)
    port = free_port()
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", str(port)]
    with paths.log.open("wb") as log:
        done = subprocess.run(
            [*command, *pretrain(paths.losses, seed, steps)],
            env=job_environment(paths, "alone"),
            cwd=paths.base,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=_ALONE_S,
            check=False,
        )
    remove_buffers(port)
    losses = read_losses(paths.losses)
    if done.returncode or len(losses) != steps:
        raise RuntimeError(f"the job alone ended with {done.returncode}:\n{paths.log.read_text(errors='replace')}")
    return losses


def read_losses(path: Path) -> list[str]:
    """The losses so far; a line that is being written does not count."""
    try:
        text = path.read_text(encoding="ascii")
    except FileNotFoundError:
        return []
    return text.split("\n")[:-1]


class SqueezedJob:
    """The job under `ds_squeeze`.

    Args:
        plan: how it is started, and how long it trains.
        paths: of this run.
        seed: of the training.
        mark: see `benchmarks.soak.processes`.
    """

    def __init__(self, plan: Plan, paths: Paths, seed: int, mark: str) -> None:
        config = paths.base / "soak.toml"
        study = ROOT / "benchmarks" / "soak" / "side_study.py"
        config.write_text(CONFIG.format(study=study, run=paths.run), encoding="utf-8")
        launcher = [sys.executable, "-m", "launch.ds_squeeze", "--squeezer", str(config), "--num_accelerators", "2"]
        command = [*launcher, *pretrain(paths.losses, seed, plan.steps)]
        named = job_environment(paths, mark)
        self._process: subprocess.Popen[bytes] | None = None
        self.terminal: Terminal | None = None
        if plan.form == "detached":
            with paths.log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    env=named,
                    cwd=paths.base,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        else:
            self.terminal = Terminal(named, paths.base)
            line = f"{shlex.join(command)} < /dev/null > {shlex.quote(str(paths.log))} 2>&1"
            self.terminal.type(f"{line}{' & disown' if plan.form == 'background' else ''}\n")

    def status(self) -> int | None:
        """The launcher's exit status; None: it still runs, or a shell has started it."""
        return None if self._process is None else self._process.poll()

    def close(self) -> None:
        """Take the terminal away, if there still is one, and reap what was started here."""
        if self.terminal is not None:
            self.terminal.close()
        if self._process is not None:
            self._process.wait()


class Terminal:
    """An interactive shell with job control on a terminal, at whose other end this process sits."""

    def __init__(self, named: Mapping[str, str], folder: Path) -> None:
        self._shell, self._fd = os.forkpty()
        if self._shell == 0:
            os.chdir(folder)
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], {**named, "PS1": "$ "})
        deadline_s = time.monotonic() + _PROMPT_S
        while b"$ " not in self._read() and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Type `text`; a line ends with a newline."""
        os.write(self._fd, text.encode())

    def hang_up(self) -> None:
        """Close the terminal, as when its window is closed: the kernel sends SIGHUP."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Hang up, and wait for the shell's end."""
        self.hang_up()
        if not self._shell:
            return
        deadline_s = time.monotonic() + _PROMPT_S
        while os.waitpid(self._shell, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline_s:
                os.kill(self._shell, signal.SIGKILL)  # not reaped, so the number is its own
                os.waitpid(self._shell, 0)
                break
            time.sleep(0.05)
        self._shell = 0

    def _read(self) -> bytes:
        found = b""
        with suppress(OSError):
            while select.select([self._fd], [], [], 0)[0]:
                found += os.read(self._fd, 65536)
        return found
