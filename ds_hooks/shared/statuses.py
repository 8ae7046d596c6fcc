"""What a side task reports to its daemon: one JSON object per line, on a pipe.

Each status is a frozen dataclass. Its line carries the name of its kind under "event", then its fields:
`{"event":"progress","work":640,"trials_running":4,"epochs":2}`. The daemon records those that it does not use itself
just as they are.
"""

import json
import math
from dataclasses import dataclass, fields
from typing import Any

SIDE_TASK = "trials.side_task.main"
"""The program that sends them."""
MAXIMUM_LINE_BYTES = 65536
MAXIMUM_MESSAGE_CHARACTERS = 4096
"""Of an error's text. Escaped in JSON it still fits into a line."""


class StatusError(Exception):
    """A line that is no status of this version; the message says why and what is allowed."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A submitted study's turn has begun.

    Attributes:
        study: its file.
        name: Optuna's name of it.
    """

    study: str
    name: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The side task asks its gate from now on. Until now, only signals could stop it, and only on a CPU.

    Attributes:
        trials: how many the study has in all.
        busy_ms: the device's time that it has used so far.
        rows: how many train at once, at most.
        gain: how many times faster they train than one after another; 0: it was not measured.
    """

    trials: int
    busy_ms: float
    rows: int
    gain: float


@dataclass(frozen=True, slots=True)
class Progress:
    """An epoch has ended, trials were saved within one, some have begun after a time without any, or the process ends.

    Sums are over the process's life.

    Attributes:
        work: trial-samples trained.
        trials_running: trials under training now.
        epochs: epochs trained, summed over trials.
        samples: of the batches trained on, each counted once however many trials shared it.
        training_ms: the device's time for that, loading included and audits not.
        busy_ms: the device's time for all work since the side task was ready.
        lost: of `work`, what is lost, or would be if the process died now.
    """

    work: int
    trials_running: int
    epochs: int
    samples: float
    training_ms: float
    busy_ms: float
    lost: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The study needs no more training. `work` is as in `Progress`."""

    work: int


@dataclass(frozen=True, slots=True)
class Overran:
    """Work ran on for `overrun_ns` after a bubble of `slot` had ended. Sent where only the side task can measure it."""

    slot: int
    overrun_ns: int


@dataclass(frozen=True, slots=True)
class Starved:
    """A unit is longer than every bubble that came while it waited.

    Attributes:
        unit: its name.
        trials: how many trials it computes at once.
        needs_ms: how long it takes.
        longest_bubble_ms: how much the longest bubble left it.
        remedy: "split" if the group is now trained in halves, or "nothing" if that would not help.
    """

    unit: str
    trials: int
    needs_ms: float
    longest_bubble_ms: float
    remedy: str


@dataclass(frozen=True, slots=True)
class Audited:
    """Trials were compared with the same trials alone. Numbers count from the last such status.

    Attributes:
        audits: how many steps were compared.
        mismatches: how many differed by more than rounding.
        audit_ms: CPU time of the audits, and of asking whether one is due.
        first_ms: of that, for first batches, to which the limit on the cost does not apply.
        all_ms: CPU time of the side task, audits included.
    """

    audits: int
    mismatches: int
    audit_ms: float
    first_ms: float
    all_ms: float


@dataclass(frozen=True, slots=True)
class Mismatched:
    """A fused trial differs from the trial alone.

    Attributes:
        trial: its number in the study.
        trials: how many were fused.
        mode: "training" or "evaluation".
        what: the first difference.
        way: how they were trained: by "rules", "vmap" or "loop".
        then: how they are trained now, from before that step; empty: not at all.
    """

    trial: int
    trials: int
    mode: str
    what: str
    way: str
    then: str


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """`trials` did not fit into memory; now at most `most` train at once. 0: not even one fits."""

    trials: int
    most: int


@dataclass(frozen=True, slots=True)
class MovedOut:
    """The main job needed memory, so the side task's tensors moved to the host.

    Attributes:
        held_bytes: device memory held before.
        limit_bytes: the daemon's limit.
        left_bytes: device memory still held.
    """

    held_bytes: int
    limit_bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class MovedIn:
    """The tensors are back on the device, and hold `held_bytes` of it."""

    held_bytes: int


@dataclass(frozen=True, slots=True)
class Left:
    """The process ends on purpose. Without this status, the study's code has ended it."""


@dataclass(frozen=True, slots=True)
class Error:
    """The side task cannot continue, or has lost something; `message` is for the user."""

    message: str


Status = (
    Serving
    | Ready
    | Progress
    | Finished
    | Overran
    | Starved
    | Audited
    | Mismatched
    | OutOfMemory
    | MovedOut
    | MovedIn
    | Left
    | Error
)

_KINDS: dict[str, type[Status]] = {
    "serving": Serving,
    "ready": Ready,
    "progress": Progress,
    "finished": Finished,
    "overran": Overran,
    "starved": Starved,
    "audited": Audited,
    "mismatched": Mismatched,
    "out_of_memory": OutOfMemory,
    "moved_out": MovedOut,
    "moved_in": MovedIn,
    "left": Left,
    "error": Error,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_FIELDS: dict[type[Status], dict[str, Any]] = {kind: {f.name: f.type for f in fields(kind)} for kind in _NAMES}


def as_fields(status: Status) -> dict[str, Any]:
    """The status as plain data: its kind's name under "event", then its fields."""
    kind = type(status)
    return {"event": _NAMES[kind], **{name: getattr(status, name) for name in _FIELDS[kind]}}


def encode(status: Status) -> bytes:
    """The status as one line, its end included. An error's text is cut to 4096 characters."""
    if isinstance(status, Error) and len(status.message) > MAXIMUM_MESSAGE_CHARACTERS:
        status = Error(status.message[: MAXIMUM_MESSAGE_CHARACTERS - 2] + " …")
    return json.dumps(as_fields(status), separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Status:
    """The status in `line`.

    Raises:
        StatusError: no JSON object, an unknown kind, or fields that are unknown, missing or of another type.
    """
    try:
        named = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StatusError(f"not a line of JSON: {_shown(line)} ({type(error).__name__})") from None
    if not isinstance(named, dict):
        raise StatusError(f"not a JSON object: {_shown(line)}")
    event = named.pop("event", None)
    kind = _KINDS.get(event) if isinstance(event, str) else None
    if kind is None:
        raise StatusError(f"unknown status {_shown(event)}; allowed: {', '.join(_KINDS)}")
    allowed = _FIELDS[kind]
    if named.keys() != allowed.keys():
        raise StatusError(f"status {event} has the fields {_shown(sorted(named))}; allowed: {sorted(allowed)}")
    for name, value in named.items():
        if not _fits(value, allowed[name]):
            raise StatusError(f"status {event}: {name} is {_shown(value)}; allowed: {allowed[name].__name__}")
    return kind(**named)


def _fits(value: object, wanted: Any) -> bool:
    """Whether `value` is of type `wanted`; a number must be finite and fit into 64 bits, or sums of it might not."""
    if isinstance(value, (str, bool)):
        return wanted is str and isinstance(value, str)
    if isinstance(value, float):
        return wanted is float and math.isfinite(value)
    return isinstance(value, int) and wanted in (int, float) and -(2**63) <= value < 2**63


def _shown(value: object) -> str:
    """Short enough for a record, whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else text[:97] + "…"
