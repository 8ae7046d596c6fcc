"""The record that a side task leaves of its units: their names, and when each ran."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from ds_hooks.shared.rotating_file import RotatingFile
from ds_hooks.shared.unit_record import UNIT_RECORD, unit_names_path

_pack = UNIT_RECORD.pack

_BUFFER_BYTES = 2048 * UNIT_RECORD.size
_U32_MAX = 2**32 - 1


class UnitRecords:
    """Units in a rotating file, and their names by group in one that only grows.

    The names' file only grows, because rewriting it would make the side task wait for the disk. A side task that
    continues an earlier one's files continues the numbers of its groups.

    Args:
        path: receives a `UNIT_RECORD` per unit, or per burst of short units. The file beside it with the suffix
            ``.jsonl`` receives the names, one JSON object per line, ``{"group": 0, "trials": K, "units": [...]}``; a
            later line of the same group has its further names. None: nothing is written.
        most_bytes: when `path` is full; see `RotatingFile`.
    """

    def __init__(self, path: Path | None = None, most_bytes: int | None = None) -> None:
        if path is not None and path.exists():
            whole = path.stat().st_size // UNIT_RECORD.size
            os.truncate(path, whole * UNIT_RECORD.size)  # a killed side task may have left a part of one
        self._units = RotatingFile(path, most_bytes) if path else None
        names = unit_names_path(path) if path else None
        self._first_group = _groups_in(names) if names else 0
        self._names_file = RotatingFile(names) if names else None
        self._buffer = bytearray()
        self._trials: list[int] = []
        self._names: list[list[str]] = []
        self._written: list[int] = []  # how many of the names
        self._has_new_names = False

    def add_group(self, trials: int, names: Sequence[str]) -> int:
        """Add a group of `trials` trials, with a unit for each of `names`. Returns its number."""
        self._trials.append(trials)
        self._names.append(list(names))
        self._written.append(0)
        self._has_new_names = True
        return len(self._names) - 1

    def add_burst(self, group: int, first: int, last: int) -> int:
        """Add a name for the burst of units from `first` to `last`. Returns its number."""
        names = self._names[group]
        names.append(f"{names[first]} … {names[last]}")
        self._has_new_names = True
        return len(names) - 1

    def add(self, start_ns: int, wall_ns: int, busy_ns: int, unit: int, group: int) -> None:
        """Record that a unit, or a burst of units, has run."""
        if self._units is None:
            return
        if wall_ns > _U32_MAX:
            wall_ns, busy_ns = _U32_MAX, min(busy_ns, _U32_MAX)
        self._buffer += _pack(start_ns, wall_ns, busy_ns, unit, self._first_group + max(group, 0))
        if len(self._buffer) >= _BUFFER_BYTES:
            self._write()

    def close(self) -> None:
        """Write what is buffered."""
        self._write()
        for file in (self._units, self._names_file):
            if file is not None:
                file.close()

    def _write(self) -> None:
        """Write the units, and before them all names that they may have."""
        if self._names_file is not None and self._has_new_names:
            self._has_new_names = False
            for group, names in enumerate(self._names):
                new = names[self._written[group] :]
                if new:
                    line = {"group": self._first_group + group, "trials": self._trials[group], "units": new}
                    # on a line of its own: a killed side task may have left half a line
                    if not self._names_file.write(f"\n{json.dumps(line)}\n".encode()):
                        self._has_new_names = True
                        break
                    self._written[group] = len(names)
        if self._units is not None and self._buffer:
            self._units.write(self._buffer)
            self._buffer.clear()


def _groups_in(path: Path) -> int:
    """Return how many groups an earlier side task has named."""
    count = 0
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            count = max(count, json.loads(line)["group"] + 1)
        except json.JSONDecodeError:
            continue  # empty, or cut short
    return count
