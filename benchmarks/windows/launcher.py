"""`ds_squeeze` with the benchmark's daemons; takes `ds_squeeze`'s options.

DeepSpeed starts this same file once per rank, where it is `launch/rank.py` except for the daemon that it starts.
"""

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__" and sys.path[0] == str(Path(__file__).resolve().parent):
    del sys.path[0]  # run by its path, so the modules beside it would be importable by their bare names

from launch import ds_squeeze, rank


def daemon_command(*arguments: Any) -> list[str]:
    """`rank.daemon_command` with the benchmark's daemon."""
    command = _original(*arguments)
    at = command.index("squeezer")
    return [*command[:at], "benchmarks.windows.daemon", *command[at:]]


_original = rank.daemon_command

if __name__ == "__main__":
    if rank.CONFIG in os.environ:
        with mock.patch.object(rank, "daemon_command", daemon_command):
            rank.main()
    else:
        with mock.patch.object(rank, "__file__", __file__):
            ds_squeeze.main()
