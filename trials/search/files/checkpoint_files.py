"""The files of a study's directory: one checkpoint per trial and epoch, and the best trials' weights.

    DIRECTORY/claims.db                     see `trials.search.storage.claims`
    DIRECTORY/host.lock                     see `trials.search.storage.host_lock`
    DIRECTORY/directory.id                  see `trials.search.storage.directory_identity`
    DIRECTORY/checkpoints/7/12-2.pt         trial 7 after epoch 12, written under fence 2
    DIRECTORY/best/trial-7.pt               a `state_dict` that the user's own module loads
    DIRECTORY/best/best.json                which they are, the best first

The side task writes to a temporary file. The search worker makes it durable and gives it its name, and only then writes
to a database that it exists.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ds_hooks.shared.private_file import make_dir
from trials.own_logger import own_logger

log = own_logger("trials.search.files.checkpoint_files")

KEPT = 2
"""Checkpoints of a trial: the last, and one to fall back to."""

_NAME = re.compile(r"(\d+)-(\d+)\.pt")


def trial_directory(directory: Path, number: int) -> Path:
    """Where the checkpoints of a trial are."""
    return directory / "checkpoints" / str(number)


def temporary_path(directory: Path, number: int, epoch: int) -> Path:
    """A file to write a checkpoint into, of this process alone; its directory is made."""
    folder = trial_directory(directory, number)
    make_dir(folder)
    return folder / f"{epoch}.{os.getpid()}.tmp"


def best_directory(directory: Path) -> Path:
    """Where the best trials' weights are."""
    return directory / "best"


def weights_path(directory: Path, number: int) -> Path:
    """Where the weights of a trial are, if it is among the best."""
    return best_directory(directory) / weights_name(number)


def weights_name(number: int) -> str:
    """The name of their file."""
    return f"trial-{number}.pt"


def temporary_weights_path(directory: Path, number: int) -> Path:
    """A file to write weights into, of this process alone; its directory is made."""
    folder = best_directory(directory)
    make_dir(folder)
    return folder / f"trial-{number}.{os.getpid()}.tmp"


def commit(written: Path, fence: int) -> Path | None:
    """Make a checkpoint durable, and give it its name. None, and a warning, if the disk is full or it is gone.

    Earlier ones are as they were.
    """
    epoch = int(written.name.partition(".")[0])
    target = written.parent / f"{epoch}-{fence}.pt"
    try:
        publish(written, target)
    except OSError as error:
        log.warning("no checkpoint of trial %s: %s", written.parent.name, error)
        written.unlink(missing_ok=True)
        return None
    return target


def remove_others(kept: Path) -> None:
    """Remove a trial's checkpoints but for `kept`, its newest, and those before it down to `KEPT`.

    Later epochs are from before the trial went back: they could not be read, or no longer fitted the study.
    """
    ours = found(kept.parent)
    later, earlier = ours[: ours.index(kept)], ours[ours.index(kept) + KEPT :]
    for file in (*later, *earlier):
        with suppress(OSError):
            file.unlink()


def publish(written: Path, target: Path) -> None:
    """Make `written` durable under another name in the same directory, in one step."""
    with open(written, "rb") as file:
        os.fsync(file.fileno())
    written.rename(target)
    fd = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def found(folder: Path) -> list[Path]:
    """The checkpoints in a trial's directory, the newest first."""
    try:
        return [folder / name for name in newest_first(os.listdir(folder))]
    except FileNotFoundError:
        return []


def newest_first(names: Iterable[str]) -> list[str]:
    """Those of `names` that checkpoints have, the newest first."""
    keys = {name: match for name in names if (match := _NAME.fullmatch(name))}
    return sorted(keys, key=lambda name: (int(keys[name][1]), int(keys[name][2])), reverse=True)


def epoch_of(checkpoint: Path) -> int:
    """How many epochs it holds."""
    return int(checkpoint.name.partition("-")[0])


def fence_of(checkpoint: Path) -> int:
    """The fence of the claim under which it was written."""
    return int(checkpoint.stem.partition("-")[2])


def forget(directory: Path, number: int) -> None:
    """Remove the checkpoints of a trial that has ended."""
    shutil.rmtree(trial_directory(directory, number), ignore_errors=True)


def forget_ended(directory: Path, has_ended: Callable[[int], bool]) -> None:
    """Remove the checkpoints of all trials that have ended: a worker that dies at a trial's end leaves them."""
    for folder in (directory / "checkpoints").glob("[0-9]*"):
        with suppress(KeyError):  # the storage has no such trial, so it is not ours to judge
            if has_ended(int(folder.name)):
                forget(directory, int(folder.name))


def discard(written: str | None) -> None:
    """Remove a temporary file, if there is one."""
    if written is not None:
        Path(written).unlink(missing_ok=True)
