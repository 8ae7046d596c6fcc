"""What a run leaves behind: two JSON-lines files per rank, and a binary file of the side task's units.

`RUN/rank3.events.jsonl` holds one object per line; its key "r" names its kind:

    run           version, rank, config, wall_s and t_ns (one instant on both clocks)
    job           job (its index in this file), pid, rank, world_size, stage, stages, micro_batches,
                  master_port, t_ns
    step          job, step, start_ns, end_ns, squeezed (false: left alone by the draw, or still
                  observing; null: neither, since the side task was starting or due, or the guard had the gate
                  shut), work (trial-samples that the side task has trained so far, by the page)
    action        t_ns, action, cause; what the daemon did beyond planning
    guard         t_ns, step, what, cause, figures; see `squeezer.policy.guard.Decision`
    event         event, actions: what the policy learned, and what it decided; only if asked for
    side          t_ns, event, and what belongs to it: started (with its control group, or no_group: why not),
                  asked_to_end (with beside_main: whether a main job lives; else units that go on may run), exited
                  (with group_cpu_ms and, of that, uncounted_ms; null: unknown), given_up, not_started (with a reason:
                  bubbles are only observed), barred (with a reason: the device has no room for one) and let_in (it has
                  again), or one of the statuses that the side task sends (`ds_hooks.shared.statuses`)
    fault         t_ns, what: such as a lost or foreign message, or hooks that switched themselves off
    bubble_time   t_ns, and where bubble time has gone since the last such record: `squeezer.daemon.bubble_accounts`
    end           t_ns, lost_messages, dropped_messages, foreign_messages, dedicated (null or see `Dedicated`)

`RUN/rank3.details.jsonl` holds details of the last steps only (`RotatingFile`):

    bubble        step, epoch, slot, wait, start_ns, end_ns, squeezed, forecast_ns (null: none;
                  the forecast, its low and its high), permit_until_ns (null: shut),
                  side_ns (the side task's CPU time in it), main_ns (the main job's own; null on a GPU),
                  overrun_ns (the side task's from its end to the next one's start), stopped (whether the side task
                  had to be stopped at its end)
    instructions  step, items: [kind, slot, start_ns, end_ns] each
    progress      t_ns, event, work, trials_running, epochs; a status
    device        t_ns, and what the device's meters said: `squeezer.device.nvml.Look`
    overran       t_ns, event, slot, overrun_ns; a status, from devices where only the side task can measure it

`RUN/rank3.units.bin`, also of the last steps only, is an array of `UNIT_RECORD`. `RUN/rank3.units.jsonl` names them,
some of a group per line: `{"group": 0, "trials": K, "units": ["0.Linear forward", …]}`. Times are in ns of
CLOCK_MONOTONIC.

Beside them `RUN/rank3.log` and `RUN/rank3.side.log` are for people: what the daemon and the side task logged.
"""

import re
from pathlib import Path

RECORD_VERSION = 6

DETAILS = frozenset({"bubble", "instructions", "progress", "overran", "device"})
"""The kinds of which only the latest are kept."""

SHARES = 4
"""Details and units have two files each, an older one and one that grows."""


def events_path(run: Path, rank: int) -> Path:
    """Where the daemon of `rank` writes."""
    return run / f"rank{rank}.events.jsonl"


def details_path(run: Path, rank: int) -> Path:
    """Where the daemon of `rank` writes what is of the last steps only."""
    return run / f"rank{rank}.details.jsonl"


def log_path(run: Path, rank: int) -> Path:
    """Where the daemon of `rank` logs."""
    return run / f"rank{rank}.log"


def side_log_path(run: Path, rank: int) -> Path:
    """Where the side task of `rank` logs."""
    return run / f"rank{rank}.side.log"


def study_directory(run: Path) -> Path:
    """Where studies are, unless the configuration names another place. No launch moves it aside."""
    return run / "study"


def caches_path(run: Path, rank: int) -> Path:
    """Where the side task of `rank` keeps what it compiles."""
    return run / "caches" / f"rank{rank}"


def temporary_folder_path(run: Path, rank: int) -> Path:
    """The file that names the folder of the side task's temporary files."""
    return run / "caches" / f"rank{rank}.tmp"


def temporary_folder_records(run: Path) -> dict[int, Path]:
    """Those of all ranks in `run` that have one."""
    found = (run / "caches").glob("rank*.tmp")
    return {int(path.stem.removeprefix("rank")): path for path in found if path.stem.removeprefix("rank").isdigit()}


def report_path(run: Path) -> Path:
    """The report, for programs."""
    return run / "report.json"


def trace_path(run: Path) -> Path:
    """The trace, for Perfetto."""
    return run / "trace.json"


def picture_path(run: Path) -> Path:
    """The picture of one step."""
    return run / "step.svg"


def yield_picture_path(run: Path) -> Path:
    """The picture of what the bubbles gave."""
    return run / "yield.svg"


def units_path(run: Path, rank: int) -> Path:
    """Where the side task of `rank` writes; its names lie beside it with the suffix ``.jsonl``."""
    return run / f"rank{rank}.units.bin"


def recorded_ranks(run: Path) -> list[int]:
    """The ranks that have records in `run`, in order."""
    found = (re.fullmatch(r"rank(\d+)\.events\.jsonl", path.name) for path in run.glob("rank*"))
    return sorted(int(match[1]) for match in found if match)


def files_of(run: Path) -> list[Path]:
    """All of the above that lie in `run`, older parts included."""
    patterns = ("rank*.events.jsonl", "rank*.details.*", "rank*.units.*", "rank*.log")
    single = (report_path(run), trace_path(run), picture_path(run), yield_picture_path(run))
    return [*(path for pattern in patterns for path in run.glob(pattern)), *(path for path in single if path.exists())]
