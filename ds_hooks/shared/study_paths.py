"""Where studies are kept: several in one directory, each with a directory of its own for claims and checkpoints.

STUDIES/study.journal     Optuna's, of all of them, unless they are in a database
STUDIES/NAME/…            see `trials.search.files.checkpoint_files`
"""

import hashlib
from pathlib import Path
from urllib.parse import quote

LONGEST_NAME_BYTES = 255
"""No usual file system has longer names."""


def journal_path(studies: Path) -> Path:
    """Where Optuna keeps the studies in the directory `studies`, unless a storage is named."""
    return studies / "study.journal"


def trials_directory(studies: Path, name: str) -> Path:
    """Where the study called `name` keeps its claims and checkpoints."""
    quoted = directory_name(name)
    return studies / (quoted if quoted.strip(".") else f"%{quoted}")  # else "" and ".." would be other directories


def directory_name(name: str) -> str:
    """A name that a directory may have, for a study of any name; no two have the same."""
    quoted = quote(name, safe="")
    if len(quoted) <= LONGEST_NAME_BYTES:
        return quoted
    digest = f"%-{hashlib.sha256(name.encode()).hexdigest()[:32]}"  # nothing that is quoted has this
    return quoted[: LONGEST_NAME_BYTES - len(digest)] + digest
