"""A study's files in an Optuna artifact store, such as S3, for hosts that share a database and no directory.

Each host has its files in its own directory too. A checkpoint is in the store before the database says that it exists,
and an attribute of its trial names it there, so that whoever claims the trial can fetch it. While the store fails,
checkpoints are on their hosts alone: another one goes back to what the store has. They come there later, see
`late_uploads`.

    NAME                 the store's name itself, by which workers know that they see one store
    NAME-7-12-2.pt       trial 7 after epoch 12, written under fence 2; see `checkpoint_files` for others
    NAME-best-7.pt       weights of trial 7, which was among the best when it ended
"""

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from io import BytesIO
from pathlib import Path

import optuna
from optuna.artifacts.exceptions import ArtifactNotFound

from trials.own_logger import own_logger
from trials.search.files import checkpoint_files
from trials.search.files.artifacts import fetch, put, refuse_torn, remove
from trials.search.files.bounded_store import BoundedStore
from trials.search.storage.database import is_away

STORE = "squeezer_store"
"""A user attribute of studies: the name of their store."""

PAUSE_S = 60.0
"""For how long a trial waits whose checkpoint could not be fetched."""

AGAIN_S = (1.0, 4.0)
"""After how long a worker tries again at its start: if it does not see the store then, it does without to its end."""

log = own_logger(__name__)


class SharedStore:
    """The artifact store of a study. The services behind it may raise anything: that costs no more than a warning.

    Args:
        store: the user's.
        name: the study's, see `agree`.
        directory: this host's, of the study.
        clock_s: the time.

    Attributes:
        late: number of a trial -> its newest checkpoint, which the store has not taken.
    """

    def __init__(
        self, store: BoundedStore, name: str, directory: Path, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self._store, self._directory, self._clock_s = store, directory, clock_s
        self._kept: dict[int, Sequence[str]] = {}
        self._failed_s: dict[int, float] = {}
        self._said: set[str] = set()
        self.late: dict[int, Path] = {}
        self._refused_s = -PAUSE_S

    def upload(self, number: int, checkpoint: Path, known: Sequence[str] = ()) -> list[str] | None:
        """Put a checkpoint into the store.

        Args:
            number: its trial.
            checkpoint: the file.
            known: the names of the trial's checkpoints there, if it is not this worker's now.

        Returns:
            The names of the trial's newest checkpoints there, this one last; None: the store has failed.
        """
        try:
            put(self._store, self._of_trial(number, checkpoint.name), checkpoint)
        except Exception as error:
            self._warn("checkpoints are on this host alone while the artifact store fails", error)
            self.late[number], self._refused_s = checkpoint, self._clock_s()
            return None
        self.late.pop(number, None)
        self._kept.setdefault(number, known)
        names = checkpoint_files.newest_first({checkpoint.name, *self._kept[number]})
        # later ones are from before the trial went back
        return checkpoint_files.worth_keeping(names[names.index(checkpoint.name) :])[::-1]

    def has_just_failed(self) -> bool:
        """Whether the store has refused a checkpoint within `PAUSE_S`."""
        return self._clock_s() < self._refused_s + PAUSE_S

    def keep(self, number: int, names: Sequence[str]) -> None:
        """Remove a trial's other checkpoints: the database names these."""
        others = set(self._kept.get(number, ())) - set(names)
        remove(self._store, (self._of_trial(number, name) for name in others))
        self._kept[number] = names

    def discard(self, number: int, name: str) -> None:
        """Remove a checkpoint of a trial that is another worker's now."""
        remove(self._store, [self._of_trial(number, name)])
        self._kept.pop(number, None)
        self.late.pop(number, None)

    def bring(self, number: int, epoch: int, names: Sequence[str]) -> bool:
        """Fetch the checkpoints of a trial that this worker has claimed: the last, and one to fall back to.

        Args:
            number: the trial's.
            epoch: what was saved of later ones does not count.
            names: the trial's checkpoints in the store.

        Returns:
            False if the store fails: then another try may succeed. True also if a checkpoint is gone for good.
        """
        self._kept[number] = names = checkpoint_files.newest_first(names)[::-1]
        here = checkpoint_files.found(checkpoint_files.trial_directory(self._directory, number))
        # it may never have reached the store
        is_here = any(_is_as_late(file, names, epoch) for file in here if checkpoint_files.epoch_of(file) == epoch)
        for name in reversed(names):
            path = checkpoint_files.trial_directory(self._directory, number) / name
            if checkpoint_files.epoch_of(path) > epoch:
                continue
            try:
                if not path.exists():
                    temporary = checkpoint_files.temporary_path(self._directory, number, epoch)
                    fetch(self._store, self._of_trial(number, name), path, temporary)
                is_here = True
            except ArtifactNotFound:
                log.warning("trial %d: its checkpoint %s is no longer in the artifact store", number, name)
            except Exception as error:
                if not is_here:
                    self._warn("trials wait for their checkpoints while the artifact store fails", error)
                    self._failed_s[number] = self._clock_s()
                    return False
        return True

    def failed(self) -> Collection[int]:
        """The trials whose checkpoints could not be fetched, until `retry`."""
        return self._failed_s.keys()

    def retry(self) -> None:
        """Let those be tried again that have waited for `PAUSE_S`."""
        now_s = self._clock_s()
        self._failed_s = {number: at_s for number, at_s in self._failed_s.items() if now_s < at_s + PAUSE_S}

    def forget(self, number: int, names: Sequence[str]) -> None:
        """Remove the checkpoints of a trial that has ended, and may never have been this worker's."""
        self.late.pop(number, None)
        remove(self._store, (self._of_trial(number, name) for name in {*names, *self._kept.pop(number, ())}))

    def upload_weights(self, number: int, weights: Path) -> None:
        """Put the weights of a trial into the store: it has ended, and may be among the best."""
        try:
            put(self._store, self._of_best(number), weights)
        except Exception as error:
            self._warn("weights of the best trials are on this host alone while the artifact store fails", error)

    def bring_weights(self, numbers: Iterable[int]) -> None:
        """Fetch the weights of trials that have ended on other hosts."""
        for number in numbers:
            target = checkpoint_files.weights_path(self._directory, number)
            try:
                temporary = checkpoint_files.temporary_weights_path(self._directory, number)
                fetch(self._store, self._of_best(number), target, temporary, refuse_torn)
            except Exception as error:
                self._warn(f"the weights of trial {number} did not come from the artifact store", error)

    def forget_weights(self, numbers: Iterable[int]) -> None:
        """Remove the weights of trials that are no longer among the best."""
        remove(self._store, map(self._of_best, numbers))

    def _of_trial(self, number: int, name: str) -> str:
        return f"{self.name}-{number}-{name}"

    def _of_best(self, number: int) -> str:
        return f"{self.name}-best-{number}.pt"

    def _warn(self, text: str, error: Exception) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("%s: %s: %s", text, type(error).__name__, error)


def _is_as_late(file: Path, names: Iterable[str], epoch: int) -> bool:
    """Whether none of these checkpoints of that epoch is from a later place in the next one than `file`."""
    own = [Path(name) for name in names if checkpoint_files.epoch_of(Path(name)) == epoch]
    return checkpoint_files.place_of(file) >= max(map(checkpoint_files.place_of, own), default=0)


def agree(store: BoundedStore, study: optuna.Study, alone: Callable[[Callable[[], str]], str]) -> str | None:
    """Return the name of a study's store; None, and a warning, if this worker does not see what others have there.

    Args:
        store: the user's.
        study: Optuna's.
        alone: calls a function under the study's lock.
    """
    new = uuid.uuid4().hex
    for pause_s in (*AGAIN_S, None):
        try:
            return _seen(store, study, alone, new)
        except ArtifactNotFound:
            reason = "other workers of the study have another one, or the file that they look for was removed there"
        except Exception as error:
            if is_away(error):
                raise
            reason = f"{type(error).__name__}: {error}"
        if pause_s is not None:
            time.sleep(pause_s)
    log.warning("checkpoints are in the study's directory alone, and not in the artifact store: %s", reason)
    return None


def _seen(store: BoundedStore, study: optuna.Study, alone: Callable[[Callable[[], str]], str], new: str) -> str:
    """Return the name of the study's store, which is `new` if it has none. The store's exceptions pass through."""

    def known_or_new() -> str:
        if STORE not in study.user_attrs:
            study.set_user_attr(STORE, new)
        return str(study.user_attrs[STORE])

    store.write(new, BytesIO(new.encode()))  # also where another name is known: not all may write
    name = alone(known_or_new)
    if name != new:
        remove(store, [new])
    store.read(name, found := BytesIO())
    if found.getvalue() != name.encode():
        raise ValueError("it holds other files of that name")
    return name
