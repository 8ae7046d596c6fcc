"""What a run has left behind: processes, shared memory, sockets, directories, locks, temporary files, open trials."""

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import optuna

from benchmarks.soak.job import Paths
from ds_hooks.shared.study_paths import journal_path
from launch.leftovers import remove_dead_directories
from squeezer.daemon.deepspeed_buffers import SHARED_MEMORY
from squeezer.daemon.run_directory import LAUNCHER_LOCK
from squeezer.records.layout import study_directory
from trials.search.storage.optuna_storage import open_storage

_STUDY = "side_study"


def ports(paths: Paths) -> set[int]:
    """The master ports of runs whose directories are there."""
    found = set()
    for lock in paths.pages.glob(f"*/{LAUNCHER_LOCK}"):
        with suppress(OSError, ValueError, IndexError):
            found.add(int(lock.read_text(encoding="ascii").split()[1]))
    return found


def shared_memory(of_ports: Iterable[int], of_processes: Iterable[int]) -> list[str]:
    """The files in shared memory whose names say that they belong to these ports or processes.

    Empty ones are torch's: it makes them, and leaves them where it may not make them longer.
    """
    ends = tuple(f"_{port}" for port in of_ports)
    starts = tuple(f"torch_{pid}_" for pid in of_processes)
    names = [path.name for path in SHARED_MEMORY.iterdir()]
    found = [name for name in names if name.startswith("deepspeed_") and name.rpartition("_")[0].endswith(ends)]
    found += [name for name in names if name.startswith(starts) and _has_bytes(SHARED_MEMORY / name)]
    return sorted(found)


def _has_bytes(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False  # it has just gone


def files(paths: Paths) -> list[str]:
    """What is left of pages, sockets, directories and temporary files."""
    left = [paths.pages, *paths.pages.rglob("*")] if paths.pages.exists() else []
    return [str(path.relative_to(paths.base)) for path in (*left, *paths.temporary.rglob("*"))]


def locks(paths: Paths) -> list[str]:
    """Locks of builders, and the run's own if somebody holds it."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    root = Path(named) if named else Path.home() / ".cache" / "torch_extensions"
    found = [str(path) for path in root.glob("*/lock" if named else "*/*/lock")]
    own = paths.run / ".lock"
    if own.exists():
        descriptor = os.open(own, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            found.append(str(own))
        finally:
            os.close(descriptor)
    return found


def open_trials(paths: Paths) -> int:
    """How many trials of the study some worker still holds, as Optuna knows it."""
    journal = journal_path(study_directory(paths.run))
    if not journal.exists() or not journal.stat().st_size:
        return 0
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.load_study(study_name=_STUDY, storage=open_storage(str(journal)))
    except KeyError:
        return 0  # the job ended before its study was there
    return len(study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)))


def clear_as_the_next_run_does(paths: Paths) -> None:
    """Remove what a killed launcher left, by the code with which every `ds_squeeze` begins."""
    remove_dead_directories(paths.pages)
    with suppress(OSError):
        paths.pages.rmdir()
