"""How a study's database is reached: which driver, what is asked of a connection, and for how long it may be away."""

import errno
import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    InternalError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.pool import ConnectionPoolEntry, StaticPool

from ds_hooks.shared.private_file import check_ours, make_dir, open_private
from ds_hooks.shared.secrets import hide_password, hide_passwords
from trials.own_logger import own_logger
from trials.search.storage.lock_holder import name_holder

SQLITE_PATIENCE_S = 60
"""By default SQLite gives up after five seconds. A search worker in mid-write may wait longer for a core."""

CONNECT_TIMEOUT_S = 10

PATIENCE_S, PAUSES_S = 600.0, (0.1, 0.3, 1.0, 3.0, 10.0)
"""For how long a worker tries again while its database is away, and how long it waits before each try."""

RESTS_S = 1.0
"""A connection that has not been used for so long may have died: the server was restarted, or the host was asleep."""

START_PATIENCE_S = 10.0
"""The same when a worker begins: the address may be wrong."""

_TOO_SLOW = "25P03"
"""PostgreSQL's code for a transaction that it ended since it heard nothing for too long."""

CLAIMS_FILE = "claims.db"
"""The claims of a journal or an SQLite database, in the study's directory."""

_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE)
"""Errors of a journal's file after which it may be written again."""

log = own_logger(__name__)

_Result = TypeVar("_Result")

_DRIVER = "postgresql+psycopg"
_URLS = "a journal's path, sqlite:///FILE, or one such as postgresql://USER@HOST/DATABASE"
_SQLITE_SETTINGS = {"timeout", "isolation_level", "detect_types", "check_same_thread", "cached_statements"}
_CONNECTION = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    # A host that vanishes says nothing: by default its peer waits for hours.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


def database_url(named: str) -> str:
    """The URL with the driver that we install, unless it names one.

    SQLAlchemy's default for PostgreSQL was psycopg2 before 2.1. Some services still hand out `postgres://`.

    Raises:
        StorageError: no database has such a URL; a password has an @, which would pass half of it for a host's name,
            and into messages; or a file's path has a ?, behind which SQLAlchemy drops what is no setting.
    """
    scheme, separator, rest = named.partition("://")
    url = f"{_DRIVER}://{rest}" if separator and scheme in ("postgres", "postgresql") else named
    if "@" in (_parsed(url, hide_password(named)).host or ""):
        raise StorageError(f"the password in {hide_password(named)} has an @; allowed: %40 in its place")
    _, mark, settings = rest.partition("?")
    if mark and is_sqlite(named) and not _are_settings(settings.split("&")):
        raise StorageError(f"the path in {named} has a ?; allowed: %3F in its place")
    return url


def _parsed(url: str, shown: str) -> sa.URL:
    """A URL, if there is a dialect for it. `shown` is what messages may say of it."""
    try:
        parsed = sa.make_url(url)
        dialect = parsed.get_dialect()
    except ValueError:  # its text has what may be a password: the host is missing
        scheme = shown.partition("://")[0]
        raise StorageError(f"the port in {scheme}://… is no number; allowed: {_URLS}") from None
    except (ArgumentError, NoSuchModuleError):
        raise StorageError(f"{shown} is not the URL of a database that can be used; allowed: {_URLS}") from None
    if dialect.is_async:
        raise StorageError(f"{shown} names a driver that answers asynchronously; allowed: {_URLS}")
    return parsed


def usable_url(named: str) -> str:
    """The same as `database_url`, of a database whose driver is installed.

    Raises:
        StorageError: see `database_url`; or it is not, and the message says which URL or package is right.
    """
    url = database_url(named)
    dialect = sa.make_url(url).get_dialect()
    try:
        dialect.import_dbapi()
    except ImportError as error:
        shown, reason = hide_password(named), f"{error}".partition("\n")[0]
        raise StorageError(
            f"the driver for {shown} is not installed: {reason}; allowed: {_instead(named, dialect.name)}"
        ) from None
    return url


def _instead(named: str, kind: str) -> str:
    """What to do where the driver of a URL is missing, of a database of that kind."""
    scheme, package = named.partition("://")[0], "pip install 'bubble-squeezer[postgresql]'"
    if kind != "postgresql":
        return "its driver"
    if scheme.partition("+")[2] in ("", "psycopg"):
        return package
    # as in the URL of another program
    return f"postgresql:// in place of {scheme}://{'' if find_spec('psycopg') else f', after {package}'}"


def _are_settings(given: list[str]) -> bool:
    """Whether what stands behind a ? is for SQLite, and no part of a path; as a URI's it may be anything."""
    pairs = [each.partition("=") for each in given]
    is_uri = any(name == "uri" for name, *_ in pairs)
    return is_uri or all(equals and name in _SQLITE_SETTINGS and "/" not in value for name, equals, value in pairs)


def is_sqlite(storage: str) -> bool:
    """Whether a storage is an SQLite database, with whatever driver."""
    scheme, separator, _ = storage.partition("://")
    return bool(separator) and scheme.partition("+")[0] == "sqlite"


def is_in_memory(storage: str) -> bool:
    """Whether a storage ends with the process that opens it."""
    file = (is_sqlite(storage) and sa.make_url(storage).database) or ""
    return is_sqlite(storage) and (not file or file.startswith((":memory:", "file::memory:")))


def is_shared(storage: str) -> bool:
    """Whether a storage is a database to which other hosts and users may write, and not a file of ours."""
    return "://" in storage and not is_sqlite(storage)


def engine_options(url: str) -> dict[str, Any]:
    """What SQLAlchemy's `create_engine` takes beside `url`, see `database_url`. What the URL says itself wins."""
    if is_sqlite(url):
        return {"connect_args": {"timeout": SQLITE_PATIENCE_S}}
    options: dict[str, Any] = {"pool_pre_ping": True}  # the server may have been restarted since
    if url.startswith(f"{_DRIVER}:"):
        options = {"pool_events": [(_rests, "checkin"), (_is_woken, "checkout")]}
        said = sa.make_url(url).query
        # PgBouncer gives each transaction another connection, which knows no statements that were prepared before
        connection = {"prepare_threshold": None, **_CONNECTION}
        options["connect_args"] = {name: value for name, value in connection.items() if name not in said}
    return options


def _rests(_connection: object, record: ConnectionPoolEntry) -> None:
    record.info["rests_since_s"] = time.monotonic()


def _is_woken(connection: Any, record: ConnectionPoolEntry, _proxy: object) -> None:
    """Ask a connection that has rested whether it is alive. SQLAlchemy itself would ask before each transaction."""
    if time.monotonic() - record.info.get("rests_since_s", math.inf) <= RESTS_S:
        return
    try:
        connection.autocommit = True
        connection.execute("SELECT 1")
        connection.autocommit = False
    except connection.OperationalError:
        raise sa.exc.InvalidatePoolError from None


class StorageError(Exception):
    """A study's storage cannot be used. The message names it, without its password, and the cause."""


@contextmanager
def naming(storage: str) -> Iterator[None]:
    """Let errors of a storage name it, as whoever chose it needs to know it.

    Raises:
        StorageError: for an error of the database or its driver.
    """
    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        raise StorageError(f"the study's storage {hide_password(storage)} cannot be used: {in_short(error)}") from error


def is_away(error: BaseException) -> bool:
    """Whether an error means that the storage did not answer, or could not write, and may later."""
    return any(
        (isinstance(each, (OperationalError, InterfaceError, InternalError)) and not _is_for_good(each))
        or (isinstance(each, OSError) and each.errno in _PASSING)
        for each in _causes(error)
    )


def _is_for_good(error: DBAPIError) -> bool:
    """Whether SQLite could not even read a statement, as there is no such table, or its file was removed or replaced.

    Its driver calls that operational too.
    """
    for_good = sqlite3.SQLITE_ERROR, sqlite3.SQLITE_READONLY_DBMOVED
    return getattr(error.orig, "sqlite_errorcode", None) in for_good


def _found_us_slow(error: BaseException) -> bool:
    """Whether the server ended a transaction of this host's, which may be a busy one."""
    return any(
        isinstance(each, DBAPIError) and getattr(each.orig, "sqlstate", None) == _TOO_SLOW for each in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and what led to it."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__ or each.__context__


def in_short(error: BaseException) -> str:
    """The first line of what went wrong, which SQLAlchemy and Optuna wrap in advice and statements."""
    while error.__cause__ is not None:
        error = error.__cause__
    return hide_passwords(f"{type(error).__name__}: {error}".partition("\n")[0])


def patiently(do: Callable[[bool], _Result], patience_s: float = PATIENCE_S) -> _Result:
    """Return what `do` returns, and call it again while the storage is away.

    Args:
        do: it is told whether this is a further try. Then the one before may have been done in part, or in full without
            an answer. It must settle that first.
        patience_s: for how long. A storage that answered, and found this host too slow, is given `PATIENCE_S`.

    Raises:
        Exception: what `do` raises, if it is of another kind or does not pass.
    """
    began_s, tries = time.monotonic(), 0
    while True:
        try:
            return do(tries > 0)
        except Exception as error:
            allowed_s = PATIENCE_S if _found_us_slow(error) else patience_s
            if not is_away(error) or time.monotonic() > began_s + allowed_s:
                raise
            if not tries:
                log.warning("the study's storage is away: %s", in_short(error))
        time.sleep(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
        tries += 1


def connect(storage: str, directory: Path | None) -> sa.Engine:
    """Open the database of claims.

    Args:
        storage: Optuna's, see `trials.search.storage.optuna_storage`.
        directory: the study's. It holds the claims of a journal or an SQLite database; None: memory does.

    Raises:
        OthersError: the file is another user's work.
        StorageError: the storage is in memory, and the directory is not.
    """
    if is_in_memory(storage) and directory is not None:
        raise StorageError(f"{storage} is in the memory of one process; allowed: a file, such as sqlite:///study.db")
    if is_shared(storage):
        url = usable_url(storage)
        # under the lock, each statement must see what others have committed, whatever the server's default is
        return sa.create_engine(url, isolation_level="READ COMMITTED", pool_size=2, **engine_options(url))
    if directory is None:
        engine = sa.create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    else:
        make_dir(directory.parent)
        make_dir(directory)
        file = directory / CLAIMS_FILE
        check_ours(file)
        with open(file, "ab", opener=open_private):
            pass
        arguments = {"timeout": SQLITE_PATIENCE_S, "check_same_thread": False}
        engine = sa.create_engine(sa.URL.create("sqlite", database=str(file)), connect_args=arguments)
    sa.event.listen(engine, "connect", _leave_transactions_to_us)
    sa.event.listen(engine, "begin", partial(_begin_as_writer, directory))
    return engine


def connect_to_read(storage: str, directory: Path) -> sa.Engine | None:
    """Open the database of claims for one who may not write there, and writes nothing. None: there is none yet.

    Args:
        storage: see `connect`.
        directory: the study's.
    """
    if is_shared(storage):
        url = usable_url(storage)
        return sa.create_engine(url, **engine_options(url))
    file = directory / CLAIMS_FILE
    if not file.is_file():
        return None
    # nobody has it open, and SQLite would make files beside it to share with others
    alone = "" if file.with_name(f"{CLAIMS_FILE}-wal").exists() else "&immutable=1"
    uri = f"{file.absolute().as_uri()}?mode=ro{alone}"
    return sa.create_engine("sqlite://", creator=partial(sqlite3.connect, uri, SQLITE_PATIENCE_S, uri=True))


def _leave_transactions_to_us(connection: Any, _record: object) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")  # a commit costs one write, and no sync: a crash of the machine may
    connection.execute("PRAGMA synchronous=NORMAL")  # lose the last claims, but no checkpoint


def _begin_as_writer(directory: Path | None, c: sa.Connection) -> None:
    """Take SQLite's lock at the start: a transaction that only later wants to write fails beside another."""
    try:
        c.exec_driver_sql("BEGIN IMMEDIATE")
    except OperationalError as error:
        # with WAL its lock is on this file
        holder = "" if directory is None else name_holder(directory / f"{CLAIMS_FILE}-shm")
        if not holder:
            raise
        raise OperationalError("BEGIN IMMEDIATE", None, sqlite3.OperationalError(f"{error.orig} by {holder}")) from None
