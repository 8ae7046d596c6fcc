"""What our processes log: short lines on the terminal, complete ones in a file.

    terminal: [squeezer] rank 0: warning: side task ended with status 3; restarting
    file:     2026-11-24T03:20:11.482Z WARNING rank 0 run study squeezer.daemon.side_task_supervisor: side task ended …

The terminal takes level INFO and above, the file DEBUG too. The programs call `set_up` once; nothing is configured at
import. Only our own loggers are touched, never the root logger: it belongs to the user's code. No handler raises, and
none waits long for whoever reads standard error.
"""

import logging
import os
import select
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from ds_hooks.shared.rotating_file import RotatingFile
from ds_hooks.shared.secrets import hide_passwords

LOG_BYTES = 1 << 20
"""When a log file is full; the one before it is kept, too."""
PATIENCE_S = 0.1
"""How long to wait for whoever reads standard error; then the line is dropped, and no later one waits."""

_PACKAGES = {"squeezer": "squeezer", "trials": "trials", "launch": "ds_squeeze"}
"""Package -> the name under which its lines appear on the terminal."""


class TerminalHandler(logging.Handler):
    """Short lines on standard error. The level is named only if it is at least a warning.

    Args:
        rank: named in every line; None: it has none.
    """

    def __init__(self, rank: int | None = None) -> None:
        super().__init__(logging.INFO)
        self._rank = rank
        self._patience_s = PATIENCE_S
        self._is_cut = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, or none if standard error is closed, full or stuck."""
        try:
            if sys.stderr is not None:
                self._write(sys.stderr, self.line(record) + "\n")
        except Exception:
            return  # logging must harm nobody

    def line(self, record: logging.LogRecord) -> str:
        """The line without its end."""
        package = record.name.partition(".")[0]
        rank = "" if self._rank is None else f"rank {self._rank}: "
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        text = _indented(hide_passwords(record.getMessage()))
        return f"[{_PACKAGES.get(package, package)}] {rank}{level}{text}"

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            number = stream.fileno()
        except (OSError, AttributeError):
            stream.write(text)  # no file: nobody to wait for
            stream.flush()
            return
        left = ("\n" * self._is_cut + text).encode(stream.encoding, "backslashreplace")
        while left:
            if not select.select([], [number], [], self._patience_s)[1]:
                self._patience_s = 0.0
                return
            # not more at once: a pipe that takes a byte takes so many, and with the next one it might wait for ever
            left = left[os.write(number, left[: select.PIPE_BUF]) :]
            self._is_cut = bool(left)
        self._patience_s = PATIENCE_S


class FileHandler(logging.Handler):
    """Complete lines in a file of bounded size. A full disk costs the lines, not the process.

    Only the process that made it writes: two that rotate one file would lose lines. A forked one has the terminal.

    Args:
        path: of the file.
        rank: named in every line.
        run: likewise.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, rank: int, run: str) -> None:
        super().__init__()
        self._file = RotatingFile(path, LOG_BYTES)
        self._pid = os.getpid()
        self._origin = f"rank {rank} run {run}"

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line."""
        if os.getpid() != self._pid:
            return
        try:
            self._file.write((self.line(record) + "\n").encode(errors="backslashreplace"))
        except Exception:
            return  # logging must harm nobody

    def line(self, record: logging.LogRecord) -> str:
        """The line without its end."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        return f"{when} {record.levelname} {self._origin} {record.name}: {_indented(hide_passwords(text))}"

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def set_up(*, rank: int | None = None) -> None:
    """Log to the terminal from now on, and nowhere else. A second call replaces the first.

    Args:
        rank: of the device that this process works for; None: it works for no single one.
    """
    _fill_standard_streams()
    sys.excepthook = _print_exception
    terminal = TerminalHandler(rank)
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        for handler in tuple(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.addHandler(terminal)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False


def adopt(name: str, level: int = logging.WARNING) -> None:
    """Have the loggers of another library write where ours do, from `level` on; after `set_up`."""
    logger = logging.getLogger(name)
    logger.handlers[:] = logging.getLogger(next(iter(_PACKAGES))).handlers
    logger.setLevel(level)
    logger.propagate = False


def add_file(path: Path, *, rank: int, run: str) -> None:
    """Log to a file, too. One that cannot be made is named on the terminal, and missed no further.

    Args:
        path: of the file; only this process may write it.
        rank: of the device that this process works for.
        run: what the run is called.
    """
    try:
        handler = FileHandler(path, rank, run)
    except OSError as error:
        logging.getLogger("squeezer").warning("no log file %s: %s", path, error.strerror)
        return
    for package in _PACKAGES:
        logging.getLogger(package).addHandler(handler)


def _fill_standard_streams() -> None:
    """Give what was started with closed standard streams an empty one of each.

    Else the next file that is opened, such as a page, would take that number, and get what libraries and children
    write to standard error.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As Python does at a program's end, but for passwords."""
    with suppress(OSError, AttributeError, ValueError):  # nobody reads standard error
        sys.stderr.write(hide_passwords("".join(traceback.format_exception(kind, error, trace))))


def _indented(text: str) -> str:
    """One record's further lines stand below its first, so that nobody takes them for records."""
    return "\n    ".join(text.splitlines())
