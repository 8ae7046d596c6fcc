"""ds_squeeze --squeezer squeezer.toml train.py …: the `deepspeed` command, and bubbles are squeezed.

Takes everything that `deepspeed` takes. DeepSpeed's launcher does the launching: it is given `rank.py` instead of the
user's script, and `rank.py` starts a daemon and then the script. Everything that can be wrong with the configuration
is said before anything starts, with exit code 2; after that the exit code is the job's.
"""

import argparse
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ds_hooks.shared import logs
from ds_hooks.shared.page_file import (
    DIRECTORY_VARIABLE,
    SOCKET_PATH_MAX_BYTES,
    PageError,
    make_private_dir,
    runtime_dir,
    socket_path,
)
from launch import rank
from launch.leftovers import (
    RunInUseError,
    RunLock,
    claim_directory,
    close_directory,
    dead_build_locks,
    end_daemons,
    move_records_aside,
    remove_build_locks,
    remove_dead_directories,
    remove_deepspeed_buffers,
    running_daemons,
    stop_children,
)
from squeezer.config import Config, ConfigError, load_config

USAGE = "usage: ds_squeeze --squeezer FILE [what the deepspeed command takes] SCRIPT [ARGUMENT …]"
_FLAG = "--squeezer"
_WAIT_FOR_DAEMONS_S = 30.0
_LONGEST_DIRECTORY = SOCKET_PATH_MAX_BYTES - len(str(socket_path(Path("/run-abcdefgh"), 999)))

log = logging.getLogger(__name__)


class LaunchError(Exception):
    """A command line that cannot be launched; the text says why and what is allowed."""


def take_flag(
    arguments: Sequence[str], parse: Callable[[list[str]], argparse.Namespace]
) -> tuple[str, list[str], argparse.Namespace]:
    """(the configuration's path, DeepSpeed's options as typed, what DeepSpeed's own parser makes of the rest).

    Args:
        arguments: the command line without the command.
        parse: DeepSpeed's parser. It decides where the user's script begins; what follows is never ours.

    Raises:
        LaunchError: no `--squeezer` before the script, or none with a value.
    """
    at = next((i for i, a in enumerate(arguments) if a == _FLAG or a.startswith(_FLAG + "=")), None)
    if at is None:
        raise LaunchError(f"{_FLAG} FILE is missing\n{USAGE}")
    _, joined, value = arguments[at].partition("=")
    width = 1 if joined else 2
    if not joined and at + 1 < len(arguments):
        value = arguments[at + 1]
    if not value or value.startswith("-"):
        raise LaunchError(f"{_FLAG} needs the path of a configuration file\n{USAGE}")
    rest = [*arguments[:at], *arguments[at + width :]]
    parsed = parse(rest)
    script_at = len(rest) - len(parsed.user_args) - 1
    if at > script_at:
        raise LaunchError(f"{_FLAG} FILE must stand before the script {parsed.user_script}\n{USAGE}")
    return value, rest[:script_at], parsed


def redirect_to_rank(parsed: argparse.Namespace) -> argparse.Namespace:
    """The same job with `rank.py` as its script, and the user's script as the first argument of that.

    Raises:
        LaunchError: an option of DeepSpeed's with which no hook can be attached.
    """
    if parsed.no_python:
        raise LaunchError("--no_python runs a program that is not Python; only Python scripts can be squeezed")
    if parsed.autotuning:
        raise LaunchError("--autotuning starts many jobs of its own; tune with deepspeed first, then squeeze")
    script = ["--module", parsed.user_script] if parsed.module else [parsed.user_script]
    changed = argparse.Namespace(**vars(parsed))
    changed.module = False
    changed.user_script = str(Path(rank.__file__).resolve())
    changed.user_args = [*script, *parsed.user_args]
    return changed


def needs_port(options: Sequence[str], hostfile_exists: bool) -> bool:
    """Whether to choose a free master port: on one node, unless the user named one (in full or abbreviated)."""
    return not hostfile_exists and not any(option.startswith("--master_p") for option in options)


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _prepare_environment() -> None:
    """What DeepSpeed looks at while it is imported, and what its compiler calls need."""
    tools = str(Path(sys.executable).parent)  # ninja lies beside Python
    path = os.environ.get("PATH", os.defpath)
    if tools not in path.split(os.pathsep):
        os.environ["PATH"] = tools + os.pathsep + path
    if rank.runs_on_cores(os.environ):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _fresh_directory() -> Path:
    """A private place for this run's pages and sockets, in memory and with a short path."""
    parent = make_private_dir(runtime_dir()).resolve()
    if len(str(parent)) > _LONGEST_DIRECTORY:
        raise LaunchError(
            f"{parent} is too long a path for sockets; allowed are {_LONGEST_DIRECTORY} characters: "
            f"name another directory with ${DIRECTORY_VARIABLE}"
        )
    remove_dead_directories(parent)
    return Path(tempfile.mkdtemp(prefix="run-", dir=parent))


@contextmanager
def _ended_once() -> Iterator[None]:
    """The first SIGTERM ends us by `SystemExit`; more of them do not stop the clearing up, which takes seconds."""

    def terminated(number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _launch(runner: Any, parsed: argparse.Namespace) -> int:
    """Run the job by DeepSpeed's launcher; the job's exit code."""
    runner.parse_args = lambda args=None: parsed
    if "SQUEEZER_" not in runner.EXPORT_ENVS:
        runner.EXPORT_ENVS.append("SQUEEZER_")
    patience_s, started_s = 0.0, time.time()  # the wall clock, to compare with files
    try:
        runner.main()
        return 0
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except KeyboardInterrupt:
        patience_s = 5.0
        return 128 + signal.SIGINT
    finally:
        stop_children(patience_s)
        remove_build_locks(started_s)


def _reason(code: int) -> str:
    """Why the study is closed, for people who look at it later."""
    if code == 0:
        return "the main job has ended"
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        return f"the main job was stopped by {signal.Signals(code - 128).name}"
    return f"the main job failed with exit code {code}"


def finish(run: Path, config: Config, reason: str) -> None:
    """Close the study, then write and print the report. What fails here is said and does not stop the rest."""
    from squeezer.reports.perfetto import write_trace
    from squeezer.reports.report import render, write_report
    from squeezer.reports.step_svg import draw_step

    def close_study() -> None:
        if config.side is not None:
            close = [sys.executable, "-m", "trials.search.worker", "--close", "--storage", config.storage(run)]
            subprocess.run([*close, "--study-name", config.side.study_name, "--reason", reason], check=True)

    def trace() -> None:
        write_trace(run, config.run.trace_steps)

    def picture() -> None:
        if config.side is not None:  # it shows a step with squeezing
            draw_step(run, run / "step.svg")

    def report() -> None:
        print(render(json.loads(write_report(run).read_text(encoding="utf-8"))), flush=True)

    for what in (close_study, trace, picture, report):
        try:
            what()
        except Exception as error:
            name = what.__name__.replace("_", " ")
            log.error("%s: %s: %s", name, type(error).__name__, error)


def squeeze(arguments: Sequence[str]) -> int:
    """Launch, wait, report; the job's exit code.

    Raises:
        LaunchError, ConfigError, PageError, RunInUseError: before anything has started.
    """
    if not any(a == _FLAG or a.startswith(_FLAG + "=") for a in arguments):
        raise LaunchError(f"{_FLAG} FILE is missing\n{USAGE}")
    _prepare_environment()
    from deepspeed.launcher import runner  # takes seconds, and looks at the environment

    config_file, options, parsed = take_flag(arguments, runner.parse_args)
    changed = redirect_to_rank(parsed)
    config = load_config(config_file)
    if not parsed.module and not Path(parsed.user_script).is_file():
        raise LaunchError(f"there is no training script {parsed.user_script}")
    has_own_port = needs_port(options, os.path.isfile(parsed.hostfile))
    if has_own_port:
        changed.master_port = free_port()

    run = config.run.directory
    is_first_node = changed.node_rank <= 0  # with --no_ssh every node has a launcher; the first one's reports
    with _ended_once(), ExitStack() as around:
        directory = _fresh_directory()
        around.callback(close_directory, directory)
        around.callback(os.close, claim_directory(directory))
        if has_own_port:
            around.callback(remove_deepspeed_buffers, changed.master_port)
        if is_first_node:
            around.enter_context(RunLock(run, directory))
            moved = move_records_aside(run)
            if moved:
                log.info("%d records of an earlier run moved to %s", moved, run / "previous")
        os.environ[rank.CONFIG] = str(Path(config_file).resolve())
        os.environ[rank.RUN] = str(run)
        os.environ[DIRECTORY_VARIABLE] = str(directory)
        for lock in dead_build_locks(os.environ):
            log.warning("no process here holds %s; if the job hangs, remove it", lock)
        if changed.bind_cores_to_rank:
            os.environ[rank.PIN_CORES] = "0"
        code = _launch(runner, changed)
        end_daemons(lambda: running_daemons(directory), _WAIT_FOR_DAEMONS_S + config.run.calibrate_s)
        if is_first_node:
            finish(run, config, _reason(code))
    return code


def main() -> None:
    """The console script."""
    logs.set_up()
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n  {_FLAG} FILE  the configuration of Bubble Squeezer (TOML)\n")
        print("All other options are those of the deepspeed command:\n", flush=True)
        from deepspeed.launcher import runner

        runner.parse_args(["--help"])
    try:
        code = squeeze(arguments)
    except (LaunchError, ConfigError, PageError, RunInUseError) as error:
        print(f"ds_squeeze: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(code)


if __name__ == "__main__":
    main()
