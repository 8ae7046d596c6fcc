"""What is said of a storage that someone has damaged names it without its password."""

from pathlib import Path
from typing import NoReturn

import pytest

from trials.search import damage
from trials.search.config import WorkerConfig
from trials.search.damage import refusing_damage
from trials.search.optuna_study import NoStudyError
from trials.study_error import StudyError


def test_a_study_that_is_gone_is_named_without_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> NoReturn:
        raise NoStudyError("s")

    monkeypatch.setattr(damage, "known_study", gone)
    url = "postgresql://me:s3cr3t@host/studies"
    config = WorkerConfig(storage=url, study_name="s", worker="w", directory=tmp_path)
    with (
        pytest.raises(StudyError, match=r"no longer in its storage postgresql://me:\*\*\*@host/studies"),
        refusing_damage(config, lambda: ()),
    ):
        raise KeyError("its trials")
