"""Who trains which trial now. Optuna knows a trial's state; these tables beside it say which worker it belongs to.

A *claim* belongs to one worker until it is released, or until the worker's *lease* runs out. Each new claim has a
higher *fence*. What a worker writes counts only while its fence is the newest, so one that comes back from the dead
harms nothing. A journal or an SQLite database has its claims in a file of its own on the same host; another database
holds them itself, for any number of hosts.

*Spans* are the accounts: trained = kept + lost, in epochs and per trial.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.pool import StaticPool

from ds_hooks.shared.private_file import check_ours, make_dir, open_private
from trials.search.database import SQLITE_PATIENCE_S, database_url, engine_options

LEASE_S = 60.0
"""How long a worker that gives no sign of life keeps its trials."""

MOST_DEATHS = 3
"""A trial is given up once this many workers have died in it without a further checkpoint."""

_TABLES = sa.MetaData()
_STUDY = sa.Table("squeezer_study", _TABLES, sa.Column("study", sa.String(512), primary_key=True))
_WORKER = sa.Table(
    "squeezer_worker",
    _TABLES,
    sa.Column("study", sa.String(512), primary_key=True),
    sa.Column("worker", sa.String(512), primary_key=True),
    sa.Column("expires_s", sa.Float(53), nullable=False),
)
_CLAIM = sa.Table(
    "squeezer_claim",
    _TABLES,
    sa.Column("study", sa.String(512), primary_key=True),
    sa.Column("trial", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("worker", sa.String(512)),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("trained", sa.Integer, nullable=False),
    sa.Column("deaths", sa.Integer, nullable=False),
)
_SPAN = sa.Table(
    "squeezer_span",
    _TABLES,
    sa.Column("operation", sa.String(32), primary_key=True),
    sa.Column("study", sa.String(512), nullable=False),
    sa.Column("trial", sa.Integer, nullable=False),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("worker", sa.String(512), nullable=False),
    sa.Column("from_epoch", sa.Integer, nullable=False),
    sa.Column("to_epoch", sa.Integer, nullable=False),
    sa.Column("kept", sa.Boolean, nullable=False),
)


@dataclass(frozen=True, slots=True)
class Claim:
    """A trial that is this worker's.

    Attributes:
        trial: its number.
        fence: higher with every claim.
        epoch: up to which its training is kept, by a checkpoint or because it has just begun.
        deaths: how many workers have died in it since that epoch was reached.
    """

    trial: int
    fence: int
    epoch: int
    deaths: int


@dataclass(frozen=True, slots=True)
class Span:
    """Epochs of a trial that a worker trained.

    Attributes:
        trial: its number.
        from_epoch: the first, counted from 0.
        to_epoch: the one after the last.
        kept: whether they count; else a worker's death lost them.
    """

    trial: int
    from_epoch: int
    to_epoch: int
    kept: bool


class Claims:
    """One worker's view of the claims on a study's trials.

    Args:
        engine: see `connect`.
        study: Optuna's name of it.
        worker: this worker's name.
        lease_s: how long others wait for a sign of life.
    """

    def __init__(self, engine: sa.Engine, study: str, worker: str, lease_s: float = LEASE_S) -> None:
        self._engine, self._study, self._worker, self._lease_s = engine, study, worker, lease_s
        _create_tables(engine)
        with engine.begin() as c:
            if not c.execute(sa.select(_STUDY).where(_STUDY.c.study == study)).first():
                with _suppress_duplicate(c):
                    c.execute(_STUDY.insert().values(study=study))

    @contextmanager
    def alone(self) -> Iterator["Held"]:
        """Hold the study's lock, and commit at the end. No other worker claims or releases meanwhile."""
        with self._engine.begin() as c:
            c.execute(sa.select(_STUDY).where(_STUDY.c.study == self._study).with_for_update()).one()
            yield Held(c, self._study, self._worker)

    @contextmanager
    def owned(self, claim: Claim) -> Iterator["Owned | None"]:
        """Hold a trial of this worker's, and commit at the end; None: it is another's now."""
        with self._engine.begin() as c:
            chosen = (_CLAIM.c.study == self._study) & (_CLAIM.c.trial == claim.trial)
            chosen &= (_CLAIM.c.worker == self._worker) & (_CLAIM.c.fence == claim.fence)
            row = c.execute(sa.select(_CLAIM).where(chosen).with_for_update()).first()
            yield None if row is None else Owned(c, row)

    def renew(self, trained: dict[int, int]) -> None:
        """Give a sign of life.

        Args:
            trained: number of a trial -> up to which epoch this worker has trained it.
        """
        with self._engine.begin() as c:
            until_s = _now_s(c) + self._lease_s
            mine = (_WORKER.c.study == self._study) & (_WORKER.c.worker == self._worker)
            if not c.execute(_WORKER.update().where(mine).values(expires_s=until_s)).rowcount:
                c.execute(_WORKER.insert().values(study=self._study, worker=self._worker, expires_s=until_s))
            for trial, epoch in trained.items():
                row = (_CLAIM.c.study == self._study) & (_CLAIM.c.trial == trial) & (_CLAIM.c.worker == self._worker)
                c.execute(_CLAIM.update().where(row).values(trained=epoch))

    def spans(self) -> list[Span]:
        """The study's accounts."""
        with self._engine.connect() as c:
            rows = c.execute(sa.select(_SPAN).where(_SPAN.c.study == self._study).order_by(_SPAN.c.from_epoch))
            return [Span(row.trial, row.from_epoch, row.to_epoch, row.kept) for row in rows]

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()


class Held:
    """The claims of a study under its lock."""

    def __init__(self, connection: sa.Connection, study: str, worker: str) -> None:
        self._c, self._study, self._worker = connection, study, worker

    def claim(self, trial: int) -> Claim | None:
        """Claim a trial for this worker; None if it is another's."""
        chosen = (_CLAIM.c.study == self._study) & (_CLAIM.c.trial == trial)
        row = self._c.execute(sa.select(_CLAIM).where(chosen)).first()
        if row is None:
            fresh = {"worker": self._worker, "fence": 1, "epoch": 0, "trained": 0, "deaths": 0}
            self._c.execute(_CLAIM.insert().values(study=self._study, trial=trial, **fresh))
            return Claim(trial, 1, 0, 0)
        if row.worker is not None:
            return None
        fence = row.fence + 1
        self._c.execute(_CLAIM.update().where(chosen).values(worker=self._worker, fence=fence, trained=row.epoch))
        return Claim(trial, fence, row.epoch, row.deaths)

    def release(self, worker: str, *, died: bool) -> list[int]:
        """Take all trials from `worker`. What it trained since their last checkpoints is lost.

        Args:
            worker: whose.
            died: whether it has ended unasked.

        Returns:
            The trials' numbers. Under the same lock, they must go back to Optuna's waiting ones.
        """
        theirs = (_CLAIM.c.study == self._study) & (_CLAIM.c.worker == worker)
        rows = self._c.execute(sa.select(_CLAIM).where(theirs)).all()
        for row in rows:
            _add_span(self._c, row, row.trained, kept=False)
        deaths = _CLAIM.c.deaths + 1 if died else _CLAIM.c.deaths
        self._c.execute(_CLAIM.update().where(theirs).values(worker=None, deaths=deaths))
        gone = (_WORKER.c.study == self._study) & (_WORKER.c.worker == worker)
        self._c.execute(_WORKER.delete().where(gone))
        return [row.trial for row in rows]

    def release_expired(self) -> list[int]:
        """Take all trials from workers whose lease has run out; see `release`."""
        late = (_WORKER.c.study == self._study) & (_WORKER.c.expires_s < _now_s(self._c))
        dead = self._c.execute(sa.select(_WORKER.c.worker).where(late, _WORKER.c.worker != self._worker)).scalars()
        return [trial for worker in list(dead) for trial in self.release(worker, died=True)]

    def workers(self, prefix: str) -> list[str]:
        """The workers that hold trials and whose names begin with `prefix`."""
        named = (_CLAIM.c.study == self._study) & _CLAIM.c.worker.startswith(prefix, autoescape=True)
        return list(self._c.execute(sa.select(_CLAIM.c.worker).where(named).distinct()).scalars())

    def others(self) -> list[int]:
        """The trials that other workers hold."""
        taken = (_CLAIM.c.study == self._study) & (_CLAIM.c.worker != self._worker)
        return list(self._c.execute(sa.select(_CLAIM.c.trial).where(taken)).scalars())


class Owned:
    """One trial that no other worker can claim meanwhile."""

    def __init__(self, connection: sa.Connection, row: Any) -> None:
        self._c, self._row = connection, row
        self._this = (_CLAIM.c.study == row.study) & (_CLAIM.c.trial == row.trial)

    def keep(self, epoch: int) -> None:
        """Count the epochs up to `epoch` as kept: a checkpoint holds them."""
        _add_span(self._c, self._row, epoch, kept=True)
        values = {"epoch": epoch, "trained": epoch, "deaths": 0}
        self._c.execute(_CLAIM.update().where(self._this).values(**values))

    def go_back(self, epoch: int) -> None:
        """Count all after `epoch`, an earlier checkpoint's or 0, as lost."""
        after = (_SPAN.c.study == self._row.study) & (_SPAN.c.trial == self._row.trial) & (_SPAN.c.from_epoch >= epoch)
        self._c.execute(_SPAN.update().where(after).values(kept=False))
        self._c.execute(_CLAIM.update().where(self._this).values(epoch=epoch, trained=epoch))

    def end(self, epoch: int) -> None:
        """The trial has ended after `epoch` epochs."""
        self.keep(epoch)
        self._c.execute(_CLAIM.update().where(self._this).values(worker=None))


def connect(storage: str, directory: Path | None) -> sa.Engine:
    """Open the database of claims.

    Args:
        storage: Optuna's, see `open_storage`.
        directory: the study's. It holds the claims of a journal or an SQLite database; None: memory does.

    Raises:
        OthersError: the file is another user's work.
    """
    if "://" in storage and not storage.startswith("sqlite:"):
        url = database_url(storage)
        # under the lock, each statement must see what others have committed, whatever the server's default is
        return sa.create_engine(url, isolation_level="READ COMMITTED", pool_size=2, **engine_options(url))
    if directory is None:
        engine = sa.create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    else:
        make_dir(directory.parent)
        make_dir(directory)
        file = directory / "claims.db"
        check_ours(file)
        with open(file, "ab", opener=open_private):
            pass
        arguments = {"timeout": SQLITE_PATIENCE_S, "check_same_thread": False}
        engine = sa.create_engine(sa.URL.create("sqlite", database=str(file)), connect_args=arguments)
    sa.event.listen(engine, "connect", _leave_transactions_to_us)
    sa.event.listen(engine, "begin", _begin_as_writer)
    return engine


def _leave_transactions_to_us(connection: Any, _record: object) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")  # a commit costs one write, and no sync: a crash of the machine may
    connection.execute("PRAGMA synchronous=NORMAL")  # lose the last claims, but no checkpoint


def _begin_as_writer(c: sa.Connection) -> None:
    """Take SQLite's lock at the start: a transaction that only later wants to write fails beside another."""
    c.exec_driver_sql("BEGIN IMMEDIATE")


def _create_tables(engine: sa.Engine) -> None:
    for attempt in range(10):
        try:
            _TABLES.create_all(engine)
            return
        except (IntegrityError, OperationalError, ProgrammingError):  # another worker creates them at the same time
            if attempt == 9:
                raise
            time.sleep(0.2)


@contextmanager
def _suppress_duplicate(c: sa.Connection) -> Iterator[None]:
    """Let another worker have inserted the same row first."""
    try:
        with c.begin_nested():
            yield
    except IntegrityError:
        pass


def _now_s(c: sa.Connection) -> float:
    """The database's time, in seconds, so that the clocks of hosts need not agree."""
    if c.dialect.name == "sqlite":
        return time.time()
    if c.dialect.name == "postgresql":
        return float(c.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
    return float(c.execute(sa.text("SELECT unix_timestamp(now(6))")).scalar_one())


def _add_span(c: sa.Connection, row: Any, to_epoch: int, *, kept: bool) -> None:
    if to_epoch <= row.epoch:
        return
    values = {"operation": uuid.uuid4().hex, "study": row.study, "trial": row.trial, "fence": row.fence}
    values |= {"worker": row.worker, "from_epoch": row.epoch, "to_epoch": to_epoch, "kept": kept}
    c.execute(_SPAN.insert().values(**values))
