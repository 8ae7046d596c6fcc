"""The tables of claims: workers' leases, who trains which trial, the accounts of what was trained, and how fast.

Statements that each trial needs are made once: to make one takes SQLAlchemy three times as long as to run it again.
"""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

AGAIN_S = 0.2
"""Between two tries to create tables."""
_TABLES = sa.MetaData()
STUDY = sa.Table(
    "squeezer_study",
    _TABLES,
    sa.Column("study", sa.String(512), primary_key=True),
    sa.Column("placement", sa.Text),  # see `trials.search.choice.placement`
)
WORKER = sa.Table(
    "squeezer_worker",
    _TABLES,
    sa.Column("study", sa.String(512), primary_key=True),
    sa.Column("worker", sa.String(512), primary_key=True),
    sa.Column("expires_s", sa.Float(53), nullable=False),
    sa.Column("directory", sa.Text),
    sa.Column("exclusive_rows", sa.Integer, nullable=False),
    sa.Column("is_idle", sa.Boolean),
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
    sa.Column("structure", sa.String(32)),  # once it has been built
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
SPEED = sa.Table(
    "squeezer_speed",
    _TABLES,
    sa.Column("study", sa.String(512), primary_key=True),
    sa.Column("worker", sa.String(512), primary_key=True),
    sa.Column("structure", sa.String(32), primary_key=True),
    sa.Column("samples_per_s", sa.Float(53), nullable=False),  # of time of the worker's device; 0: it does not fit
)
PACE = sa.Table(
    "squeezer_pace",
    _TABLES,
    sa.Column("study", sa.String(512), primary_key=True),
    sa.Column("worker", sa.String(512), primary_key=True),
    sa.Column("minute", sa.Integer, primary_key=True, autoincrement=False),  # since 1970
    sa.Column("lived_s", sa.Float(53), nullable=False),
    sa.Column("epochs", sa.Float(53), nullable=False),  # that were kept
)

OF_STUDY, OF_TRIAL = sa.bindparam("of_study", type_=sa.String), sa.bindparam("of_trial", type_=sa.Integer)
_ROWS = {STUDY: STUDY.c.study == OF_STUDY, CLAIM: (CLAIM.c.study == OF_STUDY) & (CLAIM.c.trial == OF_TRIAL)}
READ_CLAIM, UPDATE_CLAIM = sa.select(CLAIM).where(_ROWS[CLAIM]), CLAIM.update().where(_ROWS[CLAIM])
"""Of one trial."""
ADD_SPAN = SPAN.insert()
HIGHEST_FENCE = sa.select(sa.func.max(CLAIM.c.fence)).where(CLAIM.c.study == OF_STUDY)
OF_WORKER = sa.bindparam("of_worker", type_=sa.String)
DEATHS = sa.select(CLAIM.c.deaths).where(CLAIM.c.study == OF_STUDY, CLAIM.c.worker == OF_WORKER).distinct()
"""How many workers have died in the trials that one holds now; equal numbers once."""
NEW_CLAIM = {name: f"new_{name}" for name in ("study", "trial", "worker", "fence", "epoch", "trained", "deaths")}
"""Column -> parameter of `ADD_CLAIM`."""
ADD_CLAIM = (
    CLAIM.insert()
    .from_select(
        list(NEW_CLAIM),
        sa.select(*(sa.bindparam(parameter, type_=CLAIM.c[name].type) for name, parameter in NEW_CLAIM.items())).where(
            ~sa.exists().where(_ROWS[CLAIM])
        ),
    )
    .execution_options(preserve_rowcount=True)
)
"""Adds no row if there is one of that trial."""


@functools.cache
def lock_row(table: sa.Table, dialect: str, *, writes: bool) -> "sa.Select[Any]":
    """Return the statement that reads and locks a row of `STUDY` or `CLAIM`.

    A host that falls silent must not hold others up: after `silent_ms` a server ends its transaction.

    Args:
        table: whose.
        dialect: of the database.
        writes: whether something is written. A server need not wait for its disk if the row was only locked.
    """
    columns: list[Any] = [table]
    if dialect == "postgresql":
        silent_ms = sa.bindparam("silent_ms", type_=sa.String)
        columns.append(sa.func.set_config("idle_in_transaction_session_timeout", silent_ms, True))
        if not writes:
            columns.append(sa.func.set_config("synchronous_commit", "off", True))
    return sa.select(*columns).where(_ROWS[table]).with_for_update()


def create_tables(engine: sa.Engine) -> None:
    """Create those that are missing, and columns that an earlier version had not, whoever else does at the same time.

    Such columns may be empty, so workers of that version can work beside this one's.
    """
    for attempt in range(10):
        try:
            _TABLES.create_all(engine)
            for column in (STUDY.c.placement, CLAIM.c.structure, WORKER.c.is_idle):
                _add_if_missing(engine, column)
            return
        except (IntegrityError, OperationalError, ProgrammingError):
            if attempt == 9:
                raise
            time.sleep(AGAIN_S)


def _add_if_missing(engine: sa.Engine, column: "sa.Column[Any]") -> None:
    """Add a column to a table of ours that lacks no other."""
    table = column.table
    missing = set(table.columns.keys()) - {each["name"] for each in sa.inspect(engine).get_columns(table.name)}
    if missing == {column.name}:
        kind = column.type.compile(engine.dialect)
        with engine.begin() as c:
            c.execute(sa.text(f"ALTER TABLE {table.name} ADD COLUMN {column.name} {kind}"))


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


def since_1970_s(c: sa.Connection, now: float) -> float:
    """The same time as `now`, which `now_s` returned, by a clock that shows the date."""
    return time.time() if c.dialect.name == "sqlite" else now
