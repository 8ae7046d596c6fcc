"""The files of a study's directory: checkpoints of its trials, and the best trials' weights.

    DIRECTORY/claims.db                     see `trials.search.storage.claims`
    DIRECTORY/alive/                        see `trials.search.storage.beats`
    DIRECTORY/host.lock                     see `trials.search.storage.host_lock`
    DIRECTORY/directory.id                  see `trials.search.storage.directory_identity`
    DIRECTORY/most-fused.json               see `trials.side_task.kept_choices`
    DIRECTORY/checkpoints/7/12-2.pt         trial 7 after epoch 12, written under fence 2
    DIRECTORY/checkpoints/7/12_340-2.pt     the same trial 340 batches later, in the middle of epoch 13
    DIRECTORY/best/trial-7.pt               a `state_dict` that the user's own module loads
    DIRECTORY/best/best.json                which they are, the best first

The side task writes to a temporary file. The search worker makes it durable and gives it its name, and only then writes
to a database that it exists.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ds_hooks.shared.private_file import make_dir, sync
from trials.own_logger import own_logger

log = own_logger(__name__)

KEPT = 2
"""Checkpoints of a trial: the last, and one to fall back to. If all of them are from the middle of an epoch, the last
from the end of one is kept too: such an epoch can continue only if its batches are the same again."""

_NAME = re.compile(r"(\d+)(?:_(\d+))?-(\d+)\.pt")


def trial_directory(directory: Path, number: int) -> Path:
    """Where the checkpoints of a trial are."""
    return directory / "checkpoints" / str(number)


def temporary_path(directory: Path, number: int, epoch: int, place: int = 0) -> Path:
    """A file to write a checkpoint into, of this process alone; its directory is made.

    Whether that lasts is up to `publish`, as this is called in a main job's bubbles.

    Args:
        directory: the study's.
        number: the trial's.
        epoch: how many epochs it holds.
        place: how many batches of the next epoch it holds.
    """
    folder = trial_directory(directory, number)
    make_dir(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{epoch}{f'_{place}' if place else ''}.{os.getpid()}.tmp"


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
    target = written.parent / f"{written.name.partition('.')[0]}-{fence}.pt"
    try:
        publish(written, target)
    except OSError as error:
        log.warning("no checkpoint of trial %s: %s", written.parent.name, error)
        discard(written)
        return None
    return target


def remove_others(kept: Path) -> None:
    """Remove a trial's checkpoints but for `kept`, its newest, and those before it that are worth keeping.

    Later ones are from before the trial went back: they could not be read, or no longer fitted the study.
    """
    ours = found(kept.parent)
    names = worth_keeping([file.name for file in ours[ours.index(kept) :]])
    for file in ours:
        if file.name not in names:
            with suppress(OSError):
                file.unlink()


def worth_keeping(names: Sequence[str]) -> list[str]:
    """Return those of a trial's checkpoints that are kept, from their names, the newest first; see `KEPT`."""
    found, rest = list(names[:KEPT]), names[KEPT:]
    if all(place_of(Path(name)) for name in found):
        found += [name for name in rest if not place_of(Path(name))][:1]
    return found


def publish(written: Path, target: Path) -> None:
    """Make `written` durable under another name in the same directory, in one step."""
    folder = target.parent
    sync(written)
    if all(name.endswith(".tmp") for name in os.listdir(folder)):  # it may be new
        sync(folder.parent)
    written.rename(target)
    sync(folder)


def found(folder: Path) -> list[Path]:
    """The checkpoints in a trial's directory, the newest first."""
    try:
        return [folder / name for name in newest_first(os.listdir(folder))]
    except FileNotFoundError:
        return []


def newest_first(names: Iterable[str]) -> list[str]:
    """Those of `names` that checkpoints have, the newest first."""
    keys = {name: match for name in names if (match := _NAME.fullmatch(name))}
    return sorted(keys, key=lambda name: [int(part or 0) for part in keys[name].groups()], reverse=True)


def epoch_of(checkpoint: Path) -> int:
    """How many epochs it holds."""
    return int(checkpoint.name.partition("-")[0].partition("_")[0])


def place_of(checkpoint: Path) -> int:
    """How many batches of the next epoch it holds."""
    return int(checkpoint.name.partition("-")[0].partition("_")[2] or 0)


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


def discard(written: Path | str | None) -> None:
    """Remove a file, if there is one, and if that is possible: the file system may have become read-only."""
    if written is not None:
        with suppress(OSError):
            Path(written).unlink()
