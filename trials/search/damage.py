"""What someone has done to a study's storage behind the workers' backs: deleted or edited what they rely on."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import optuna
import sqlalchemy as sa
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._rdb.models import TrialModel

from ds_hooks.shared.secrets import hide_password
from trials.search.config import WorkerConfig
from trials.search.leftovers import deleted
from trials.search.optuna_study import NoStudyError, known_study
from trials.search.storage.database import StorageError, in_short, is_away
from trials.search.storage.optuna_storage import open_storage
from trials.study_error import StudyError


@contextmanager
def refusing_damage(config: WorkerConfig, held: Callable[[], Collection[int]] | None) -> Iterator[None]:
    """Say in words what is wrong with a study's storage, where that is why something failed.

    Args:
        config: where the trials are.
        held: returns the numbers of the trials that this worker has claimed; None: it begins, perhaps with a new study.

    Raises:
        StudyError: the study or one of its trials is gone, or cannot be read.
        StorageError: the whole storage cannot be read.
        Exception: as it was raised, if nothing is wrong there.
    """
    try:
        yield
    except (StudyError, StorageError):
        raise
    except Exception as error:
        if not is_away(error):
            _refuse(config, None if held is None else held())
        raise


def _refuse(config: WorkerConfig, held: Collection[int] | None) -> None:
    where = f"its storage {hide_password(config.storage)}"
    try:
        study = known_study(config.storage, config.study_name)
    except NoStudyError:
        if held is None:
            return
        raise StudyError(
            f"study '{config.study_name}' is no longer in {where}: someone has deleted it; "
            f"allowed: to begin it anew, without {config.directory}"
        ) from None
    storage = open_storage(config.storage)
    ids = _ids(storage, study)
    numbers = []
    for trial_id in ids:
        try:
            numbers.append(storage.get_trial(trial_id).number)
        except Exception as error:
            if is_away(error):
                raise
            raise StudyError(
                f"trial {len(numbers)} of study '{config.study_name}' (id {trial_id}) can no longer be read from "
                f"{where}: {in_short(error)}; someone has edited it. Allowed: to mend it there, or another study_name"
            ) from None
    missing = (set(range(len(ids))) | set(held or ())) - set(numbers)
    if missing:
        raise deleted(config.study_name, min(missing))


def _ids(storage: BaseStorage, study: optuna.Study) -> list[int]:
    """Those of the study's trials, even of some that cannot be read, in the order of their numbers."""
    if not isinstance(storage, RDBStorage):
        return [trial._trial_id for trial in storage.get_all_trials(study._study_id, deepcopy=False)]
    chosen = sa.select(TrialModel.trial_id).where(TrialModel.study_id == study._study_id).order_by(TrialModel.trial_id)
    with storage.engine.connect() as c:
        return list(c.execute(chosen).scalars())
