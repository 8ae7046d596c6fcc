"""Writes a run's records: they collect in memory, and go to disk while the device is idle anyway."""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from ds_hooks.shared.private_file import make_dir
from ds_hooks.shared.rotating_file import RotatingFile
from ds_hooks.shared.secrets import hide_passwords
from squeezer.records.facts import KINDS, Fact
from squeezer.records.in_use import hold
from squeezer.records.layout import DETAILS, SHARES, details_path, events_path

_FIELDS = {kind: [field.name for field in fields(kind)] for kind in KINDS}


class RecordError(Exception):
    """Records cannot be written; the message says where and why."""


class Recorder:
    """Collects records in memory; its owner decides when to write them. Until it is closed, others see that it writes.

    Args:
        run: the directory.
        rank: whose records these are.
        keep_bytes: how much details and units may take on disk. None: no limit.

    Raises:
        RecordError: the directory or the files cannot be made.
    """

    def __init__(self, run: Path, rank: int, keep_bytes: int | None = None) -> None:
        most_bytes = None if keep_bytes is None else keep_bytes // SHARES
        try:
            make_dir(run)
            self._held = hold(run, rank)
            self._events = RotatingFile(events_path(run, rank))
            self._details = RotatingFile(details_path(run, rank), most_bytes)
        except OSError as error:
            raise RecordError(f"cannot write to run.directory {run}: {error.strerror}") from error
        self._waiting: list[dict[str, Any] | Fact] = []

    def add(self, kind: str, **fields: Any) -> None:
        """Remember one record."""
        self._waiting.append({"r": kind, **fields})

    def add_fact(self, fact: Fact) -> None:
        """Remember what the main job did."""
        self._waiting.append(fact)

    def write(self, at_least: int = 1) -> None:
        """Write the records that wait, if there are `at_least` that many: batches are cheaper."""
        if len(self._waiting) < at_least:
            return
        encode = json.JSONEncoder(separators=(",", ":")).encode
        records = [each if isinstance(each, dict) else _as_record(each) for each in self._waiting]
        for file, are_details in ((self._events, False), (self._details, True)):
            lines = [encode(record) for record in records if (record["r"] in DETAILS) is are_details]
            if lines:
                # begins anew: a killed daemon may have left half a line
                file.write(hide_passwords("\n".join(["", *lines, ""])).encode())
        self._waiting.clear()

    def close(self) -> None:
        """Write all and close."""
        self.write()
        self._events.close()
        self._details.close()
        os.close(self._held)


def _as_record(fact: Fact) -> dict[str, Any]:
    kind = type(fact)
    return {"r": KINDS[kind], **{name: getattr(fact, name) for name in _FIELDS[kind]}}
