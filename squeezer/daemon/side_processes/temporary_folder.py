"""A side task's own folder for temporary files, which goes with the process.

A killed process leaves what it has there, such as the sockets of a data loader's workers.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ds_hooks.shared.private_file import write_text

_PREFIX = "squeezer-side-"


def make_folder(record: Path) -> str | None:
    """Make a folder beside the machine's other temporary files, where paths are short enough for sockets.

    Args:
        record: the file that keeps its path, so that the next one removes it if this process is killed.

    Returns:
        Its path; None on a full disk, or where the path is no text.
    """
    remove_folder(record)
    try:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
    except OSError:
        return None
    try:
        write_text(record, folder)
    except (OSError, ValueError):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return folder


def remove_folders(records: Iterable[Path]) -> None:
    """Remove those folders of killed side tasks that are on this machine."""
    for record in records:
        with suppress(OSError, ValueError):
            if Path(record.read_text(encoding="utf-8")).is_dir():
                remove_folder(record)


def remove_folder(record: Path, known: str | None = None) -> None:
    """Remove the folder that `record` names, if there is one and it is ours.

    Args:
        record: see `make_folder`.
        known: the folder's path, if this process has made it: the record may be gone, with the whole run.
    """
    with suppress(OSError, ValueError):
        folder = Path(known or record.read_text(encoding="utf-8"))
        found = folder.lstat()
        if folder.name.startswith(_PREFIX) and stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        record.unlink()
