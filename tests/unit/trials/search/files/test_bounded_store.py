"""A store that hangs costs its patience once, and no thread that anybody waits for."""

import io
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from optuna.artifacts import FileSystemArtifactStore

from tests.support.sandbox import wait_for
from trials.search.files import bounded_store
from trials.search.files.bounded_store import BoundedStore


class Hanging(FileSystemArtifactStore):
    """One whose calls hang from when it is told to until it goes on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.calls: list[str] = []

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:
        self._hang("write")
        super().write(artifact_id, content_body)

    def open_reader(self, artifact_id: str) -> Any:
        self._hang("read")
        return super().open_reader(artifact_id)

    def remove(self, artifact_id: str) -> None:
        self._hang("remove")
        super().remove(artifact_id)

    def _hang(self, call: str) -> None:
        self.calls.append(call)
        self.goes_on.wait()


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hanging:
    monkeypatch.setattr(bounded_store, "PATIENCE_S", 0.05)
    return Hanging(tmp_path)


def test_it_is_named_and_others_fail_at_once_until_it_goes_on(hanging: Hanging, tmp_path: Path) -> None:
    store = BoundedStore(hanging)
    hanging.goes_on.clear()
    with pytest.raises(TimeoutError, match=r"^Hanging has not answered for 0\.05 s$"):
        store.write("one", io.BytesIO(b"late"))
    for call in (lambda: store.remove("one"), lambda: store.read("one", io.BytesIO())):
        with pytest.raises(TimeoutError, match="Hanging has not answered an earlier call yet"):
            call()
    assert hanging.calls == ["write"]
    hanging.goes_on.set()
    wait_for(lambda: store._hangs is not None and store._hangs.done(), "its end")
    assert hanging.calls == ["write", "remove"] and list(tmp_path.iterdir()) == [], "it came too late"
    store.write("one", io.BytesIO(b"in time"))
    store.read("one", found := io.BytesIO())
    assert found.getvalue() == b"in time"


@pytest.mark.parametrize("call", ["read", "remove"])
def test_so_do_other_calls(call: str, hanging: Hanging) -> None:
    hanging.goes_on.clear()
    store = BoundedStore(hanging)
    with pytest.raises(TimeoutError, match="Hanging has not answered for"):
        store.remove("one") if call == "remove" else store.read("one", io.BytesIO())
    hanging.goes_on.set()


class Slow(FileSystemArtifactStore):
    """One that gives a byte at a time."""

    def open_reader(self, artifact_id: str) -> Any:
        content = super().open_reader(artifact_id).read()

        class Body(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                time.sleep(0.04)
                return super().read(1)

        return Body(content)


def test_a_slow_one_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BoundedStore(Slow(tmp_path))
    store.write("one", io.BytesIO(b"0123456789"))
    monkeypatch.setattr(bounded_store, "PATIENCE_S", 0.2)
    store.read("one", found := io.BytesIO())
    assert found.getvalue() == b"0123456789"


def test_a_large_file_may_take_longer(tmp_path: Path, hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large").write_bytes(bytes(1000))
    monkeypatch.setattr(bounded_store, "LEAST_BYTES_PER_S", 1.0)
    threading.Timer(0.5, hanging.goes_on.set).start()
    hanging.goes_on.clear()
    with open(tmp_path / "large", "rb") as body:
        BoundedStore(hanging).write("copy", body)
    assert (tmp_path / "copy").read_bytes() == bytes(1000)


def test_what_the_store_raises_passes_through_whatever_it_is(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(artifact_id: str) -> None:
        raise TimeoutError("the service's own")

    monkeypatch.setattr(hanging, "remove", fails)
    store = BoundedStore(hanging)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="the service's own"):
            store.remove("one")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), BaseException("panicked")])
def test_nothing_that_a_store_raises_ends_the_worker(
    error: BaseException, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(artifact_id: str) -> None:
        raise error

    monkeypatch.setattr(hanging, "remove", fails)
    with pytest.raises(RuntimeError, match=f"{type(error).__name__}: "):
        BoundedStore(hanging).remove("one")
