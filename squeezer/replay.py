"""Replays a recorded run through the state machine: the same events must give the same actions.

A run records them with `record_events = true` in its configuration. What changes the machine's mind on purpose changes
the recorded runs in tests/unit/squeezer/golden/ too: `python -m squeezer.replay FILE` writes anew what it would do now.
"""

import gzip
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from squeezer.config import GuardTable, SqueezeTable
from squeezer.policy import state

_EVENTS = {kind.__name__: kind for kind in get_args(state.Event)}


def as_record(event: state.Event, actions: Iterable[state.Action]) -> dict[str, Any]:
    """An event and what was done about it, as plain data."""
    return {"event": _plain(event), "actions": [_plain(action) for action in actions]}


def replay(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """(recorded, replayed) for each event of one rank's records, in order.

    Args:
        records: all that `record.read_events` gives. Each "run" among them begins with a new machine.
    """
    machine: state.GateMachine | None = None
    for record in records:
        if record["r"] == "run":
            machine = state.GateMachine(_policy(record["config"]))
        elif record["r"] == "event":
            assert machine is not None, "records begin with a run"
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


def _policy(config: Mapping[str, Any]) -> state.Policy:
    return SqueezeTable(**config["squeeze"]).policy(GuardTable(**config["guard"]))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value):
        return [type(value).__name__, *(_plain(getattr(value, each.name)) for each in fields(value))]
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


def _event(plain: list[Any]) -> state.Event:
    name, *values = plain
    kind = _EVENTS[name]
    if kind is state.SideChanged:
        return state.SideChanged(state.Side[values[0]])
    made: state.Event = kind(*values)
    return made


if __name__ == "__main__":
    golden = Path(sys.argv[1])
    write_golden(golden, read_golden(golden))
