"""How a database is reached."""

import os
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from benchmarks.shared import postgres as postgresql
from trials.search.storage import database as storage_database
from trials.search.storage.database import (
    CONNECT_TIMEOUT_S,
    StorageError,
    connect,
    connect_to_read,
    database_url,
    engine_options,
    in_short,
    is_away,
    patiently,
)
from trials.search.storage.optuna_storage import has_studies, open_storage


@pytest.mark.parametrize(
    ("named", "url"),
    [
        ("postgresql://me:pw@host:5432/db?sslmode=require", "postgresql+psycopg://me:pw@host:5432/db?sslmode=require"),
        ("postgres://host/db", "postgresql+psycopg://host/db"),
        ("postgresql:///db", "postgresql+psycopg:///db"),
        ("postgresql+psycopg://host/db", "postgresql+psycopg://host/db"),
        ("postgresql+psycopg2://host/db", "postgresql+psycopg2://host/db"),
        ("sqlite:///postgresql.db", "sqlite:///postgresql.db"),
        ("mysql+pymysql://host/db", "mysql+pymysql://host/db"),
    ],
)
def test_a_url_names_its_driver(named: str, url: str) -> None:
    assert database_url(named) == url


def test_what_a_url_says_counts_more_than_what_we_would() -> None:
    ours = engine_options("postgresql+psycopg://host/db")
    assert ours["connect_args"]["connect_timeout"] == CONNECT_TIMEOUT_S and "pool_pre_ping" not in ours
    theirs = engine_options("postgresql+psycopg://host/db?connect_timeout=3&prepare_threshold=5")
    assert not {"connect_timeout", "prepare_threshold"} & theirs["connect_args"].keys()
    assert theirs["connect_args"]["keepalives_idle"] == ours["connect_args"]["keepalives_idle"]


def test_a_driver_that_we_do_not_know_gets_no_options_of_psycopgs() -> None:
    assert "connect_args" not in engine_options("mysql+pymysql://host/db")


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg2", "mysql+pymysql"])
@pytest.mark.parametrize("open_it", [open_storage, lambda url: connect(url, Path("nowhere"))])
def test_a_password_with_an_at_sign_is_refused_and_not_told(scheme: str, open_it: Callable[[str], object]) -> None:
    with pytest.raises(StorageError, match=r"me:\*\*\*@host/db .*%40") as caught:
        open_it(f"{scheme}://me:se@cr@et@host/db")
    assert "cr" not in str(caught.value) and "et@" not in str(caught.value)


def test_what_a_driver_says_is_told_without_a_password() -> None:
    error = OSError("no postgresql://me:secret@host/db\nand more")
    assert in_short(error) == "OSError: no postgresql://me:***@host/db"


@pytest.mark.parametrize("rests_s", [0.0, 60.0])
@pytest.mark.parametrize("open_it", [lambda url: connect(url, None), lambda url: open_storage(url).engine])
def test_a_connection_that_has_rested_is_asked_whether_it_lives(
    open_it: Callable[[str], sa.Engine], rests_s: float, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in use is not: that would take as long as a statement, and a statement says it too."""
    engine, server = open_it(database), sa.create_engine(database_url(database))
    monkeypatch.setattr(storage_database, "RESTS_S", rests_s)

    def backend() -> int:
        with engine.begin() as c:
            return int(c.execute(sa.text("SELECT pg_backend_pid()")).scalar_one())

    before = {backend() for _ in range(3)}
    others = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database()"
    with server.begin() as c:
        assert c.execute(sa.text(f"{others} AND pid != pg_backend_pid()")).all()
    tries: list[bool] = []
    assert patiently(lambda again: tries.append(again) or backend()) not in before
    assert tries == ([False, True] if rests_s else [False])
    for each in (engine, server):
        each.dispose()


def test_a_server_that_finds_us_slow_is_waited_for_even_at_the_start(database: str) -> None:
    engine = connect(database, None)
    tries = 0

    def transact(again: bool) -> int:
        nonlocal tries
        tries += 1
        with engine.begin() as c:
            c.execute(sa.text("SET LOCAL idle_in_transaction_session_timeout = '50ms'"))
            if tries <= 2:
                wait_until_ended(c.execute(sa.text("SELECT pg_backend_pid()")).scalar_one())
            return int(c.execute(sa.text("SELECT 7")).scalar_one())

    def wait_until_ended(backend: int) -> None:
        with connect(database, None).connect() as other:
            ask = sa.text("SELECT count(*) FROM pg_stat_activity WHERE pid = :backend")
            while other.execute(ask, {"backend": backend}).scalar():
                other.rollback()

    assert patiently(transact, patience_s=-1.0) == 7 and tries == 3


def test_a_server_that_is_not_there_is_not_waited_for_at_the_start(postgres: postgresql.Server) -> None:
    engine = connect(postgres.url("no_such_database"), None)
    with pytest.raises(sa.exc.OperationalError):
        patiently(lambda again: engine.connect(), patience_s=-1.0)


def test_who_waits_in_vain_for_the_claims_says_which_process_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_database, "SQLITE_PATIENCE_S", 0.1)
    journal = str(tmp_path / "study.journal")
    pid = os.fork()
    if pid == 0:
        with connect(journal, tmp_path).begin():
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    engine = connect(journal, tmp_path)
    try:
        with pytest.raises(OperationalError) as caught, engine.begin():
            pass
        assert in_short(caught.value).endswith(f"database is locked by process {pid}, which is stopped")
        assert is_away(caught.value), "it may go on"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with engine.begin():
        pass
    engine.dispose()


@pytest.mark.parametrize("open_it", [open_storage, lambda url: connect(url, Path("nowhere"))])
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://:s3cret@host:6379/0", r"redis://:\*\*\*@host:6379/0 is not the URL of a database that can be used"),
        ("oracel://me:s3cret@host/db", r"oracel://me:\*\*\*@host/db is not the URL of a database that can be used"),
        ("://me:s3cret@host", "is not the URL of a database that can be used"),
        ("postgresql://me:s3cret/db", "the port in postgresql://… is no number"),
        ("postgresql+asyncpg://me:s3cret@host/db", "names a driver that answers asynchronously"),
    ],
)
def test_what_is_no_database_that_can_be_used_is_refused_in_words(
    url: str, said: str, open_it: Callable[[str], object]
) -> None:
    with pytest.raises(StorageError, match=f"{said}.*; allowed: a journal's path, sqlite:///FILE") as caught:
        open_it(url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "open_it", [open_storage, has_studies, lambda url: connect(url, None), lambda url: connect_to_read(url, Path())]
)
@pytest.mark.parametrize(
    ("scheme", "package", "allowed"),
    [
        ("postgresql+psycopg2", "psycopg2", r"postgresql:// in place of postgresql\+psycopg2://$"),
        ("postgresql+pg8000", "pg8000", r"postgresql:// in place of postgresql\+pg8000://$"),
        ("mysql", "MySQLdb", "its driver"),
    ],
)
def test_a_driver_that_is_missing_is_named_and_what_there_is_in_its_place(
    scheme: str, package: str, allowed: str, open_it: Callable[[str], object]
) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(StorageError, match=rf"{package}'; allowed: {allowed}") as caught:
        open_it(f"{scheme}://me:s3cret@host/db")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:a%2Fb%3Ac%25@[::1]:5432/db",
        "postgresql://me:a@/db?host=/var/run/postgresql&port=5433",
        "postgresql+psycopg://me@host/db?options=-csearch_path%3Dmine",
        "postgresql:///?service=mine",
        "mysql://me:a@host/db?charset=utf8mb4",
    ],
)
def test_unusual_urls_of_databases_are_passed_on(url: str) -> None:
    scheme, _, rest = url.partition("://")
    assert database_url(url).partition("://")[2] == rest and scheme in ("mysql", "postgresql", "postgresql+psycopg")
