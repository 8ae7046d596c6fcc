"""Workers agree on the artifact store that they see, also where it fails at first."""

from pathlib import Path
from typing import Any, BinaryIO

import optuna
import pytest
from optuna.artifacts import FileSystemArtifactStore

from trials.search.files import shared_store
from trials.search.files.bounded_store import BoundedStore
from trials.search.files.shared_store import agree


class Failing(FileSystemArtifactStore):
    """One whose next calls fail."""

    failures = 0

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:
        self._fail()
        super().write(artifact_id, content_body)

    def open_reader(self, artifact_id: str) -> Any:
        self._fail()
        return super().open_reader(artifact_id)

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("reset by peer")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Failing:
    monkeypatch.setattr(shared_store, "AGAIN_S", (0.0, 0.0))
    return Failing(tmp_path)


def agreed(store: Any, study: optuna.Study) -> str | None:
    return agree(BoundedStore(store), study, lambda do: do())


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_it_is_tried_again_and_all_find_the_same(failures: int, store: Failing, tmp_path: Path) -> None:
    study = optuna.create_study()
    store.failures = failures
    first = agreed(store, study)
    store.failures = failures
    assert first is not None and agreed(store, study) == first
    assert [file.name for file in tmp_path.iterdir()] == [first]


def test_one_that_goes_on_failing_is_given_up(store: Failing, caplog: pytest.LogCaptureFixture) -> None:
    store.failures = 3
    assert agreed(store, optuna.create_study()) is None
    assert "not in the artifact store: ConnectionError: reset by peer" in caplog.text


def test_one_that_others_may_write_and_this_worker_only_read_is_given_up(
    store: Failing, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = optuna.create_study()
    assert agreed(store, study) is not None
    monkeypatch.setattr(store, "write", None)
    assert agreed(store, study) is None and "not in the artifact store: TypeError" in caplog.text
