"""Where studies are kept: several in one directory, each with a directory of its own for claims and checkpoints.

STUDIES/study.journal     Optuna's, of all of them, unless they are in a database
STUDIES/NAME/…            see `trials.search.files.checkpoint_files`
"""

from pathlib import Path
from urllib.parse import quote


def journal_path(studies: Path) -> Path:
    """Where Optuna keeps the studies in the directory `studies`, unless a storage is named."""
    return studies / "study.journal"


def trials_directory(studies: Path, name: str) -> Path:
    """Where the study called `name` keeps its claims and checkpoints."""
    quoted = quote(name, safe="")
    return studies / (quoted if quoted.strip(".") else f"%{quoted}")  # else "" and ".." would be other directories
