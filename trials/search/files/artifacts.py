"""Files in an Optuna artifact store, such as S3; and the best trials' weights there, once a study is over."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import optuna
from optuna.artifacts import upload_artifact

from ds_hooks.shared.private_file import open_private
from trials.own_logger import own_logger
from trials.search.files.best_weights import Best
from trials.search.files.bounded_store import BoundedStore
from trials.search.files.checkpoint_files import publish, weights_name

ARTIFACTS = "squeezer_artifacts"
"""A user attribute of studies: the name of each file -> its artifact's id; and the index that was uploaded."""

log = own_logger(__name__)


def upload_best(store: BoundedStore | None, study: optuna.Study, best: Best) -> None:
    """Upload what `Best` keeps, unless another worker has uploaded that, or what is missing here.

    A store that fails costs nothing but that.

    Args:
        store: the user's; None: there is none.
        study: Optuna's; the artifacts are attached to it, since Optuna attaches none to a trial that has ended.
        best: has the files.
    """
    files = best.files()
    if not files or store is None:
        return
    try:
        index = files[0].read_text(encoding="utf-8")
        uploaded = study.user_attrs.get(ARTIFACTS, {"index": "[]", "files": {}})
        missing = {weights_name(number) for number in best.missing()}
        if uploaded["index"] == index or missing & uploaded["files"].keys():
            return
        ids = {
            file.name: upload_artifact(artifact_store=store, file_path=str(file), study_or_trial=study)
            for file in files
        }
        study.set_user_attr(ARTIFACTS, {"index": index, "files": ids})
    except Exception as error:  # of any of many services, and of the user's code
        log.warning("the best weights are not in the artifact store: %s: %s", type(error).__name__, error)


def put(store: BoundedStore, artifact: str, file: Path) -> None:
    """Write a file to the store, under an id of our own. The store's exceptions pass through."""
    with open(file, "rb") as body:
        store.write(artifact, body)


def fetch(
    store: BoundedStore,
    artifact: str,
    target: Path,
    temporary: Path,
    check: Callable[[Path], None] = lambda file: None,
) -> None:
    """Make `target` from an artifact, whole or not at all. The store's exceptions pass through.

    Args:
        store: the user's.
        artifact: its id.
        target: the file.
        temporary: another one in the same directory, which exists.
        check: raises if what came cannot be used.
    """
    try:
        with open(temporary, "wb", opener=open_private) as file:
            store.read(artifact, file)
        check(temporary)
        publish(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def refuse_torn(weights: Path) -> None:
    """Refuse a file that `torch.save` has written, if it is not whole.

    Raises:
        BadZipFile: it is not.
    """
    with ZipFile(weights) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise BadZipFile(f"{damaged} is damaged")


def remove(store: BoundedStore, artifacts: Iterable[str]) -> None:
    """Remove artifacts. Those that cannot be removed cost space, and nothing else."""
    for artifact in artifacts:
        with suppress(Exception):
            store.remove(artifact)
