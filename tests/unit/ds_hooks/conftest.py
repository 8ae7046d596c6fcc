"""An engine that looks like DeepSpeed's, its hooks, and the listening end of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hooks import Handle, attach
from ds_hooks.shared.page.file import page_path
from tests.support.hooked_engine import Daemon, Engine


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path / "run")
    yield made
    made.close()


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(page_path(tmp_path / "run", 0))


@pytest.fixture
def handle(daemon: Daemon, engine: Engine, tmp_path: Path) -> Iterator[Handle]:
    made = attach(engine, directory=tmp_path / "run", local_rank=0)
    assert made.enabled, made.fault
    yield made
    made.detach()
    assert set(engine.__dict__) == {"page_path", "seen", "fail_in"}, "the engine is as it was"


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process of its own, as far as notices go."""
    monkeypatch.setattr("ds_hooks.notice._SAID", set())
