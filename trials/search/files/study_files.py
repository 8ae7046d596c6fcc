"""The files of a study's trials: in its directory and, where the user names one, in an artifact store."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import optuna

from trials.own_logger import own_logger
from trials.search.config import WorkerConfig
from trials.search.files import checkpoint_files
from trials.search.files.artifacts import upload_best
from trials.search.files.best_weights import Best
from trials.search.files.bounded_store import BoundedStore
from trials.search.files.late_uploads import Alone, LateUploads
from trials.search.files.shared_store import SharedStore, agree
from trials.search.storage.database import is_shared
from trials.search.storage.directory_identity import beside, is_there, name_of
from trials.study import Study
from trials.study_error import StudyError

log = own_logger(__name__)

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is durable, and of which the database does not know yet.

    Attributes:
        number: the trial's.
        file: in the study's directory.
        stored: the names of the trial's checkpoints in the artifact store; None: there is none, or it has failed.
    """

    number: int
    file: Path
    stored: Sequence[str] | None

    @property
    def epoch(self) -> int:
        """How many epochs it holds."""
        return checkpoint_files.epoch_of(self.file)

    @property
    def place(self) -> int:
        """How many batches of the next epoch it holds."""
        return checkpoint_files.place_of(self.file)


class StudyFiles:
    """A worker's view of a study's files.

    Args:
        user_study: may name an artifact store.
        study: Optuna's.
        config: where the trials are.
        alone: calls a function under the study's lock.
    """

    def __init__(self, user_study: Study, study: optuna.Study, config: WorkerConfig, alone: Alone) -> None:
        self._study, self._directory = study, config.directory
        self._alone: Callable[[Callable[[], Any]], Any] = lambda do: alone(lambda held: do())
        self._best = Best(study, config.directory, user_study.keep_best)
        self._is_behind = False
        self._name = "" if config.directory is None else name_of(config.directory)
        self._store = None if config.directory is None else _store_of(user_study)
        self._shared: SharedStore | None = None
        if self._store is not None and config.directory is not None and is_shared(config.storage):
            name = agree(self._store, study, self._alone)
            if name is not None:
                self._shared = SharedStore(self._store, name, config.directory)
                self._late = LateUploads(study, self._shared, config.directory, alone)

    @property
    def bar(self) -> float | None:
        """See `Best`."""
        return self._best.bar

    def identity(self, directory: str | None) -> str | None:
        """Return the identity of the study's directory, which others share too if they see its artifact store."""
        return directory if directory is None or self._shared is None else beside(self._shared.name, directory)

    def check_and_retry(self) -> None:
        """See `retry`. Before that, look whether the directory is still the one that it was.

        Raises:
            StudyError: it is not: others would claim what this worker trains.
        """
        if self._directory is not None and not is_there(self._directory, self._name):
            raise StudyError(
                f"the study's directory {self._directory} was removed while its trials train, with their claims and "
                "checkpoints; allowed: to begin again, which trains anew what has not ended"
            )
        self.retry()

    def adopt(self) -> None:
        """Take the best weights that a worker has left that died after a trial's end."""
        self._written(self._best.adopt)

    def save(self, number: int, written: Path, fence: int) -> Saved | None:
        """Make a checkpoint durable here, and there unless the artifact store fails. None, and a warning: it is not."""
        file = checkpoint_files.commit(written, fence)
        if file is None:
            return None
        return Saved(number, file, None if self._shared is None else self._shared.upload(number, file))

    def keep(self, saved: Saved) -> None:
        """Remove a trial's older checkpoints: the database knows of this one."""
        checkpoint_files.remove_others(saved.file)
        if self._shared is not None and saved.stored is not None:
            self._shared.keep(saved.number, saved.stored)

    def discard(self, saved: Saved) -> None:
        """Remove a checkpoint: its trial is another worker's."""
        checkpoint_files.discard(saved.file)
        if self._shared is not None:
            self._shared.discard(saved.number, saved.file.name)

    def bring(self, number: int, epoch: int, stored: Callable[[], Sequence[str]]) -> bool:
        """Bring a trial's checkpoint into the directory. False if it must wait for the artifact store.

        Args:
            number: the trial's.
            epoch: how many epochs it has trained.
            stored: returns the names of its checkpoints in the artifact store.
        """
        return self._shared is None or self._shared.bring(number, epoch, stored())

    def waiting(self) -> Collection[int]:
        """The trials that wait for the artifact store."""
        return () if self._shared is None else self._shared.failed()

    def retry(self) -> None:
        """Try again what could not be written, and let trials be that have waited for long enough."""
        if self._is_behind:
            self.adopt()
        if self._shared is not None:
            self._shared.retry()
            self._late.catch_up()

    def forget(self, number: int, stored: Callable[[], Sequence[str]]) -> None:
        """Remove the checkpoints of a trial that has ended; for `stored` see `bring`."""
        if self._directory is not None:
            checkpoint_files.forget(self._directory, number)
        if self._shared is not None:
            self._shared.forget(number, stored())

    def offer(self, number: int, weights: str) -> None:
        """Let other hosts have the weights of a trial that is about to end."""
        if self._shared is not None:
            self._shared.upload_weights(number, Path(weights))

    def take(self, number: int, weights: str) -> None:
        """Take the weights of a trial that has completed."""
        dropped = self._written(lambda: self._best.take(number, Path(weights)))
        if self._shared is not None and dropped:
            self._shared.forget_weights(dropped)

    def finish(self, has_ended: Callable[[int], bool], *, is_over: bool) -> None:
        """Remove what ended trials have left. Once the study is over, upload the best weights of all hosts."""
        self.retry()
        if is_over:
            missing = [] if self._shared is None else self._best.missing()
            if self._shared is not None and missing:
                self._shared.bring_weights(missing)
                self.adopt()
            upload_best(self._store, self._study, self._best)
        if self._directory is not None:
            checkpoint_files.forget_ended(self._directory, has_ended)

    def _written(self, write: Callable[[], _Result]) -> _Result | None:
        """Write the best weights under the study's lock. None, and a warning, if the disk is full."""

        def written() -> _Result | None:
            try:
                found = write()
            except OSError as error:
                if not self._is_behind:
                    log.warning("the best weights are not kept: %s", error)
                self._is_behind = True
                return None
            self._is_behind = False
            return found

        result: _Result | None = self._alone(written)
        return result


def _store_of(user_study: Study) -> BoundedStore | None:
    """The user's artifact store. One that cannot be made costs nothing but what it was to keep."""
    try:
        store = user_study.artifact_store()
        return None if store is None else BoundedStore(store)
    except Exception as error:
        log.warning("there is no artifact store: %s: %s", type(error).__name__, error)
        return None
