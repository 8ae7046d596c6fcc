"""What all command lines share: one-line errors, an example in each --help, --version, completion."""

import argparse
import difflib
import io
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ds_hooks.shared.processes.endings import USER_ERROR_STATUS
from ds_hooks.shared.renamed_commands import MOVED, refuse
from ds_hooks.shared.user_paths import user_path

DISTRIBUTION = "bubble-squeezer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One sub-command.

    Attributes:
        name: what the user types.
        summary: one line for --help, without a full stop.
        example: a command line that works, shown at the end of its --help.
        run: does it; returns the exit status.
        add_arguments: declares its arguments.
    """

    name: str
    summary: str
    example: str
    run: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None]


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that reports a mistake in one line, and takes no abbreviated options."""

    def __init__(self, **options: Any) -> None:
        options |= {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**options)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """What the words of a command line say. One too many is a mistake in the sub-command that they name."""
        parsed, unknown = self.parse_known_args(words)
        if unknown:
            refuse_command(parsed, f"unrecognized arguments: {' '.join(unknown)}; see {parsed.program} --help")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Exit with one line and the status of a user's mistake."""
        self.exit(USER_ERROR_STATUS, f"{self.prog}: {message}; see {self.prog} --help\n")


def print_anything() -> None:
    """Let standard output show as escapes what its encoding lacks, as in the locale C: a path, or a × in a table."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


STUDY_HELP = "a Python file that defines one study"
STUDY_NAME_HELP = "the study's name in Optuna; default: the file's, without .py"


def make_parser(
    program: str, description: str, commands: Sequence[Command], load_shtab: Callable[[], ModuleType]
) -> Parser:
    """The parser of `program`; what it parses has the command's `run`.

    Args:
        program: its name.
        description: one sentence.
        commands: its sub-commands.
        load_shtab: imports shtab, which writes completion scripts. This package imports the standard library only.
    """
    parser = Parser(prog=program, description=description, epilog=_example(commands[0].example))
    add_version(parser)
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        const=load_shtab,
        choices=("bash", "zsh", "tcsh"),
        help="print a completion script for this shell, and exit",
    )
    children = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        child = children.add_parser(
            command.name, help=command.summary, description=_sentence(command.summary), epilog=_example(command.example)
        )
        command.add_arguments(child)
        child.set_defaults(run=command.run, program=child.prog)
    return parser


def add_version(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the option --version."""
    parser.add_argument("--version", action=_Version, help="print the version, and exit")


def study_name_of(parsed: argparse.Namespace) -> str:
    """The name of the study that a command line names; the file's, unless it says another.

    One of which storages would make something else ends the process: without any, Optuna draws one.
    """
    name: str = parsed.study.stem if parsed.study_name is None else parsed.study_name
    problem = "" if name else "is empty"
    try:
        name.encode()
    except UnicodeEncodeError:
        problem = f"{name!r} is not UTF-8"
    if problem:
        refuse_command(parsed, f"the study's name {problem}; allowed: --study-name NAME, with any other")
    return name


def refuse_command(parsed: argparse.Namespace, message: object) -> NoReturn:
    """End the process for a mistake of the user's, with one line that begins with the sub-command's name."""
    refuse(parsed.program, message)


def run_command(parsed: argparse.Namespace) -> int:
    """Run a parsed sub-command.

    Returns:
        Its exit status: that of SIGPIPE if whoever read its output has gone, and of SIGINT if Ctrl-C ended it, such as
        in the middle of a study's own code.
    """
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not output.poll(0):  # it was another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush at its end
        return 128 + signal.SIGPIPE


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """The type of an argument that is a finite number of `kind` (`int` or `float`) above 0."""

    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"  # argparse names it in its error
    return parse


def typed_path(text: str) -> Path:
    """The type of an argument that is a path. Shells leave the ~ in `--directory=~/studies` as it is."""
    try:
        return Path(user_path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def version() -> str:
    """The installed distribution's version."""
    from importlib import metadata  # slow to import, and seldom needed

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown: not installed"


def refuse_unknown_command(program: str, arguments: Sequence[str], known: Collection[str]) -> None:
    """Exit with one line if the first word is no command of `program`: where it went, or what was meant."""
    words = [word for word in arguments if not word.startswith("-")]
    if not words or words[0] in known or arguments[0].startswith("-"):
        return
    moved = MOVED.get(f"{program} {words[0]}")
    near = difflib.get_close_matches(words[0], [*known, *_moved_from(program)], n=1)
    if moved is not None:
        hint = f"use: {moved}"
    elif near:
        hint = f"did you mean: {MOVED.get(f'{program} {near[0]}', f'{program} {near[0]}')}"
    else:
        hint = f"allowed: {', '.join(known)}"
    refuse(program, f"no command {words[0]!r}; {hint}")


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def _example(command_line: str) -> str:
    return f"example:\n  {command_line}"


def _moved_from(program: str) -> list[str]:
    return [old.removeprefix(f"{program} ") for old in MOVED if old.startswith(f"{program} ")]


class _Version(argparse.Action):
    """Looks the version up only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f"{parser.prog} {version()}")
        parser.exit()


_FILES = ("FILE", "STUDY")
_DIRECTORIES = ("DIR", "RUN")


class _PrintCompletion(argparse.Action):
    """Prints a static script: pressing TAB never starts Python. Its `const` imports shtab."""

    def __call__(self, parser: argparse.ArgumentParser, _namespace: Any, shell: Any, _option: Any = None) -> NoReturn:
        shtab = self.const()
        _complete_paths(parser, shtab.FILE, shtab.DIRECTORY)
        print(shtab.complete(parser, shell))
        parser.exit()


def _complete_paths(parser: argparse.ArgumentParser, files: object, directories: object) -> None:
    """Have arguments complete to paths, by what their metavar says. `files`, `directories`: how shtab calls these."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _complete_paths(child, files, directories)
        elif action.metavar in _FILES:
            vars(action)["complete"] = files  # where shtab looks
        elif action.metavar in _DIRECTORIES:
            vars(action)["complete"] = directories
