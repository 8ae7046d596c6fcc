"""Writes a run's records: collected in memory, and put on disk while the device is idle anyway."""

import json
from pathlib import Path
from typing import Any

from ds_hooks.shared.rotating_file import RotatingFile
from squeezer.records.layout import DETAILS, SHARES, details_path, events_path


class RecordError(Exception):
    """Records cannot be written; the message says where and why."""


class Recorder:
    """Collects in memory and writes when the device is idle anyway.

    Args:
        run: the directory.
        rank: whose records these are.
        keep_bytes: what details and units may take on disk. None: whatever they take.

    Raises:
        RecordError: the directory or the files cannot be made.
    """

    def __init__(self, run: Path, rank: int, keep_bytes: int | None = None) -> None:
        most_bytes = None if keep_bytes is None else keep_bytes // SHARES
        try:
            run.mkdir(parents=True, exist_ok=True)
            self._events = RotatingFile(events_path(run, rank))
            self._details = RotatingFile(details_path(run, rank), most_bytes)
        except OSError as error:
            raise RecordError(f"cannot write to run.directory {run}: {error.strerror}") from error
        self._waiting: list[dict[str, Any]] = []

    def add(self, kind: str, **fields: Any) -> None:
        """Remember one record."""
        self._waiting.append({"r": kind, **fields})

    def write(self, at_least: int = 1) -> None:
        """Write what waits, if there are `at_least` so many: all at once is cheaper, with the code in the caches."""
        if len(self._waiting) < at_least:
            return
        encode = json.JSONEncoder(separators=(",", ":")).encode
        for file, are_details in ((self._events, False), (self._details, True)):
            lines = [encode(record) for record in self._waiting if (record["r"] in DETAILS) is are_details]
            if lines:
                # begins anew: a killed daemon may have left half a line
                file.write("\n".join(["", *lines, ""]).encode())
        self._waiting.clear()

    def close(self) -> None:
        """Write all and close."""
        self.write()
        self._events.close()
        self._details.close()
