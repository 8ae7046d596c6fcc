"""What workers have measured, each in rows of its own: how fast it trains which structure, and its epochs per minute.

It is written with a worker's signs of life. Its speeds vanish with its lease.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from trials.search.storage import claim_tables
from trials.search.storage.claim_tables import PACE, SPEED, WORKER
from trials.search.storage.directory_identity import is_same

KEPT_MINUTES = 24 * 60
"""Minutes of a pace that are older are deleted."""


@dataclass(frozen=True, slots=True)
class Minute:
    """A minute of a worker's, or of all workers.

    Attributes:
        minute: since 1970.
        lived_s: how long a worker trained, or could have, in it.
        epochs: how many epochs of trials were trained meanwhile.
    """

    minute: int
    lived_s: float
    epochs: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """The living workers of a study.

    Attributes:
        exclusive_rows: worker -> how many trials it trains at once on a device of its own.
        directories: worker -> where its checkpoints are.
        speeds: (structure, worker) -> samples of trials per second of time of its device; 0: it does not fit there.
    """

    exclusive_rows: Mapping[str, int]
    directories: Mapping[str, str | None]
    speeds: Mapping[tuple[str, str], float]

    def readers(self, directory: str | None) -> list[str]:
        """The workers that can read checkpoints there."""
        return sorted(name for name, own in self.directories.items() if is_same(own, directory))

    def fits(self, worker: str, names: Sequence[str | None]) -> bool:
        """Whether a trial may fit there: nothing else is known of the names of its structure."""
        return all(self.speeds.get((name or "", worker)) != 0 for name in names)


def read_fleet(c: sa.Connection, study: str, own: str) -> Fleet:
    """Return the workers with a lease, and `own` in any case."""
    joined = WORKER.outerjoin(SPEED, (SPEED.c.study == WORKER.c.study) & (SPEED.c.worker == WORKER.c.worker))
    columns = WORKER.c.worker, WORKER.c.exclusive_rows, WORKER.c.directory, SPEED.c.structure, SPEED.c.samples_per_s
    lives = (WORKER.c.expires_s >= claim_tables.now_s(c)) | (WORKER.c.worker == own)
    rows = c.execute(sa.select(*columns).select_from(joined).where(WORKER.c.study == study, lives)).all()
    return Fleet(
        {row.worker: row.exclusive_rows for row in rows},
        {row.worker: row.directory for row in rows},
        {(row.structure, row.worker): row.samples_per_s for row in rows if row.structure is not None},
    )


def write_speeds(c: sa.Connection, study: str, worker: str, speeds: Mapping[str, float]) -> None:
    """Write a worker's speeds by structure; see `SPEED`."""
    for structure, samples_per_s in speeds.items():
        key = {"study": study, "worker": worker, "structure": structure}
        _put(c, SPEED, key, {"samples_per_s": samples_per_s})


def forget_speeds(c: sa.Connection, study: str, worker: str) -> None:
    """Delete a worker's speeds."""
    c.execute(SPEED.delete().where(SPEED.c.study == study, SPEED.c.worker == worker))


def write_minutes(c: sa.Connection, study: str, worker: str, minutes: Sequence[Minute]) -> None:
    """Write minutes of a worker's, as they are known now."""
    for each in minutes:
        key = {"study": study, "worker": worker, "minute": each.minute}
        _put(c, PACE, key, {"lived_s": each.lived_s, "epochs": each.epochs})


def forget_old_minutes(c: sa.Connection, study: str, time_s: float) -> None:
    """Delete what `read_minutes` leaves out at that time, for good; call it under the study's lock."""
    until = int(time_s // 60)
    recent = PACE.c.minute.between(until - KEPT_MINUTES, until + KEPT_MINUTES)
    c.execute(PACE.delete().where(PACE.c.study == study, ~recent))


def read_minutes(c: sa.Connection, study: str, time_s: float) -> tuple[list[Minute], dict[str, int]]:
    """Read the last day. What lies ahead was noted by a wrong clock, and is left out.

    Returns:
        The minutes of all workers together, of dead ones too: the longest that one lived, and all their epochs; and
        worker -> its last minute.
    """
    until = int(time_s // 60)
    recent = (PACE.c.study == study) & PACE.c.minute.between(until - KEPT_MINUTES, until + 1)
    together = sa.select(PACE.c.minute, sa.func.max(PACE.c.lived_s), sa.func.sum(PACE.c.epochs)).where(recent)
    lasts = sa.select(PACE.c.worker, sa.func.max(PACE.c.minute)).where(recent).group_by(PACE.c.worker)
    minutes = c.execute(together.group_by(PACE.c.minute).order_by(PACE.c.minute))
    return [Minute(*row) for row in minutes], {worker: last for worker, last in c.execute(lasts)}


def _put(c: sa.Connection, table: sa.Table, key: Mapping[str, object], values: Mapping[str, float]) -> None:
    """Write a row that nobody else writes."""
    chosen = sa.and_(*(table.c[name] == value for name, value in key.items()))
    if not c.execute(table.update().where(chosen).values(**values)).rowcount:
        c.execute(table.insert().values(**key, **values))
