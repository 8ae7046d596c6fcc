"""The tables of claims: workers' leases, who trains which trial, and the accounts of what was trained."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

_TABLES = sa.MetaData()
STUDY = sa.Table("squeezer_study", _TABLES, sa.Column("study", sa.String(512), primary_key=True))
WORKER = sa.Table(
    "squeezer_worker",
    _TABLES,
    sa.Column("study", sa.String(512), primary_key=True),
    sa.Column("worker", sa.String(512), primary_key=True),
    sa.Column("expires_s", sa.Float(53), nullable=False),
    sa.Column("directory", sa.Text),
    sa.Column("exclusive_rows", sa.Integer, nullable=False),
)
CLAIM = sa.Table(
    "squeezer_claim",
    _TABLES,
    sa.Column("study", sa.String(512), primary_key=True),
    sa.Column("trial", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("worker", sa.String(512)),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("trained", sa.Integer, nullable=False),
    sa.Column("deaths", sa.Integer, nullable=False),
    sa.Column("operation", sa.String(32)),
    sa.Column("directory", sa.Text),
    sa.Index("squeezer_claim_by_fence", "study", "fence"),
)
SPAN = sa.Table(
    "squeezer_span",
    _TABLES,
    sa.Column("span", sa.String(32), primary_key=True),
    sa.Column("study", sa.String(512), nullable=False),
    sa.Column("trial", sa.Integer, nullable=False),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("worker", sa.String(512), nullable=False),
    sa.Column("from_epoch", sa.Integer, nullable=False),
    sa.Column("to_epoch", sa.Integer, nullable=False),
    sa.Column("kept", sa.Boolean, nullable=False),
)


def create_tables(engine: sa.Engine) -> None:
    """Create those that are missing, whoever else does at the same time."""
    for attempt in range(10):
        try:
            _TABLES.create_all(engine)
            return
        except (IntegrityError, OperationalError, ProgrammingError):
            if attempt == 9:
                raise
            time.sleep(0.2)


@contextmanager
def suppress_duplicate(c: sa.Connection) -> Iterator[None]:
    """Let another worker have inserted the same row first."""
    try:
        with c.begin_nested():
            yield
    except IntegrityError:
        pass


def now_s(c: sa.Connection) -> float:
    """The time by which leases end, in seconds: the database's, so that the clocks of hosts need not agree.

    A file has no time of its own, but one host, whose clock may be set. Its time since the start may not.
    """
    if c.dialect.name == "sqlite":
        return time.monotonic()
    if c.dialect.name == "postgresql":
        return float(c.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
    return float(c.execute(sa.text("SELECT unix_timestamp(now(6))")).scalar_one())
