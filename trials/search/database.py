"""How a study's database is reached: which driver, and what is asked of a connection."""

from typing import Any

import sqlalchemy as sa

SQLITE_PATIENCE_S = 60
"""By default SQLite gives up after five seconds. A search worker in mid-write may wait longer for a core."""

CONNECT_TIMEOUT_S = 10

_DRIVER = "postgresql+psycopg"
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
    """
    scheme, separator, rest = named.partition("://")
    return f"{_DRIVER}://{rest}" if separator and scheme in ("postgres", "postgresql") else named


def engine_options(url: str) -> dict[str, Any]:
    """What SQLAlchemy's `create_engine` takes beside `url`, see `database_url`. What the URL itself says counts more."""
    if url.startswith("sqlite:"):
        return {"connect_args": {"timeout": SQLITE_PATIENCE_S}}
    options: dict[str, Any] = {"pool_pre_ping": True}  # the server may have been restarted since
    if url.startswith(f"{_DRIVER}:"):
        said = sa.make_url(url).query
        # PgBouncer gives each transaction another connection, which knows no statements that were prepared before
        connection = {"prepare_threshold": None, **_CONNECTION}
        options["connect_args"] = {name: value for name, value in connection.items() if name not in said}
    return options
