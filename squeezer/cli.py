"""The `squeezer` command. Each sub-command imports what it needs only when it runs."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import ModuleType

from ds_hooks.shared.command_line import (
    STUDY_HELP,
    STUDY_NAME_HELP,
    Command,
    make_parser,
    positive,
    print_anything,
    refuse_command,
    refuse_unknown_command,
    run_command,
    study_name_of,
    typed_path,
)
from ds_hooks.shared.renamed_commands import refuse

PROGRAM = "squeezer"
QUEUE_HELP = "the queue's directory, as in [side] queue"
DESCRIPTION = "Use the pipeline bubbles of DeepSpeed jobs, and see what that costs."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit status. A mistake of the user's ends with one clear line and status 2."""
    print_anything()
    words = list(sys.argv[1:] if arguments is None else arguments)
    refuse_unknown_command(PROGRAM, words, [command.name for command in COMMANDS])
    launched: list[str] = []
    if words[:1] == ["observe"]:  # what follows its own options is DeepSpeed's and the script's
        from squeezer.observe import split_arguments

        own, launched = split_arguments(words[1:])
        words = ["observe", *own]
    parsed = make_parser(PROGRAM, DESCRIPTION, COMMANDS, _shtab).parse(words)
    parsed.launched = launched

    from ds_hooks.shared.page.file import PageError
    from squeezer.config import ConfigError
    from squeezer.own_packages import HiddenPackageError

    try:
        return run_command(parsed)
    except (ConfigError, HiddenPackageError, PageError) as error:
        refuse_command(parsed, error)


def ds_squeeze() -> None:
    """Run the command `ds_squeeze`. It is found from here, because a user's module may hide its package."""
    from squeezer.own_packages import HiddenPackageError, check_own_packages

    try:
        check_own_packages()
    except HiddenPackageError as error:
        refuse("ds_squeeze", error)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "launch.ds_squeeze", *sys.argv[1:]])


def _daemon(parsed: argparse.Namespace) -> int:
    from ds_hooks.shared import logs
    from ds_hooks.shared.processes.identity import why_no_pidfd, why_no_proc
    from ds_hooks.shared.processes.signals import ignore_signals_to_others
    from squeezer.daemon.daemon_keeper import keep, shield

    logs.set_up()
    if (why := why_no_proc() or why_no_pidfd()) is not None:
        refuse_command(parsed, why)
    ignore_signals_to_others()
    with ExitStack() as ends:
        if parsed.pid_file is not None:
            ends.callback(_remove, parsed.pid_file)
        if parsed.job_pid is None:
            return shield(partial(_serve, parsed))
        status = keep(partial(_serve, parsed), parsed.job_pid)
        if status:
            _clear_up(parsed)
        return status


def _serve(parsed: argparse.Namespace, earlier_ended: str | None = None) -> int:
    from ds_hooks.shared import logs
    from ds_hooks.shared.page.file import PageError
    from ds_hooks.shared.processes.parent import adopt_orphans
    from squeezer.config import ConfigError, load_config
    from squeezer.daemon.loop import Daemon
    from squeezer.daemon.receiver import DaemonError
    from squeezer.own_packages import HiddenPackageError, check_own_packages
    from squeezer.records.layout import log_path
    from squeezer.records.writer import RecordError

    try:
        check_own_packages()
        config = load_config(parsed.config)
        run = (parsed.run_directory or config.run.directory).absolute()
        daemon = Daemon(config, run, parsed.local_rank, job_pid=parsed.job_pid, earlier_ended=earlier_ended)
    except (ConfigError, DaemonError, HiddenPackageError, PageError, RecordError) as error:
        refuse_command(parsed, error)
    logs.set_up(rank=daemon.rank)
    logs.add_file(log_path(run, daemon.rank), rank=daemon.rank, run=run.name)
    adopt_orphans()  # of side tasks
    daemon.run()
    return 0


def _clear_up(parsed: argparse.Namespace) -> None:
    """Remove what a killed daemon would have removed. Its launcher would, too, but may be on another machine."""
    from ds_hooks.shared.page.file import runtime_dir
    from squeezer.config import ConfigError, load_config
    from squeezer.daemon.run_directory import remove_left
    from squeezer.daemon.side_processes.temporary_folder import remove_folder
    from squeezer.records.layout import temporary_folder_path

    if not remove_left(runtime_dir(), parsed.local_rank):
        return
    with suppress(ConfigError):
        run = (parsed.run_directory or load_config(parsed.config).run.directory).absolute()
        remove_folder(temporary_folder_path(run, int(os.environ.get("RANK", parsed.local_rank))))


def _add_daemon(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=typed_path, required=True, metavar="FILE", help="the configuration (TOML)")
    parser.add_argument(
        "--run", dest="run_directory", type=typed_path, metavar="DIR", help="where records go; default: run.directory"
    )
    parser.add_argument("--local-rank", type=int, default=0, metavar="N", help="the device's number on this machine")
    parser.add_argument(
        "--job-pid", type=int, metavar="PID", help="serve only this process, end with it, and restart after a crash"
    )
    parser.add_argument("--pid-file", type=typed_path, metavar="FILE", help="a file to remove at the end")


def _remove(pid_file: Path) -> None:
    """With its directory and the directory of all runs, if nobody else uses those."""
    from squeezer.daemon.run_directory import leave_directory

    with suppress(OSError):
        if pid_file.read_text(encoding="ascii") == str(os.getpid()):  # else it is the next daemon's
            pid_file.unlink()
    leave_directory(pid_file.parent)


def _report(parsed: argparse.Namespace) -> int:
    from squeezer.records.reader import ReportError
    from squeezer.reports.report import main_report

    try:
        return main_report(parsed.directory, parsed.json)
    except ReportError as error:
        refuse_command(parsed, error)


def _add_report(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")


def _why(parsed: argparse.Namespace) -> int:
    from squeezer.records.reader import ReportError
    from squeezer.reports.why import main_why

    try:
        return main_why(parsed.directory, parsed.rank)
    except ReportError as error:
        refuse_command(parsed, error)


def _add_why(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=typed_path, metavar="RUN", help="a run's directory")


def _doctor(parsed: argparse.Namespace) -> int:
    import os

    from squeezer.doctor import main_doctor, main_measure
    from squeezer.fix_mps import main_fix_mps

    if parsed.measure:
        return main_measure(os.environ, parsed.device)
    if parsed.fix_mps:
        return main_fix_mps(os.environ, run=parsed.run_fix)
    if parsed.run_fix:
        refuse_command(parsed, "--run goes with --fix-mps")
    return main_doctor(parsed.device)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the CUDA device to probe, if there is one")
    parser.add_argument(
        "--fix-mps", action="store_true", help="print the commands that start an MPS server for you, and nothing else"
    )
    parser.add_argument(
        "--measure", action="store_true", help="measure what an unused CUDA device allows, and keep it; takes a minute"
    )
    parser.add_argument("--run", dest="run_fix", action="store_true", help="with --fix-mps: execute them, too")


def _replay(parsed: argparse.Namespace) -> int:
    from squeezer.replay import ReplayError, main_replay

    try:
        return main_replay(parsed.recorded, write=parsed.write)
    except ReplayError as error:
        refuse_command(parsed, error)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recorded",
        type=typed_path,
        metavar="FILE",
        help="a recorded trace (.jsonl.gz), or the directory of a run with record_events = true",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write what the daemon decides now: into the trace, or for a run into RUN/rankN.replay.jsonl.gz",
    )


def _observe(parsed: argparse.Namespace) -> int:
    from squeezer.observe import ObserveError, main_observe
    from squeezer.own_packages import check_own_packages

    check_own_packages()
    try:
        main_observe(parsed.run_directory, parsed.launched)
    except ObserveError as error:
        refuse_command(parsed, error)


def _add_observe(parser: argparse.ArgumentParser) -> None:
    parser.usage = "squeezer observe [--run DIR] [options of deepspeed] SCRIPT [ARGUMENT …]"
    parser.add_argument(
        "--run",
        dest="run_directory",
        type=typed_path,
        metavar="DIR",
        help="where records go; must come first; default: runs/observe-DATE-TIME",
    )


def _submit(parsed: argparse.Namespace) -> int:
    from ds_hooks.shared.study_queue import Submission, SubmissionError
    from squeezer.queue_commands import main_submit

    study = parsed.study.absolute()
    if not study.is_file():
        refuse_command(parsed, f"there is no file {study}")
    submission = Submission(name=study_name_of(parsed), study=study, priority=parsed.priority, share=parsed.share)
    try:
        return main_submit(submission, parsed.queue)
    except (SubmissionError, OSError) as error:
        refuse_command(parsed, error)


def _add_submit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=typed_path, metavar="STUDY", help=STUDY_HELP)
    parser.add_argument("--queue", type=typed_path, required=True, metavar="DIR", help=QUEUE_HELP)
    parser.add_argument("--study-name", metavar="NAME", help=STUDY_NAME_HELP)
    parser.add_argument(
        "--priority", type=int, default=0, metavar="N", help="studies of lower priority wait for this one; default: 0"
    )
    parser.add_argument(
        "--share",
        type=positive(float),
        default=1.0,
        metavar="X",
        help="its share of the devices' time, relative to other studies of its priority; default: 1",
    )


def _queue(parsed: argparse.Namespace) -> int:
    from ds_hooks.shared.study_queue import SubmissionError
    from squeezer.queue_commands import main_queue

    try:
        return main_queue(parsed.directory, parsed.withdraw)
    except (SubmissionError, OSError) as error:
        refuse_command(parsed, error)


def _add_queue(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=typed_path, metavar="DIR", help=QUEUE_HELP)
    parser.add_argument("--withdraw", metavar="NAME", help="end this study first; its trials are kept")


def _shtab() -> ModuleType:
    import shtab

    return shtab


COMMANDS = (
    Command(
        name="observe",
        summary="run a job as deepspeed would, and show how long its devices are idle",
        example="squeezer observe --num_accelerators 2 examples/pretrain.py --steps 100",
        run=_observe,
        add_arguments=_add_observe,
    ),
    Command(
        name="report",
        summary="print what a run gained and what it cost",
        example="squeezer report runs/demo",
        run=_report,
        add_arguments=_add_report,
    ),
    Command(
        name="why",
        summary="print what was not squeezed in a run, and why",
        example="squeezer why runs/demo --rank 0",
        run=_why,
        add_arguments=_add_why,
    ),
    Command(
        name="doctor",
        summary="report what this machine supports, and which fallbacks it needs",
        example="squeezer doctor",
        run=_doctor,
        add_arguments=_add_doctor,
    ),
    Command(
        name="daemon",
        summary="serve one device, for one job after another",
        example="squeezer daemon --config examples/demo.toml --local-rank 0",
        run=_daemon,
        add_arguments=_add_daemon,
    ),
    Command(
        name="submit",
        summary="put a study into a queue, from which daemons take turns at studies",
        example="squeezer submit examples/digits.py --queue runs/queue --share 2",
        run=_submit,
        add_arguments=_add_submit,
    ),
    Command(
        name="queue",
        summary="print the studies in a queue, their states, and how long devices have computed for each",
        example="squeezer queue runs/queue",
        run=_queue,
        add_arguments=_add_queue,
    ),
    Command(
        name="replay",
        summary="repeat a recorded run's decisions, and print which differ now (status 1 if any do)",
        example="squeezer replay tests/unit/squeezer/golden/preemptive.jsonl.gz",
        run=_replay,
        add_arguments=_add_replay,
    ),
)
