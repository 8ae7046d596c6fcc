"""Who trains which trial now. Optuna knows a trial's state; these tables beside it say which worker it belongs to.

A *claim* belongs to one worker until it is released, or until the worker's *lease* runs out. Each new claim has a
higher *fence* than all others of the study. What a worker writes counts only while its fence is the trial's newest, so
one that comes back from the dead harms nothing. A journal or an SQLite database has its claims in a file of its own on
the same host; another database holds them itself, for any number of hosts.

*Spans* are the accounts: trained = kept + lost, in epochs and per trial.
"""

import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from trials.search.storage import claim_tables
from trials.search.storage.beats import Beats
from trials.search.storage.claim_tables import (
    CLAIM,
    PACE,
    SPAN,
    STUDY,
    WORKER,
    create_tables,
    lock_row,
    since_1970_s,
    suppress_duplicate,
)
from trials.search.storage.locked_claims import LEASE_S as LEASE_S
from trials.search.storage.locked_claims import MOST_DEATHS as MOST_DEATHS
from trials.search.storage.locked_claims import LockedClaims as LockedClaims
from trials.search.storage.measured import Minute, read_minutes, write_minutes, write_speeds
from trials.search.storage.owned import Claim as Claim
from trials.search.storage.owned import Owned

WORTH_TELLING = 0.05
"""A speed that differs less from what was told is not told again."""


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


@dataclass(frozen=True, slots=True)
class Sign:
    """What a worker reports with a sign of life.

    Attributes:
        trained: number of a trial -> up to which epoch this worker has trained it.
        structures: number of a trial -> the name of its structure, if it has been built here.
        speeds: see `Fleet`.
        minutes: those that have changed.
        is_idle: whether its device has trained nothing for long.
    """

    trained: Mapping[int, int]
    structures: Mapping[int, str] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)
    minutes: Sequence[Minute] = ()
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class Account:
    """What a study's workers have trained.

    Attributes:
        trained: number of a trial -> how many epochs.
        minutes: the last day's, of all workers together.
        until: the last minute that all have told that hold trials now; None: none has told any.
        kept_share: the share of all trained epochs that no worker's death has lost.
    """

    trained: Mapping[int, int]
    minutes: Sequence[Minute]
    until: int | None
    kept_share: float


class Claims:
    """One worker's view of the claims on a study's trials. Its threads take turns.

    Args:
        engine: see `connect`.
        study: Optuna's name of it.
        worker: this worker's name.
        lease_s: how long others wait for a sign of life.
        directory: where its checkpoints are, see `trials.search.storage.directory_identity`; None: there are none.
        exclusive_rows: how many trials it trains at once on a device of its own; 0: it is in bubbles.
    """

    def __init__(
        self,
        engine: sa.Engine,
        study: str,
        worker: str,
        lease_s: float = LEASE_S,
        directory: str | None = None,
        exclusive_rows: int = 0,
    ) -> None:
        self._engine, self._study, self._worker, self._lease_s = engine, study, worker, lease_s
        self._directory, self._exclusive_rows = directory, exclusive_rows
        self._turn = threading.Lock()
        file = engine.url.database if engine.dialect.name == "sqlite" else None  # neither a server nor the memory
        self._beats = Beats(Path(file).parent, study, worker) if file else None
        self._told: dict[int, tuple[int, str | None]] = {}
        self._told_speeds: dict[str, float] = {}
        create_tables(engine)
        with engine.begin() as c:
            if not c.execute(sa.select(STUDY).where(STUDY.c.study == study)).first():
                with suppress_duplicate(c):
                    c.execute(STUDY.insert().values(study=study))

    def keep_in(self, directory: str | None) -> None:
        """Checkpoints are there, from before the first sign of life on."""
        self._directory = directory

    @contextmanager
    def alone(self) -> Iterator[LockedClaims]:
        """Hold the study's lock, and commit at the end. No other worker claims or releases meanwhile."""
        with self._turn, self._engine.begin() as c:
            self._told.clear()
            row = self._lock(c, STUDY)
            placement = None if row is None else row.placement
            if self._beats is not None:
                self._beats.note(c)
            yield LockedClaims(c, self._study, self._worker, self._lease_s, self._directory, placement)

    @contextmanager
    def owned(
        self, claim: Claim, operation: str | None = None, structure: str | None = None, *, writes: bool = True
    ) -> Iterator[Owned | None]:
        """Hold a trial of this worker's, and commit at the end; None: it is another's now.

        Args:
            claim: this worker's.
            operation: a name for what is written. Whoever does not know whether it was committed comes again with it.
            structure: the name of the trial's, if it has been built here.
            writes: whether claims or accounts change.
        """
        with self._turn, self._engine.begin() as c:
            self._told.pop(claim.trial, None)
            row = self._lock(c, CLAIM, of_trial=claim.trial, writes=writes)
            is_done = row is not None and operation is not None and row.operation == operation
            is_ours = row is not None and row.worker == self._worker and row.fence == claim.fence
            always = {"operation": operation, **({} if structure is None else {"structure": structure})}
            yield Owned(c, row, always, is_done, self._directory) if is_done or is_ours else None

    def add_lost(self, claim: Claim, from_epoch: int, to_epoch: int) -> None:
        """Count epochs of a trial that had ended as lost. To say it twice changes nothing."""
        said = f"{self._study} {claim.trial} {claim.fence} {from_epoch}"
        values: dict[str, Any] = {"span": uuid.uuid5(uuid.NAMESPACE_OID, said).hex, "study": self._study}
        values |= {
            "worker": self._worker,
            "trial": claim.trial,
            "fence": claim.fence,
            "from_epoch": from_epoch,
            "to_epoch": to_epoch,
        }
        with self._turn, self._engine.begin() as c, suppress_duplicate(c):
            c.execute(SPAN.insert().values(**values, kept=False))

    def beat(self) -> None:
        """Give a sign of life, and no other news. It waits for no lock, nor for another thread of this worker's.

        Raises:
            OSError: the file of the signs cannot be written.
            SQLAlchemyError: the server does not answer.
        """
        if self._beats is not None:
            with self._engine.connect() as c:
                self._beats.beat(claim_tables.now_s(c) + self._lease_s)
        elif self._engine.dialect.name != "sqlite":
            with self._engine.begin() as c:
                mine = (WORKER.c.study == self._study) & (WORKER.c.worker == self._worker)
                c.execute(WORKER.update().where(mine).values(expires_s=claim_tables.now_s(c) + self._lease_s))

    def renew(self, sign: Sign) -> float:
        """Give a sign of life. What it has said before, and nobody has changed since, is not said again.

        Returns:
            The time, in seconds since 1970.
        """
        told = {trial: (epoch, sign.structures.get(trial)) for trial, epoch in sign.trained.items()}
        with self._turn:
            with self._engine.begin() as c:
                time_s = claim_tables.now_s(c)
                mine = (WORKER.c.study == self._study) & (WORKER.c.worker == self._worker)
                lives = {"expires_s": time_s + self._lease_s, "is_idle": sign.is_idle}
                if not c.execute(WORKER.update().where(mine).values(**lives)).rowcount:
                    values = {"study": self._study, "worker": self._worker, "directory": self._directory, **lives}
                    c.execute(WORKER.insert().values(**values, exclusive_rows=self._exclusive_rows))
                    self._told_speeds = {}
                # in the order in which `LockedClaims.release` locks them
                news = sorted(trial for trial, said in told.items() if self._told.get(trial) != said)
                self._tell(c, {trial: told[trial] for trial in news})
                before = self._told_speeds
                speeds = {name: speed for name, speed in sign.speeds.items() if _differs(speed, before.get(name))}
                write_speeds(c, self._study, self._worker, speeds)
                write_minutes(c, self._study, self._worker, sign.minutes)
                date_s = since_1970_s(c, time_s)
            self._told = told
            self._told_speeds |= speeds
        return date_s

    def _tell(self, c: sa.Connection, news: Mapping[int, tuple[int, str | None]]) -> None:
        """Write up to which epoch trials are trained here, and their structures if they are known, all at once."""
        mine = (CLAIM.c.study == self._study) & (CLAIM.c.worker == self._worker)
        statement = CLAIM.update().where(mine, CLAIM.c.trial == sa.bindparam("of"))
        known: sa.ColumnElement[str] = sa.func.coalesce(sa.bindparam("named"), CLAIM.c.structure)
        rows = [{"of": trial, "to": epoch, "named": structure} for trial, (epoch, structure) in news.items()]
        if rows:
            c.execute(statement.values(trained=sa.bindparam("to"), structure=known), rows)

    def account(self) -> Account:
        """What has been trained in all, and when."""
        with self._turn:
            return read_account(self._engine, self._study)

    def spans(self) -> list[Span]:
        """The study's accounts."""
        with self._engine.connect() as c:
            rows = c.execute(sa.select(SPAN).where(SPAN.c.study == self._study).order_by(SPAN.c.from_epoch))
            return [Span(row.trial, row.from_epoch, row.to_epoch, row.kept) for row in rows]

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def _lock(self, c: sa.Connection, table: sa.Table, *, writes: bool = True, **chosen: int) -> Any:
        """Lock one row until the end of the transaction. Returns it; None: there is none."""
        chosen_here = {"of_study": self._study, "silent_ms": str(int(self._lease_s * 500)), **chosen}
        return c.execute(lock_row(table, c.dialect.name, writes=writes), chosen_here).first()


def read_account(engine: sa.Engine, study: str) -> Account:
    """What a study's workers have trained in all, and when; nothing, if none has begun yet. It writes nothing."""
    if not {CLAIM.name, SPAN.name, PACE.name} <= set(sa.inspect(engine).get_table_names()):
        return Account({}, (), None, 1.0)
    with engine.connect() as c:
        known = sa.select(CLAIM.c.trial, CLAIM.c.worker, CLAIM.c.epoch, CLAIM.c.trained)
        claims = c.execute(known.where(CLAIM.c.study == study)).all()
        length = sa.func.sum(SPAN.c.to_epoch - SPAN.c.from_epoch)
        spans = sa.select(SPAN.c.kept, length).where(SPAN.c.study == study).group_by(SPAN.c.kept)
        epochs = {bool(kept): int(count) for kept, count in c.execute(spans)}
        minutes, told = read_minutes(c, study, since_1970_s(c, claim_tables.now_s(c)))
        holders = {row.worker for row in claims if row.worker is not None}
        return Account(
            {row.trial: row.epoch if row.worker is None else max(row.epoch, row.trained) for row in claims},
            minutes,
            min((told[worker] for worker in holders & told.keys()), default=None),
            epochs.get(True, 0) / sum(epochs.values()) if epochs.get(True) else 1.0,
        )


def _differs(speed: float, told: float | None) -> bool:
    """Whether a speed is worth a statement."""
    return told is None or abs(speed - told) > WORTH_TELLING * told
