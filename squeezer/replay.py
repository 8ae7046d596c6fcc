"""Replays a recorded run through the state machine: the same events must give the same actions.

A run records them with `record_events = true` in its configuration. Whatever changes the machine's decisions on purpose
changes the recorded traces in tests/unit/squeezer/golden/ too: `squeezer replay TRACE` shows how, and with `--write` it
writes what the machine does now.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from squeezer.config import GuardTable, SqueezeTable
from squeezer.policy.events import Event, Side, SideChanged
from squeezer.policy.plain import as_record
from squeezer.policy.state import GateMachine, Policy
from squeezer.records.layout import RECORD_VERSION, events_path, recorded_ranks
from squeezer.records.reader import read_events

_EVENTS = {kind.__name__: kind for kind in get_args(Event)}
SHOWN = 10
"""How many differences of one rank are printed."""


class ReplayError(Exception):
    """What cannot be replayed; the text says why, and what can be."""


def main_replay(recorded: Path, *, write: bool) -> int:
    """Print where the machine decides otherwise than `recorded`; 1 if it does anywhere, else 0.

    Args:
        recorded: a compressed trace, or the directory of a run.
        write: also write what it decides now: over the trace, or beside a run's own records.

    Raises:
        ReplayError: nothing is recorded there, or nothing that this version understands.
    """
    differs = False
    for name, records, target in _traces(recorded):
        try:
            pairs = list(replay(records))
            found = [(index, old, new) for index, (old, new) in enumerate(pairs) if old["actions"] != new["actions"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ReplayError(f"{name}: not recorded by this version: {type(error).__name__}: {error}") from error
        if not pairs:
            raise ReplayError(f"{name}: no events are recorded here")
        differs = differs or bool(found)
        print(f"{name}: {len(pairs)} events, {len(found)} answered differently")
        for index, old, new in found[:SHOWN]:
            print(f"  event {index}: {_short(old['event'])}")
            print(f"    recorded: {_short(old['actions'])}\n    now:      {_short(new['actions'])}")
        if len(found) > SHOWN:
            print(f"  … and {len(found) - SHOWN} more")
        if write:
            try:
                write_golden(target, records)
            except OSError as error:
                raise ReplayError(f"cannot write {target}: {error.strerror}") from error
            print(f"  written to {target}")
    return int(differs)


def _traces(recorded: Path) -> Iterator[tuple[str, list[dict[str, Any]], Path]]:
    """(name, records, where to write) of the one trace, or of each rank of a run that recorded events."""
    if not recorded.is_dir():
        try:
            yield recorded.name, read_golden(recorded), recorded
        except (OSError, EOFError, zlib.error, UnicodeDecodeError, json.JSONDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ReplayError(
                f"{recorded}: not a recorded trace (.jsonl.gz) nor a run's directory: {reason}"
            ) from error
        return
    any_events = False
    for rank in recorded_ranks(recorded):
        records = [record for record in read_events(events_path(recorded, rank)) if record["r"] in ("run", "event")]
        versions = {record["version"] for record in records if record["r"] == "run"} - {RECORD_VERSION}
        if versions:
            raise ReplayError(f"{recorded}: record version {versions.pop()}; allowed: version {RECORD_VERSION}")
        if any(record["r"] == "event" for record in records):
            any_events = True
            yield f"rank {rank}", records, recorded / f"rank{rank}.replay.jsonl.gz"
    if not any_events:
        raise ReplayError(f"{recorded}: no events are recorded here; set record_events = true in [run], and run again")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:199]}…"


def replay(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """(recorded, replayed) for each event of one rank's records, in order.

    Args:
        records: all that `record.read_events` gives. Each "run" among them begins with a new machine.
    """
    machine: GateMachine | None = None
    for record in records:
        if record["r"] == "run":
            machine = GateMachine(_policy(record["config"]))
        elif record["r"] == "event":
            if machine is None:
                raise ValueError("the records do not begin with a run")
            event = _event(record["event"])
            actions = machine.handle(event)
            machine.validate()
            yield record, as_record(event, actions)


def read_golden(path: Path) -> list[dict[str, Any]]:
    """The records of a compressed file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_golden(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write what replaying needs of `records`: the runs and the events, as they would be answered now."""
    kept = list(records)
    answers = iter(replay(kept))
    content = []
    for record in kept:
        if record["r"] == "run":
            policy = {name: record["config"][name] for name in ("squeeze", "guard")}
            content.append({"r": "run", "config": policy})
        elif record["r"] == "event":
            content.append({"r": "event", **next(answers)[1]})
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in content)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _policy(config: Mapping[str, Any]) -> Policy:
    return SqueezeTable(**config["squeeze"]).policy(GuardTable(**config["guard"]))


def _event(plain: list[Any]) -> Event:
    name, *values = plain
    kind = _EVENTS[name]
    if kind is SideChanged:
        return SideChanged(Side[values[0]])
    made: Event = kind(*values)
    return made
