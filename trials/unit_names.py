"""The names of a side task's units, and the file that keeps them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class UnitNames:
    """Names by group, and a file that only grows: one that is written anew keeps the side task waiting for the disk.

    A side task that comes after another goes on with the numbers of that one's groups.

    Args:
        path: one JSON object per line, ``{"group": 0, "trials": K, "units": [...]}``. A later line of the same group
            goes on with its names. None: nowhere.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a+", encoding="utf-8") if path else None
        self._trials: list[int] = []
        self._names: list[list[str]] = []
        self._written: list[int] = []  # how many of the names
        self._are_new = False
        self.first_group = 0
        """What the first group's number is in the file."""
        if self._file is not None:
            self._file.seek(0)
            self.first_group = max((line["group"] + 1 for line in map(_parsed, self._file) if line), default=0)
            if self._file.tell():
                self._file.write("\n")  # a killed side task may have left half a line

    def add_group(self, trials: int, names: Sequence[str]) -> int:
        """A group of `trials`, with as many units as `names`; its index."""
        self._trials.append(trials)
        self._names.append(list(names))
        self._written.append(0)
        self._are_new = True
        return len(self._names) - 1

    def add_row(self, group: int, first: int, last: int) -> int:
        """A row of units, from the `first` to the `last` one; its number."""
        names = self._names[group]
        names.append(f"{names[first]} … {names[last]}")
        self._are_new = True
        return len(names) - 1

    def write(self) -> None:
        """Write what is new."""
        if self._file is None or not self._are_new:
            return
        self._are_new = False
        for index, names in enumerate(self._names):
            new = names[self._written[index] :]
            if new:
                line = {"group": self.first_group + index, "trials": self._trials[index], "units": new}
                self._file.write(f"{json.dumps(line)}\n")
                self._written[index] = len(names)
        self._file.flush()

    def close(self) -> None:
        """Write what is new, and close the file."""
        self.write()
        if self._file is not None:
            self._file.close()


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line) if line.strip() else None
    except json.JSONDecodeError:
        return None
