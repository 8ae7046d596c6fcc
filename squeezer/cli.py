"""The `squeezer` command."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ds_hooks.shared import logs
from ds_hooks.shared.endings import USER_ERROR_STATUS
from ds_hooks.shared.page_file import PageError
from squeezer.config import ConfigError, load_config
from squeezer.doctor import main_doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; a mistake of the user's ends with one clear line and status 2."""
    parser = argparse.ArgumentParser(
        prog="squeezer", description="Use the bubbles of DeepSpeed's pipeline parallelism."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    daemon = commands.add_parser("daemon", help="serve one device, before, during and after the jobs on it")
    daemon.add_argument("--config", type=Path, required=True, metavar="FILE", help="the squeezer file (TOML)")
    daemon.add_argument("--run", type=Path, metavar="DIR", help="where records go; default: the file's run.directory")
    daemon.add_argument("--local-rank", type=int, default=0, metavar="N", help="the device's number on this machine")
    daemon.add_argument("--job-pid", type=int, metavar="PID", help="serve only this rank, and end with it")
    daemon.add_argument(
        "--pid-file", type=Path, metavar="FILE", help="what names this process to others: removed at its end"
    )
    report = commands.add_parser("report", help="print what a run gave and what it cost")
    report.add_argument("run", type=Path, metavar="RUN", help="the directory of a run")
    report.add_argument("--json", action="store_true", help="as JSON")
    why = commands.add_parser("why", help="tell what was not squeezed, and the cause of each decision")
    why.add_argument("run", type=Path, metavar="RUN", help="the directory of a run")
    why.add_argument("--rank", type=int, metavar="N", help="only this rank")
    doctor = commands.add_parser("doctor", help="tell what this machine allows, and which way is taken for each thing")
    doctor.add_argument("--device", type=int, default=0, metavar="N", help="the CUDA device to probe, if there is one")
    parsed = parser.parse_args(arguments)
    try:
        if parsed.command == "daemon":
            with ExitStack() as ends:
                if parsed.pid_file is not None:
                    ends.callback(_remove, parsed.pid_file)
                return _daemon(parsed)
        if parsed.command == "doctor":
            return main_doctor(parsed.device)
        return _tell(parsed)
    except (ConfigError, PageError) as error:
        print(f"squeezer: {error}", file=sys.stderr)
        return USER_ERROR_STATUS


def _daemon(parsed: argparse.Namespace) -> int:
    from squeezer.daemon.loop import Daemon
    from squeezer.daemon.receiver import DaemonError
    from squeezer.records.layout import log_path
    from squeezer.records.writer import RecordError

    logs.set_up()
    config = load_config(parsed.config)
    run = (parsed.run or config.run.directory).resolve()
    try:
        daemon = Daemon(config, run, parsed.local_rank, job_pid=parsed.job_pid)
    except (DaemonError, RecordError) as error:
        print(f"squeezer: {error}", file=sys.stderr)
        return USER_ERROR_STATUS
    logs.set_up(rank=daemon.rank)
    logs.add_file(log_path(run, daemon.rank), rank=daemon.rank, run=run.name)
    daemon.run()
    return 0


def _remove(pid_file: Path) -> None:
    """With its directory, if nobody else uses that."""
    pid_file.unlink(missing_ok=True)
    with suppress(OSError):
        pid_file.parent.rmdir()


def _tell(parsed: argparse.Namespace) -> int:
    from squeezer.records.reader import ReportError
    from squeezer.reports.report import main_report
    from squeezer.reports.why import main_why

    try:
        if parsed.command == "why":
            return main_why(parsed.run, parsed.rank)
        return main_report(parsed.run, parsed.json)
    except ReportError as error:
        print(f"squeezer: {error}", file=sys.stderr)
        return USER_ERROR_STATUS


if __name__ == "__main__":
    raise SystemExit(main())
