"""The best trials' weights in an Optuna artifact store, such as S3, once a study is over."""

import optuna
from optuna.artifacts import upload_artifact

from trials.own_logger import own_logger
from trials.search.best_weights import Best
from trials.study import Study

ARTIFACTS = "squeezer_artifacts"
"""A user attribute of studies: the name of each file -> its artifact's id; and the index that was uploaded."""

log = own_logger("trials.search.artifacts")


def upload_best(user_study: Study, study: optuna.Study, best: Best) -> None:
    """Upload what `Best` keeps, unless another worker has. A store that fails costs nothing but that.

    Args:
        user_study: names the store.
        study: Optuna's; the artifacts are attached to it, since Optuna attaches none to a trial that has ended.
        best: has the files.
    """
    files = best.files()
    if not files:
        return
    try:
        store = user_study.artifact_store()
        index = files[0].read_text(encoding="utf-8")
        if store is None or study.user_attrs.get(ARTIFACTS, {}).get("index") == index:
            return
        ids = {
            file.name: upload_artifact(artifact_store=store, file_path=str(file), study_or_trial=study)
            for file in files
        }
        study.set_user_attr(ARTIFACTS, {"index": index, "files": ids})
    except Exception as error:  # of any of many services, and of the user's code
        log.warning("the best weights are not in the artifact store: %s: %s", type(error).__name__, error)
