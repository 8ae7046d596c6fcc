"""Whether the workers of a study see the same files: its directory has an identity, which hosts that share it read."""

import os
import socket
import uuid
from collections.abc import Iterable
from pathlib import Path

import optuna

from ds_hooks.shared.private_file import make_dir, sync, write_text
from ds_hooks.shared.user_paths import path_text
from trials.own_logger import own_logger
from trials.study_error import StudyError

NAME = "directory.id"
CLAIMS = "squeezer_claims"

log = own_logger(__name__)


def identity(directory: Path) -> str:
    """Return the random name of a study's directory, and where this host has it.

    Raises:
        OthersError: it is another user's.
        OSError: it cannot be written.
    """
    file = directory / NAME
    if not file.exists():
        make_dir(directory.parent)
        make_dir(directory)
        written = file.with_name(f"{uuid.uuid4().hex}.tmp")
        write_text(written, uuid.uuid4().hex)
        sync(written)
        try:
            os.link(written, file)  # whole or not at all, also on NFS
        except FileExistsError:
            pass
        except OSError:  # no hard links there, as on FAT: of hosts that begin at once, the last one counts
            written.replace(file)
        sync(directory)
        written.unlink(missing_ok=True)
    return f"{name_of(directory)} {socket.gethostname()}:{path_text(directory.absolute())}"


def name_of(directory: Path) -> str:
    """The random name of a study's directory, which `identity` has given it."""
    return (directory / NAME).read_text()


def is_there(directory: Path, name: str) -> bool:
    """Whether a directory still has its name. One that cannot be read for a while does."""
    try:
        return name_of(directory) == name
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def beside(store: str, directory: str) -> str:
    """Return the identity of a directory whose checkpoints are also in the artifact store of that name."""
    return f"{store},{directory}"


def is_same(one: str | None, other: str | None) -> bool:
    """Whether two identities are of one directory, wherever hosts have it, or of directories beside one store."""
    return not _names(one).isdisjoint(_names(other))


def _names(identity: str | None) -> set[str]:
    return set((identity or "").partition(" ")[0].split(","))


def location(of: str | None) -> str:
    """Where a directory is, in words."""
    return "nowhere" if of is None else of.partition(" ")[2]


class Unseen:
    """Directories of other workers whose checkpoints this one cannot see.

    Args:
        own: this worker's; None: it has none.
    """

    def __init__(self, own: str | None) -> None:
        self._own = own
        self._known: set[str] = set()

    def warn_of(self, directories: Iterable[str | None]) -> None:
        """Say in words, once of each directory, that nothing can be taken over from there."""
        for directory in {location(each) for each in directories if not is_same(each, self._own)} - self._known:
            self._known.add(directory)
            log.warning(
                "checkpoints in %s cannot be seen from %s: trials that were saved there wait for a worker that can; "
                "allowed: a study_directory that all workers share, or an artifact_store() of the study",
                directory,
                location(self._own),
            )


def bind(study: optuna.Study, directory: str) -> None:
    """Keep a study whose storage is a file to the directory that has its claims.

    Workers with claims of their own would train the same trials.

    Raises:
        StudyError: its claims are in another directory.
    """
    bound = study.user_attrs.get(CLAIMS)
    if bound is not None and not is_same(bound, directory):
        theirs = Path(location(bound).partition(":")[2])
        if (theirs / NAME).is_file() and is_same(identity(theirs), bound):
            raise StudyError(
                f"study '{study.study_name}' is bound to the directory {theirs}, which says who trains which trial; "
                f"this one is {location(directory).partition(':')[2]}. Allowed: the same study_directory, another "
                "study_name, or a storage in PostgreSQL"
            )
        bound = None  # it is gone, and so are its claims
    if bound is None:
        study.set_user_attr(CLAIMS, directory)
