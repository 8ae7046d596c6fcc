"""What the tests of real processes share."""

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from benchmarks.shared import postgres as postgresql
from tests.support.bounded import pytest_runtest_call, pytest_runtest_setup, pytest_runtest_teardown  # noqa: F401
from tests.support.sandbox import Sandbox, new_sandbox
from trials.search.storage.claim_tables import create_tables
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs so; children inherit it
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the same by `nohup`, under which tests of terminals would wait

settings.register_profile("noisy machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("noisy machines")


def of_one_process_or_group(send: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """`os.kill` or `os.killpg`, but for the numbers that mean the caller's own group, or every process there is."""

    def checked(number: int, which_signal: int) -> None:
        if number <= 1:
            raise ValueError(f"{number} is no process that a test has started")  # such as a word of a page, too early
        send(number, which_signal)

    return checked


os.kill, os.killpg = of_one_process_or_group(os.kill), of_one_process_or_group(os.killpg)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the million objects of a collection out of each search for garbage, in it and after it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    """A private directory for one device's processes."""
    with new_sandbox(tmp_path) as made:
        yield made


@pytest.fixture(autouse=True)
def signal_mask() -> Iterator[None]:
    """Blocked signals, which a gate blocks in its thread, stay in their test: processes of later ones inherit them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A private directory in memory: the driver registers no page of a file on a disk."""
    with tempfile.TemporaryDirectory(prefix="bsq-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """While this file is there, no trial of `studies/tiny.py` gets past its second epoch."""
    path = tmp_path / "hold"
    path.touch()
    return path


@pytest.fixture(scope="module")
def postgres() -> Iterator[postgresql.Server]:
    """A server for all tests of a file, none of which ends it. It starts in half a second, and tests elsewhere count
    this process's children."""
    missing = postgresql.missing()
    if missing is not None:
        pytest.skip(missing)
    with postgresql.running(**postgresql.FASTEST) as server:
        yield server


@pytest.fixture(scope="module")
def all_tables(postgres: postgresql.Server) -> Iterator[str]:
    """The name of a database with all tables that a study needs. To make them takes longer than most tests."""
    with postgres.database() as name:
        storage, claims = open_storage(postgres.url(name)), connect(postgres.url(name), None)
        create_tables(claims)
        for engine in (claims, storage.engine):
            engine.dispose()
        yield name


@pytest.fixture
def database(postgres: postgresql.Server, all_tables: str) -> Iterator[str]:
    """The URL of a database of PostgreSQL's, in which no study has been."""
    with postgres.database(like=all_tables) as name:
        yield postgres.url(name)


@pytest.fixture(params=["journal", "sqlite", "postgresql"])
def storage_kind(request: pytest.FixtureRequest) -> str:
    """The kinds of storage that a configuration can name."""
    return str(request.param)


@pytest.fixture
def storage(storage_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A storage of each kind."""
    match storage_kind:
        case "journal":
            return f"{tmp_path}/study.journal"
        case "sqlite":
            return f"sqlite:///{tmp_path}/study.db"
        case _:
            return str(request.getfixturevalue("database"))
