"""Files and directories that only their user reads. What exists already keeps its mode."""

import os
from pathlib import Path


def make_dir(path: Path) -> None:
    """Make a directory with mode 0700, and those above it as usual."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_private(path: str, flags: int) -> int:
    """An opener for `open`: a new file gets mode 0600."""
    return os.open(path, flags, 0o600)


def write_text(path: Path, text: str) -> None:
    """Write a whole file in UTF-8."""
    with open(path, "w", encoding="utf-8", opener=open_private) as file:
        file.write(text)
