"""Events and actions as plain data, for a run's records."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from squeezer.policy.actions import Action
from squeezer.policy.events import Event


def as_record(event: Event, actions: Iterable[Action]) -> dict[str, Any]:
    """An event and what was done about it."""
    return {"event": _plain(event), "actions": [_plain(action) for action in actions]}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value):
        return [type(value).__name__, *(_plain(getattr(value, each.name)) for each in fields(value))]
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value
