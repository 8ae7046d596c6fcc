"""Options that several sub-commands of `trials` have, and the place of a study that they name."""

import argparse
import shlex
from pathlib import Path
from typing import NoReturn

from ds_hooks.shared import logs
from ds_hooks.shared.command_line import STUDY_NAME_HELP, positive, refuse_command, study_name_of, typed_path
from ds_hooks.shared.secrets import hide_password, hide_passwords, read_storage
from ds_hooks.shared.study_paths import journal_path, trials_directory

PROGRAM = "trials"

STORAGES = "Optuna's journal or a database's URL, or env:NAME or @FILE, which hold one"


def known_location(parsed: argparse.Namespace) -> tuple[str, Path, str]:
    """The same as `location_of`, where there is a storage already."""
    name, directory, storage = location_of(parsed)
    return name, directory, known_storage(parsed, storage)


def known_storage(parsed: argparse.Namespace, storage: str) -> str:
    """Refuse a storage in a file that does not exist: Optuna would make a new one."""
    from sqlalchemy.exc import ArgumentError

    from trials.search.storage.optuna_storage import storage_file

    logs.adopt("optuna")
    try:
        file = storage_file(storage)
    except ArgumentError as error:
        refuse_storage(parsed, storage, error)
    if file is not None and not Path(file).is_file():
        kind = "database" if "://" in storage else "journal"
        named = "allowed: a journal's path or a database's URL"
        unnamed = f"train a study first ({PROGRAM} run), or name its --directory or --storage"
        refuse_command(parsed, f"no {kind} {file}; {unnamed if parsed.storage is None else named}")
    return storage


def location_of(parsed: argparse.Namespace) -> tuple[str, Path, str]:
    """A study's name, directory and storage."""
    name = study_name_of(parsed)
    storage = str(journal_path(parsed.directory)) if parsed.storage is None else storage_of(parsed)
    return name, trials_directory(parsed.directory, name), storage


def storage_of(parsed: argparse.Namespace) -> str:
    """The storage that a command line names. Other users can read that, so it must hold no password."""
    if hide_password(parsed.storage) != parsed.storage:
        refuse_command(
            parsed,
            "other users can read the password on a command line: put the URL into an environment variable and write "
            "--storage env:NAME, or into a file of your own and write --storage @FILE",
        )
    try:
        return read_storage(parsed.storage)
    except ValueError as error:
        refuse_command(parsed, f"--storage {parsed.storage}: {error}")


def refuse_storage(parsed: argparse.Namespace, storage: str, error: Exception) -> NoReturn:
    """End with what a storage has said, without its password."""
    from trials.search.storage.database import StorageError, in_short

    text = f"{error}" if isinstance(error, StorageError) else f"{hide_password(storage)}: {in_short(error)}"
    refuse_command(parsed, hide_passwords(text))


def add_location(parser: argparse.ArgumentParser) -> None:
    """The options that say where a study is."""
    parser.add_argument("--study-name", metavar="NAME", help=STUDY_NAME_HELP)
    parser.add_argument("--storage", metavar="WHERE", help=f"{STORAGES}; default: study.journal in the directory")
    described = "where studies, checkpoints and best weights are; default: studies"
    parser.add_argument("--directory", type=typed_path, default=Path("studies"), metavar="DIR", help=described)


def add_device(parser: argparse.ArgumentParser, cuda: str = "the first visible device") -> None:
    """The option that names a device; `cuda` says which of them is used."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=f"default: cpu; cuda: {cuda}")


def add_threads(parser: argparse.ArgumentParser) -> None:
    """The option that says with how many threads a trial computes."""
    parser.add_argument("--threads", type=positive(int), default=1, metavar="N", help="torch's threads; default: 1")


def add_save(parser: argparse.ArgumentParser) -> None:
    """The option that keeps trials as files."""
    parser.add_argument("--save", type=typed_path, metavar="DIR", help="write hyperparameters and weights there")


def again(parsed: argparse.Namespace) -> str:
    """The options that name the same study on another command line."""
    study = str(parsed.study)
    words = [f"./{study}" if study.startswith("-") else study]
    directory = None if parsed.directory == Path("studies") else str(parsed.directory)
    named = {"--study-name": parsed.study_name, "--storage": parsed.storage, "--directory": directory}
    for option, value in named.items():
        if value is not None:  # one that looks like an option must be told apart
            words += [f"{option}={value}"] if value.startswith("-") else [option, value]
    return shlex.join(words)
