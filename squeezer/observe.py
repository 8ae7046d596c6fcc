"""`squeezer observe`: a job's bubbles, with no configuration file. It becomes the launcher, which prints the table."""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ds_hooks.shared.private_file import make_dir, write_text

OWN_OPTIONS = ("--run",)
CONFIG = "observe.toml"


class ObserveError(Exception):
    """A command line or a directory with which nothing can be observed; the text says why."""


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(our own options, the launcher's arguments): ours stand first, so that a script may have options of that name."""
    taken = 0
    while taken < len(arguments):
        name, joined, _ = arguments[taken].partition("=")
        if name in OWN_OPTIONS:
            taken += 1 if joined else 2
        elif name in ("-h", "--help") and taken == 0:
            taken += 1
        else:
            break
    return list(arguments[:taken]), list(arguments[taken:])


def main_observe(run: Path | None, launched: Sequence[str]) -> NoReturn:
    """Become `ds_squeeze` with a configuration that squeezes nothing; its exit status is the job's.

    Args:
        run: where records and that configuration go, on all nodes of the job; None: a new directory below ``runs``.
        launched: options of DeepSpeed's, the training script and its arguments.

    Raises:
        ObserveError: no script is named, or `run` cannot be written to.
    """
    if not launched:
        raise ObserveError("no training script is named; see squeezer observe --help")
    run = (run or Path("runs", time.strftime("observe-%Y%m%d-%H%M%S"))).absolute()
    config = run / CONFIG
    try:
        make_dir(run)
        # a JSON string is a TOML string
        write_text(config, f"[run]\ndirectory = {json.dumps(str(run), ensure_ascii=False)}\n")
    except OSError as error:
        raise ObserveError(f"cannot write to {run}: {error.strerror}") from None
    sys.stdout.flush()
    # -P: a package of the user's that is called launch must not stand in for ours
    os.execv(sys.executable, [sys.executable, "-P", "-m", "launch.ds_squeeze", "--squeezer", str(config), *launched])
