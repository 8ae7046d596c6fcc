"""What a run leaves behind: two JSON-lines files per rank, and a binary file of the side task's units.

`RUN/rank3.events.jsonl` holds one object per line, told apart by its key "r":

    run           version, rank, config, wall_s and t_ns (one instant on both clocks)
    job           job (its index in this file), pid, rank, world_size, stage, stages, micro_batches, t_ns
    step          job, step, start_ns, end_ns, squeezed (false: a window without squeezing, or still
                  observing; null: neither, for the side task started in it, or the guard had the gate shut), work
                  (trial-samples that the side task has trained so far, by the page)
    action        t_ns, action, cause; what the daemon did, other than to plan
    guard         t_ns, step, what, cause, figures; see `squeezer.guard.Decision`
    event         event, actions: what the daemon decided by, and what it did about it; only if asked for
    side          t_ns, event, and what belongs to it: started, ready, exited, given_up, finished
    fault         t_ns, what: a lost or foreign message, a hook that switched itself off
    end           t_ns, lost_messages, dropped_messages, foreign_messages, dedicated (null or see `Dedicated`)

`RUN/rank3.details.jsonl` likewise holds what is of the last steps only (`RotatingFile`):

    bubble        step, epoch, slot, wait, start_ns, end_ns, squeezed, forecast_ns (null: none;
                  the forecast, its low and its high), permit_until_ns (null: shut),
                  side_ns (the side task's CPU time in it), overrun_ns (and from its end to the next one's start),
                  stopped (whether the side task had to be stopped at its end)
    instructions  step, items: [kind, slot, start_ns, end_ns] each
    progress      t_ns, event, work, trials_running, epochs; as the side task says
    overran       t_ns, event, slot, overrun_ns; as the side task says, where only it can know

`RUN/rank3.units.bin`, also of the last steps only, is an array of `UNIT`. `RUN/rank3.units.jsonl` names them, some
of a group per line: `{"group": 0, "trials": K, "units": ["0.Linear forward", …]}`. Times are in ns of CLOCK_MONOTONIC.
"""

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ds_hooks.shared.rotating_file import RotatingFile, read_parts

RECORD_VERSION = 3

DETAILS = frozenset({"bubble", "instructions", "progress", "overran"})
"""The kinds of which only the last are kept."""

SHARES = 4
"""Details and units have two files each, an older one and one that grows."""

UNIT = struct.Struct("<qIIiI")
"""start_ns, wall_ns, cpu_ns, unit (-1: host work between layers), group."""


def events_path(run: Path, rank: int) -> Path:
    """Where the daemon of `rank` writes."""
    return run / f"rank{rank}.events.jsonl"


def details_path(run: Path, rank: int) -> Path:
    """Where the daemon of `rank` writes what is of the last steps only."""
    return run / f"rank{rank}.details.jsonl"


def journal_path(run: Path) -> Path:
    """Where Optuna keeps the study, unless the configuration names another place."""
    return run / "study.journal"


def units_path(run: Path, rank: int) -> Path:
    """Where the side task of `rank` writes; its names lie beside it with the suffix ``.jsonl``."""
    return run / f"rank{rank}.units.bin"


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


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The records in one file, in order; a line that a killed daemon cut short is left out."""
    with path.open(encoding="utf-8") as lines:
        yield from _parsed(lines)


def read_details(run: Path, rank: int) -> Iterator[dict[str, Any]]:
    """What is left of a rank's details, in order."""
    for part in read_parts(details_path(run, rank)):
        yield from _parsed(part.decode(errors="replace").splitlines())


def read_groups(path: Path) -> list[dict[str, Any]]:
    """The groups of units that `path` names, each with its ``trials`` and the names of its ``units``."""
    groups: list[dict[str, Any]] = []
    for line in read_events(path):
        while line["group"] >= len(groups):
            groups.append({"trials": line["trials"], "units": []})
        groups[line["group"]]["units"] += line["units"]
    return groups


def _parsed(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
