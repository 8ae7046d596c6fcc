"""What a user configures: one TOML file, read once, frozen.

Units stand in the keys. The string under a key is its meaning in docs/configuration.md. A study is found beside the
file that names it; the run's directory is relative to where the command is started. Every mistake in the file is named
at once, with its key, its value and what is allowed.
"""

import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ds_hooks.shared.secrets import hide_password, hide_passwords, read_storage
from ds_hooks.shared.study_paths import journal_path, trials_directory
from ds_hooks.shared.user_paths import user_path
from ds_hooks.shared.wire import NOT_IDLE, WaitKind
from squeezer.policy.alone_steps import Draw
from squeezer.policy.state import Policy
from squeezer.records.layout import study_directory

_FOLDER_OF_FILE = "folder_of_file"
_FROM_WHERE_STARTED = "a path, relative to where the command is started"
_NOT_A_MISTAKE_OF_ITS_OWN = "default_factory_not_called"
_SQLITE_MAGIC = b"SQLite format 3\0"


MOST_WITHOUT_STOPS = 0.05
"""The forecast quantile on a device that cannot halt what runs: bubbles that are shorter than forecast cost the job."""


class ConfigError(Exception):
    """A configuration that cannot be used; the text names file, key, value, and what is allowed."""


_Count = Annotated[int, Field(ge=1, description="a whole number, 1 or more")]
_CountOrNone = Annotated[int, Field(ge=0, description="a whole number, 0 or more")]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, description="a number above 0")]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, description="a number, 0 or more")]
_Text = Annotated[str, Field(min_length=1, description="a non-empty text")]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


def _default_name(known: Mapping[str, Any]) -> str:
    return str((known.get("study") or known.get("queue") or Path("study")).stem)


class SqueezeTable(_Table):
    """When bubbles are opened, and for how long."""

    alone_share: Annotated[float, Field(ge=0, le=0.5, description="a number from 0 to 0.5")] = 0.1
    """share of the steps that are left alone, drawn at random: the baseline of the slowdown. The guard leaves half of \
the steps alone while it knows little, and down to an eighth of this share the more closely it knows the slowdown. 0: \
none, so no slowdown is reported, and the guard sees overruns only"""
    alone_block_steps: _Count = 3
    """steps in a row that are left alone at a time. The first does not count, as it still feels the squeezing before \
it, unless it is the only one"""
    observe_steps: _Count = 6
    """first steps of a job, which teach the forecast and are not squeezed"""
    margin_ms: _NotNegative = 0.3
    """if `preemptive` is false: a permit ends this long before the bubble's forecast end; less if ends are known \
better, more after overruns"""
    preemptive: Literal["idle", "stop", False] = Field(default="idle", description='"idle", "stop" or false')
    """"stop": a permit lasts to the bubble's true end, where the side task is stopped (SIGSTOP); "idle": it then runs \
on in idle time, to its unit's end or in waits too short to open, but not in evaluations and steps left alone; the \
kernel's idle class keeps it off a core that is wanted, and where that may not hold, it is stopped; false: a permit \
ends before the forecast end, and a unit that has started runs on. On a GPU always false: it cannot stop a unit"""
    min_bubble_ms: _Positive = 2.0
    """slots with a shorter mean bubble stay shut, and so do bubbles known to be shorter: they are mostly the transfer \
itself, which a side task slows down"""
    forecast_quantile: Annotated[float, Field(ge=0, le=0.5, description="a number from 0 to 0.5")] = 0.4
    """the forecast is this quantile of a slot's last 32 lengths, of which the latest count most. Lower is more \
careful and fills less. On a GPU at most 0.05"""
    kinds: Annotated[
        tuple[str, ...], Field(min_length=1, description="a list of some of " + ", ".join(k.name for k in WaitKind))
    ] = tuple(kind.name for kind in WaitKind if kind is not NOT_IDLE)
    """the kinds of wait that are opened. In REDUCE_GRADS DeepSpeed copies and sums gradients; the cost of squeezing \
it is not measured"""

    def policy(self, guard: "GuardTable") -> Policy:
        """The same for the daemon's state machine, in nanoseconds, with what guards it."""
        return Policy(
            draw=Draw(
                observe_steps=self.observe_steps,
                alone_block_steps=self.alone_block_steps,
                round_blocks=round(1 / self.alone_share) if self.alone_share else 0,
            ),
            margin_ns=int(self.margin_ms * 1e6),
            min_bubble_ns=int(self.min_bubble_ms * 1e6),
            forecast_quantile=self.forecast_quantile,
            preemptive=bool(self.preemptive),
            kinds=frozenset(self.kinds),
            slowdown_budget=guard.slowdown_budget if guard.enabled else math.inf,
            retry_steps=guard.retry_steps,
        )

    @field_validator("kinds", mode="before")
    @classmethod
    def _known_kinds(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            return value
        unknown = [kind for kind in value if kind not in list(WaitKind.__members__)]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a kind of wait{_did_you_mean(unknown[0], WaitKind.__members__)}")
        return tuple(dict.fromkeys(value))


class GuardTable(_Table):
    """What squeezing may cost the main job, and what happens when it costs more."""

    enabled: bool = Field(default=True, description="true or false")
    """false: the slowdown is only measured and reported"""
    slowdown_budget: _Positive = 0.01
    """the slowdown that the main job may have; 0.01 is 1%"""
    retry_steps: _Count = 200
    """steps for which the gate stays shut after the budget was broken; doubled each time in a row, up to 32-fold"""


class SideTable(_Table):
    """The side task. Without this table bubbles are only observed."""

    queue: Path | None = Field(default=None, description=_FROM_WHERE_STARTED)
    """in place of `study`: a directory of studies that `squeezer submit` adds, and that take turns"""
    turn_minutes: _Positive = 10.0
    """with `queue`: how long a study trains before another one gets a turn, if one waits"""
    study: Path | None = Field(
        default=None, description="the path of an existing Python file, relative to the configuration"
    )
    """the study"""
    study_name: _Text = Field(default_factory=lambda known: _default_name(known))
    """Optuna's name of the study"""
    storage: _Text | None = Field(
        default=None,
        description="a database URL for Optuna, such as sqlite:///study.db, or the path of an Optuna journal, "
        "relative to where the command is started; or env:NAME or @FILE, which hold one of them",
    )
    """where Optuna keeps the study. Keep a URL with a password in a variable or in a file of your own"""
    study_directory: Path | None = Field(default=None, description=_FROM_WHERE_STARTED)
    """where the study, its checkpoints and its best weights are. Later runs continue what they find there"""
    priority: Literal["idle", "nice"] = Field(default="idle", description='"idle" or "nice"')
    """what the kernel gives the side task, once it has loaded its study and a main job is there. `idle`: a core that \
nothing else wants. `nice`: niceness 19, so a share of a core that other programs keep busy; but then it takes the \
core when a bubble begins, 1 to 2 ms before the main job really waits"""
    threads: _Count = 1
    """threads with which it computes"""
    memory_mb: _Positive | None = Field(default=None, description="a number above 0")
    """MiB of host memory that each process of the side task may allocate, including about 240 for libraries. If \
trials do not fit, fewer train at once. Where its control group has a memory controller, this limits their sum, too. \
In any case, the kernel ends the side task first when the machine runs out of memory"""
    max_restarts: _CountOrNone = 2
    """how often a side task that died is restarted; with `queue`: how often in a row, before its study has failed"""

    @field_validator("study", mode="before")
    @classmethod
    def _beside_the_file(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, str):
            return value
        path = Path((info.context or {}).get(_FOLDER_OF_FILE, "."), user_path(value)).resolve()
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        return path

    @field_validator("study")
    @classmethod
    def _or_queue(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if "queue" in info.data and value is None and info.data["queue"] is None:
            raise PydanticCustomError("missing", "neither study nor queue")
        return value

    @field_validator("turn_minutes")
    @classmethod
    def _with_queue(cls, value: float, info: ValidationInfo) -> float:
        if "queue" in info.data and info.data["queue"] is None and value != cls.model_fields["turn_minutes"].default:
            raise ValueError("there is no side.queue")
        return value

    @field_validator("study", "study_name", "study_directory")
    @classmethod
    def _not_beside_queue(cls, value: object, info: ValidationInfo) -> object:
        if info.data.get("queue") is not None and value not in (None, _default_name(info.data)):
            raise ValueError("the studies in side.queue have their own")
        return value

    @field_validator("queue", "study_directory", mode="before")
    @classmethod
    def _from_here(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        path = Path(user_path(value)).absolute()
        if path.exists() and not path.is_dir():
            raise ValueError("it is not a directory")
        return path

    @field_validator("storage")
    @classmethod
    def _journal_from_here(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if "://" in (value := read_storage(value)):
            named = value.removeprefix("sqlite:///")
            is_relative = named not in (value, "") and not named.startswith(("/", ":memory:", "file:"))
            return f"sqlite:///{quote(os.getcwd())}/{named}" if is_relative else value
        path = Path(value).absolute()
        if not path.parent.is_dir():
            raise ValueError(f"there is no directory {path.parent}")
        if path.exists() and not path.is_file():
            raise ValueError("it is a directory" if path.is_dir() else "it is no ordinary file")
        if path.is_file():
            with path.open("rb") as file:
                if file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC:
                    raise ValueError(f"it is an SQLite database, whose URL is sqlite:///{path}")
        return str(path)


class DeviceTable(_Table):
    """How the side task shares the device of its rank. On a CPU only `kind` matters."""

    kind: Literal["auto", "cpu", "cuda"] = Field(default="auto", description='"auto", "cpu" or "cuda"')
    """the main job's device. auto: `$DS_ACCELERATOR`, else `cuda` on a machine with an NVIDIA device that \
`$CUDA_VISIBLE_DEVICES` does not hide. If the job uses the other kind, the daemon says so and squeezes nothing"""
    memory_fraction: Annotated[float, Field(gt=0, le=1, description="a number above 0, at most 1")] = 0.25
    """the side task's largest share of the GPU's memory, including its CUDA context (600 MiB); it limits how many \
trials are fused. With MPS and NVML the driver refuses the side task more"""
    reserve_mb: _NotNegative = 1024.0
    """MiB of the GPU that stay free for the main job, or 5% of the most that it has reserved, if that is more. If \
less is free, the side task moves its state to the host's memory; if less than a quarter of it for three seconds, the \
daemon ends the side task (this needs NVML, the driver's library)"""
    mps: bool | Literal["auto"] = Field(default="auto", description='"auto", true or false')
    """whether the side task shares the GPU through the main job's MPS server, with a priority below normal. auto: if \
the job is surely a client of a server of yours; true: it must be one, and where process ids cannot be compared, as in \
containers, it is taken to be; false: never. Bubbles are only observed where `squeezer doctor --measure` has not found \
this sound on that device or, without MPS, turns. **With MPS a fatal fault of the side task can end the main job**"""
    mps_thread_percent: Annotated[int, Field(ge=1, le=100, description="a whole number from 1 to 100")] | None = Field(
        default=None, description="a whole number from 1 to 100"
    )
    """with MPS: percent of the GPU's multiprocessors that the side task may use"""


class RunTable(_Table):
    """Where a run's records go, and what is done around it."""

    directory: Annotated[Path, Field(description="the path of a directory, relative to where the command is started")]
    """where records go, and the study, unless `study_directory` names another place"""
    pin_cores: bool = Field(default=True, description="true or false")
    """on a CPU, `ds_squeeze` gives each rank an even share of the machine's cores, unless `--bind_cores_to_rank` \
does, and as many threads, unless `OMP_NUM_THREADS` is set. Threads decide how sums are rounded: compare losses with \
those of a job that has as many"""
    trace_steps: _CountOrNone = 40
    """steps in `trace.json`, at most"""
    keep_mb: Annotated[float, Field(ge=1, allow_inf_nan=False, description="a number, 1 or more")] = 64.0
    """megabytes on disk for a rank's details (bubbles, instructions, units). The default holds at least half an hour \
of ten-second steps with 32 micro-batches. Older ones are deleted, so figures of bubbles and units cover the last \
steps; step times cover all"""
    record_events: bool = Field(default=False, description="true or false")
    """true: also record each event that the daemon handled and its actions, for `squeezer replay`"""
    calibrate_s: _NotNegative = 2.0
    """seconds after the job in which the side task's rate alone is measured; 0: not, so no harvest and yield are \
reported"""

    @property
    def keep_bytes(self) -> int:
        """`keep_mb` in bytes."""
        return int(self.keep_mb * 1e6)

    @field_validator("directory", mode="before")
    @classmethod
    def _from_here(cls, value: object) -> object:
        return Path(user_path(value)).absolute() if isinstance(value, str) and value else value


class Config(_Table):
    """The whole file."""

    squeeze: SqueezeTable = Field(default_factory=SqueezeTable, description="a table")
    guard: GuardTable = Field(default_factory=GuardTable, description="a table")
    side: SideTable | None = Field(default=None, description="a table")
    device: DeviceTable = Field(default_factory=DeviceTable, description="a table")
    run: RunTable = Field(description="a table")

    @model_validator(mode="before")
    @classmethod
    def _run_of_the_study(cls, content: Any) -> Any:
        """A run without a directory goes where the next one with its study will go, too."""
        run = content.get("run", {})
        if not isinstance(run, Mapping) or "directory" in run:
            return content
        side = content.get("side")
        known = side if isinstance(side, Mapping) else {"study": "observed"}
        name = known.get("study_name") or Path(str(known.get("study") or known.get("queue") or "study")).stem
        return {**content, "run": {**run, "directory": str(trials_directory(Path("runs"), str(name)))}}

    def without_stops(self) -> "Config":
        """The same for a device that cannot halt a side task in the middle of its work."""
        squeeze = self.squeeze
        changed = {"preemptive": False, "forecast_quantile": min(squeeze.forecast_quantile, MOST_WITHOUT_STOPS)}
        return self.model_copy(update={"squeeze": squeeze.model_copy(update=changed)})

    def as_record(self) -> dict[str, Any]:
        """The configuration as plain data, without passwords."""
        plain = self.model_dump(mode="json")
        if plain["side"] is not None and plain["side"]["storage"] is not None:
            plain["side"]["storage"] = hide_password(plain["side"]["storage"])
        return plain

    def storage(self, run: Path) -> str:
        """Where Optuna keeps the study of the run in `run`: a database's URL, or the path of a journal."""
        named = self.side.storage if self.side is not None else None
        return named if named is not None else str(journal_path(self.studies(run)))

    def studies(self, run: Path) -> Path:
        """Where the studies of the run in `run` are kept."""
        named = None if self.side is None else self.side.queue or self.side.study_directory
        return (study_directory(run) if named is None else named).absolute()


def load_config(path: Path | str) -> Config:
    """Read the configuration at `path`.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has keys or values that are not allowed.
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    try:
        return Config.model_validate(content, context={_FOLDER_OF_FILE: path.resolve().parent})
    except ValidationError as error:
        found = [m for m in error.errors(include_url=False) if m["type"] != _NOT_A_MISTAKE_OF_ITS_OWN]
        mistakes = dict.fromkeys(map(_explain, found))  # a value of two types that is of neither is named twice
        raise ConfigError(hide_passwords("\n".join(f"{path}: {mistake}" for mistake in mistakes))) from None


_TABLES: Mapping[str, type[_Table]] = {
    "squeeze": SqueezeTable,
    "guard": GuardTable,
    "side": SideTable,
    "device": DeviceTable,
    "run": RunTable,
}

_REPLACED = dict.fromkeys(
    ("squeezed_steps", "alone_steps"),
    "steps are left alone at random now: set alone_share, such as 0.1 for one in ten, and alone_block_steps",
)


def _explain(mistake: Mapping[str, Any]) -> str:
    """One sentence for one of pydantic's errors."""
    *tables, key = [str(part) for part in mistake["loc"][:2]]
    table = _TABLES[tables[0]] if tables else Config
    dotted = ".".join([*tables, key])
    if mistake["type"] == "extra_forbidden":
        return f"unknown key {dotted} = {mistake['input']!r}{_suggest(key, table)}"
    allowed = table.model_fields[key].description
    if mistake["type"] == "missing":
        return f"{dotted} is missing; allowed: {allowed}"
    reason = f": {mistake['ctx']['error']}" if mistake["type"] == "value_error" else ""
    value = mistake["input"]
    return f"{dotted} = {_as_toml(value)} is not allowed{reason}; allowed: {allowed}"


def _suggest(key: str, table: type[_Table]) -> str:
    if key in _REPLACED:
        return f"; {_REPLACED[key]}"
    near = _did_you_mean(key, table.model_fields)
    if near:
        return near
    homes = [name for name, other in _TABLES.items() if key in other.model_fields]
    if homes:
        return f"; it belongs in [{homes[0]}]"
    return f"; allowed: {', '.join(table.model_fields)}"


def _did_you_mean(word: object, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _as_toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
