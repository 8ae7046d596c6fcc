"""ds_squeeze --squeezer squeezer.toml train.py …: the `deepspeed` command, with the bubbles squeezed.

It takes every option of `deepspeed`. DeepSpeed's launcher does the launching, but runs `rank.py` in place of the user's
script; `rank.py` starts a daemon and then the script. A mistake in the command line or the configuration ends with exit
code 2 before anything starts. After that, the exit code is the job's.
"""

import argparse
import io
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ds_hooks.shared import logs
from ds_hooks.shared.command_line import print_anything, version
from ds_hooks.shared.page.file import DIRECTORY_VARIABLE, PageError, runtime_dir
from ds_hooks.shared.private_file import check_ours
from ds_hooks.shared.processes.endings import USER_ERROR_STATUS
from ds_hooks.shared.processes.identity import why_no_proc
from ds_hooks.shared.processes.signals import asked_to_end
from ds_hooks.shared.renamed_commands import MOVED
from ds_hooks.shared.secrets import STORAGE_VARIABLE
from ds_hooks.shared.user_paths import user_path
from launch import rank
from launch.build_locks import BuildLockWatch, unheld_build_locks
from launch.leftovers import (
    RunInUseError,
    RunLock,
    await_records,
    children,
    close_directory,
    end_daemons,
    fresh_directory,
    move_records_aside,
    remove_buffers_soon,
    remove_temporary_folders,
    stop_children,
)
from launch.ports import free_port, needs_port
from launch.terminal import is_in_foreground
from squeezer.config import Config, ConfigError, load_config
from squeezer.daemon.run_directory import claim_directory, running_daemons
from squeezer.records.layout import events_path

USAGE = "usage: ds_squeeze --squeezer FILE [options of deepspeed] SCRIPT [ARGUMENT …]"
EXAMPLE = "example:\n  ds_squeeze --squeezer examples/demo.toml --num_accelerators 2 examples/pretrain.py"
_FLAG = "--squeezer"
WAIT_FOR_DAEMONS_S = 100.0
"""A killed daemon's record is incomplete, so this is longer than all that a daemon may wait for at its end."""
UNASKED_S = 5.0
"""How long DeepSpeed's launcher has to end after a SIGINT that may have been for this process alone."""
_ENDED_WELL = "the main job has ended"

log = logging.getLogger(__name__)


class LaunchError(Exception):
    """A command line that cannot be launched; the text says why, and what is allowed."""


def take_flag(
    arguments: Sequence[str], parse: Callable[[list[str]], argparse.Namespace]
) -> tuple[str, list[str], argparse.Namespace]:
    """Part our own option from DeepSpeed's.

    Args:
        arguments: the command line without the command.
        parse: DeepSpeed's parser. It decides where the user's script begins; what follows is never ours.

    Returns:
        The configuration's path, DeepSpeed's options as typed, and what DeepSpeed's parser makes of the rest.

    Raises:
        LaunchError: `--squeezer` is missing before the script, or has no value.
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
    try:
        value = user_path(value)
    except ValueError as error:
        raise LaunchError(f"{_FLAG} {value}: {error}") from None
    rest = [*arguments[:at], *arguments[at + width :]]
    parsed = _parse(rest, parse)
    script_at = len(rest) - len(parsed.user_args) - 1
    if at > script_at:
        raise LaunchError(f"{_FLAG} FILE must stand before the script {parsed.user_script}\n{USAGE}")
    return value, rest[:script_at], parsed


def _parse(arguments: list[str], parse: Callable[[list[str]], argparse.Namespace]) -> argparse.Namespace:
    """Parse by DeepSpeed's parser; its page of usage for a mistake becomes one line."""
    captured = io.StringIO()
    try:
        with redirect_stderr(captured):
            return parse(arguments)
    except SystemExit as ended:
        if ended.code != USER_ERROR_STATUS:
            raise
        message = captured.getvalue().rpartition("error: ")[2].strip()
        raise LaunchError(f"{message}; see ds_squeeze --help") from None


def redirect_to_rank(parsed: argparse.Namespace) -> argparse.Namespace:
    """Make `rank.py` the job's script, and the user's script its first argument.

    Raises:
        LaunchError: with one of DeepSpeed's options, no hook can be attached.
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


def _prepare_environment() -> None:
    """Let DeepSpeed find what its compiler calls need. All else stays as with its own command."""
    tools = str(Path(sys.executable).parent)  # ninja is beside Python
    path = os.environ.get("PATH", os.defpath)
    if tools not in path.split(os.pathsep):
        os.environ["PATH"] = path + os.pathsep + tools  # last, so that it hides nothing


@contextmanager
def _ended_once() -> Iterator[None]:
    """End by `SystemExit` on the first SIGTERM or SIGHUP; ignore further ones, so that the cleaning up goes to its end.

    A signal to the whole job is for the training, which has its usual action there: handlers end with `exec`.
    """
    ends = asked_to_end() - {signal.SIGINT}

    def terminated(number: int, _frame: FrameType | None) -> None:
        for each in ends:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, terminated) for number in ends}
    before |= {number: signal.signal(number, lambda *_: None) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _launch(runner: Any, parsed: argparse.Namespace, daemons: Callable[[], list[int]] = list) -> int:
    """Run the job with DeepSpeed's launcher, and end what is left of it but `daemons`; returns the job's exit code."""
    runner.parse_args = lambda args=None: parsed
    if "SQUEEZER_" not in runner.EXPORT_ENVS:
        runner.EXPORT_ENVS.append("SQUEEZER_")
    if why_no_proc() is not None:  # nobody's children can be found
        runner.main()
        return 0
    patience_s: float | None = 0.0
    earlier = children()
    with BuildLockWatch(os.environ):
        try:
            runner.main()
            return 0
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 1
        except KeyboardInterrupt:
            patience_s = None if is_in_foreground() else UNASKED_S
            return 128 + signal.SIGINT
        finally:
            stop_children(patience_s, earlier.union(daemons()))


def _reason(code: int) -> str:
    """Say why the run ended, for whoever looks at the study later."""
    if code == 0:
        return _ENDED_WELL
    if code in (128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)):
        return f"the main job was stopped by {signal.Signals(code - 128).name}"
    return f"the main job failed with exit code {code}"


def finish(run: Path, config: Config, reason: str) -> None:
    """Release the trials that are left, write report, trace and picture, and print the closing screen.

    If one of these fails, the error is printed and the others still run.

    Args:
        run: the run's directory.
        config: the run's configuration. Without a side task, the screen is the table of idle time.
        reason: why the run ended.
    """
    from launch import release
    from squeezer.records.layout import picture_path, yield_picture_path
    from squeezer.reports.closing import closing_lines
    from squeezer.reports.idle import idle_of_run, render_idle
    from squeezer.reports.perfetto import write_trace
    from squeezer.reports.report import ReportError, write_report
    from squeezer.reports.step_svg import draw_step
    from squeezer.reports.yield_svg import draw_yield

    os.environ[STORAGE_VARIABLE] = config.storage(run)  # for releasing trials, and for the report

    def release_trials() -> None:
        release.release_trials(run, config)

    def trace() -> None:
        with suppress(ReportError):  # no step was seen
            write_trace(run, config.run.trace_steps)

    def picture() -> None:
        if config.side is not None:
            with suppress(ReportError):  # no step was squeezed
                draw_step(run, picture_path(run))

    def report() -> None:
        content = json.loads(write_report(run).read_text(encoding="utf-8"))
        if config.side is None:
            what = "Records and trace.json (for ui.perfetto.dev)" if content["main"]["steps"] else "Records"
            screen = f"{render_idle(idle_of_run(run))}\n\n{what} are in {run}"
        else:
            screen = "\n".join(closing_lines(content, run))
        print(f"\n{screen}" if reason == _ENDED_WELL else f"\n{reason[0].upper()}{reason[1:]}.\n{screen}", flush=True)
        if config.side is not None:  # last, for a full disk must not cost the screen
            draw_yield(content, yield_picture_path(run))

    for what in (release_trials, trace, picture, report):
        _harmlessly(what)


def _require_flag(arguments: Sequence[str]) -> None:
    if any(a == _FLAG or a.startswith(_FLAG + "=") for a in arguments):
        return
    new_name = MOVED.get(f"ds_squeeze {arguments[0]}") if arguments else None
    if new_name is not None and not Path(arguments[0]).exists():
        raise LaunchError(f"no training script {arguments[0]!r}; use: {new_name}")
    raise LaunchError(f"{_FLAG} FILE is missing\n{USAGE}")


def squeeze(arguments: Sequence[str]) -> int:
    """Launch, wait, report; returns the job's exit code.

    Raises:
        LaunchError: the command line cannot be launched. Nothing has started, as in the other cases.
        ConfigError: the configuration cannot be used.
        RunInUseError: another run uses the run's directory.
    """
    _require_flag(arguments)
    _prepare_environment()
    from deepspeed.launcher import runner  # takes seconds, and looks at the environment

    config_file, options, parsed = take_flag(arguments, runner.parse_args)
    changed = redirect_to_rank(parsed)
    config = load_config(config_file)
    if not parsed.module and not Path(parsed.user_script).exists():
        raise LaunchError(f"there is no training script {parsed.user_script}")
    own_port = free_port() if needs_port(options, os.path.isfile(parsed.hostfile)) else None
    if own_port is not None:
        changed.master_port = own_port

    run = config.run.directory
    is_first_node = changed.node_rank <= 0  # with --no_ssh every node has a launcher
    with _ended_once(), ExitStack() as around:
        try:
            if (why := why_no_proc()) is not None:
                raise PageError(why)
            check_ours(run)
            directory = fresh_directory(runtime_dir())
            around.callback(_harmlessly, close_directory, directory, own_port)
            around.callback(os.close, claim_directory(directory, own_port))
            if is_first_node:
                around.enter_context(RunLock(run, directory))
            _begin_records(run)
        except (PageError, OSError) as error:  # another user's doing, or a full disk: neither must stop a training
            log.warning("nothing is squeezed or recorded; the training runs as usual: %s", error)
            parsed.master_port = changed.master_port
            if own_port is not None:
                around.callback(_harmlessly, remove_buffers_soon, own_port)
            return _launch(runner, parsed)
        os.environ[rank.CONFIG] = str(Path(config_file).resolve())
        os.environ[rank.RUN] = str(run)
        os.environ[DIRECTORY_VARIABLE] = str(directory)
        for lock in unheld_build_locks(os.environ):
            log.warning("no process here holds %s; if the job hangs, remove it", lock)
        if changed.bind_cores_to_rank:
            os.environ[rank.PIN_CORES] = "0"
        daemons = partial(running_daemons, directory)
        code = _launch(runner, changed, daemons)
        _harmlessly(_conclude, config, daemons, is_first_node, _reason(code))
    return code


def _conclude(config: Config, daemons: Callable[[], list[int]], is_first_node: bool, reason: str) -> None:
    run, patience_s = config.run.directory, WAIT_FOR_DAEMONS_S + config.run.calibrate_s
    end_daemons(daemons, patience_s)
    if is_first_node:
        await_records(run, patience_s)  # of other nodes, if they write here, and of daemons that die just now
    remove_temporary_folders(run)
    if is_first_node or not events_path(run, 0).exists():  # where they do not, each node reports what it has
        finish(run, config, reason)


def _harmlessly(do: Callable[..., None], *arguments: object) -> None:
    """Do something when the job is over. An error costs a line, and not the job's exit code."""
    try:
        do(*arguments)
    except Exception as error:
        log.error("%s: %s: %s", do.__name__.strip("_").replace("_", " "), type(error).__name__, error)


def _begin_records(run: Path) -> None:
    moved = move_records_aside(run)
    if moved:
        log.info("%d records of an earlier run moved to %s", moved, run / "previous")


def main() -> None:
    """Run the command `ds_squeeze`."""
    logs.set_up()
    print_anything()
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n  {_FLAG} FILE  the configuration of Bubble Squeezer (TOML)")
        print(f"  --version        print the version, and exit\n\n{EXAMPLE}\n")
        print("All other options are those of the deepspeed command:\n", flush=True)
        from deepspeed.launcher import runner

        sys.argv[0] = "deepspeed"  # whose usage it is
        runner.parse_args(["--help"])
    if arguments[:1] == ["--version"]:
        print(f"ds_squeeze {version()}")
        return
    try:
        code = squeeze(arguments)
    except (LaunchError, ConfigError, RunInUseError) as error:
        print(f"ds_squeeze: {error}", file=sys.stderr)
        code = USER_ERROR_STATUS
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    _drop_what_cannot_be_printed()
    sys.exit(code)


def _drop_what_cannot_be_printed() -> None:
    """Nobody reads standard output, or its disk is full. Python's own try at its end would make another exit code."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
