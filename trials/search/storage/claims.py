"""Who trains which trial now. Optuna knows a trial's state; these tables beside it say which worker it belongs to.

A *claim* belongs to one worker until it is released, or until the worker's *lease* runs out. Each new claim has a
higher *fence* than all others of the study. What a worker writes counts only while its fence is the trial's newest, so
one that comes back from the dead harms nothing. A journal or an SQLite database has its claims in a file of its own on
the same host; another database holds them itself, for any number of hosts.

*Spans* are the accounts: trained = kept + lost, in epochs and per trial.
"""

import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from trials.search.storage.claim_tables import CLAIM, SPAN, STUDY, WORKER, create_tables, now_s, suppress_duplicate
from trials.search.storage.directory_identity import is_same

LEASE_S = 60.0
"""How long a worker that gives no sign of life keeps its trials."""

MOST_DEATHS = 3
"""A trial is given up once this many workers have died in it without a further checkpoint."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A trial that is this worker's.

    Attributes:
        trial: its number.
        fence: higher with every claim in the study.
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
        self._told: dict[int, int] = {}
        create_tables(engine)
        with engine.begin() as c:
            if not c.execute(sa.select(STUDY).where(STUDY.c.study == study)).first():
                with suppress_duplicate(c):
                    c.execute(STUDY.insert().values(study=study))

    @contextmanager
    def alone(self) -> Iterator["Held"]:
        """Hold the study's lock, and commit at the end. No other worker claims or releases meanwhile."""
        self._told.clear()
        with self._engine.begin() as c:
            self._lock(c, STUDY, STUDY.c.study == self._study)
            yield Held(c, self._study, self._worker, self._lease_s, self._directory)

    @contextmanager
    def owned(self, claim: Claim, operation: str | None = None) -> Iterator["Owned | None"]:
        """Hold a trial of this worker's, and commit at the end; None: it is another's now.

        Args:
            claim: this worker's.
            operation: a name for what is written. Whoever does not know whether it was committed comes again with it.
        """
        self._told.pop(claim.trial, None)
        with self._engine.begin() as c:
            row = self._lock(c, CLAIM, (CLAIM.c.study == self._study) & (CLAIM.c.trial == claim.trial))
            is_done = row is not None and operation is not None and row.operation == operation
            is_ours = row is not None and row.worker == self._worker and row.fence == claim.fence
            yield Owned(c, row, operation, is_done, self._directory) if is_done or is_ours else None

    def renew(self, trained: dict[int, int]) -> None:
        """Give a sign of life. What it has said before, and nobody has changed since, is not said again.

        Args:
            trained: number of a trial -> up to which epoch this worker has trained it.
        """
        with self._engine.begin() as c:
            until_s = now_s(c) + self._lease_s
            mine = (WORKER.c.study == self._study) & (WORKER.c.worker == self._worker)
            if not c.execute(WORKER.update().where(mine).values(expires_s=until_s)).rowcount:
                values = {"worker": self._worker, "expires_s": until_s, "directory": self._directory}
                values["exclusive_rows"] = self._exclusive_rows
                c.execute(WORKER.insert().values(study=self._study, **values))
            # in the order in which `Held.release` locks them
            for trial, epoch in sorted(trained.items() - self._told.items()):
                row = (CLAIM.c.study == self._study) & (CLAIM.c.trial == trial) & (CLAIM.c.worker == self._worker)
                c.execute(CLAIM.update().where(row).values(trained=epoch))
        self._told = dict(trained)

    def spans(self) -> list[Span]:
        """The study's accounts."""
        with self._engine.connect() as c:
            rows = c.execute(sa.select(SPAN).where(SPAN.c.study == self._study).order_by(SPAN.c.from_epoch))
            return [Span(row.trial, row.from_epoch, row.to_epoch, row.kept) for row in rows]

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def _lock(self, c: sa.Connection, table: sa.Table, where: sa.ColumnElement[bool]) -> Any:
        """Lock one row until the end of the transaction. Returns it; None: there is none.

        A host that falls silent must not hold others up: the server ends its transaction before they need the row.
        """
        columns: list[Any] = [table]
        if c.dialect.name == "postgresql":
            silent_ms = str(int(self._lease_s * 500))
            columns.append(sa.func.set_config("idle_in_transaction_session_timeout", silent_ms, True))
        return c.execute(sa.select(*columns).where(where).with_for_update()).first()


class Held:
    """The claims of a study under its lock.

    Attributes:
        elsewhere: trials that could not be claimed -> the directory with their checkpoints, which is not this worker's.
    """

    def __init__(
        self, connection: sa.Connection, study: str, worker: str, lease_s: float, directory: str | None
    ) -> None:
        self._c, self._study, self._worker, self._lease_s = connection, study, worker, lease_s
        self._directory = directory
        self.elsewhere: dict[int, str] = {}

    def claim(self, trial: int) -> Claim | None:
        """Claim a trial for this worker; None if it is another's, or if its checkpoints are elsewhere."""
        chosen = (CLAIM.c.study == self._study) & (CLAIM.c.trial == trial)
        row = self._c.execute(sa.select(CLAIM).where(chosen)).first()
        highest = sa.select(sa.func.max(CLAIM.c.fence)).where(CLAIM.c.study == self._study)
        fence = int(self._c.execute(highest).scalar() or 0) + 1
        if row is None:
            fresh = {"worker": self._worker, "epoch": 0, "trained": 0, "deaths": 0}
            self._c.execute(CLAIM.insert().values(study=self._study, trial=trial, fence=fence, **fresh))
            return Claim(trial, fence, 0, 0)
        if row.worker is not None:
            return None
        if row.epoch and not is_same(row.directory, self._directory):
            self.elsewhere[trial] = row.directory
            return None
        self._c.execute(CLAIM.update().where(chosen).values(worker=self._worker, fence=fence, trained=row.epoch))
        return Claim(trial, fence, row.epoch, row.deaths)

    def fences(self, since: int) -> dict[int, tuple[int, bool]]:
        """Trials that are claimed, or have been with a fence above `since` -> (fence, whether some worker holds it)."""
        columns = sa.select(CLAIM.c.trial, CLAIM.c.fence, CLAIM.c.worker.is_not(None))
        chosen = (CLAIM.c.study == self._study) & (CLAIM.c.worker.is_not(None) | (CLAIM.c.fence > since))
        return {trial: (fence, is_held) for trial, fence, is_held in self._c.execute(columns.where(chosen))}

    def unclaim(self, trial: int) -> None:
        """Give back what `claim` has just claimed."""
        chosen = (CLAIM.c.study == self._study) & (CLAIM.c.trial == trial)
        self._c.execute(CLAIM.update().where(chosen).values(worker=None))

    def unclaim_all_but(self, known: Collection[Claim]) -> None:
        """Give back this worker's trials of which it does not know: they were claimed, and the answer was cut off."""
        fences = {claim.trial: claim.fence for claim in known}
        mine = (CLAIM.c.study == self._study) & (CLAIM.c.worker == self._worker)
        for row in self._c.execute(sa.select(CLAIM).where(mine)).all():
            if fences.get(row.trial) != row.fence:
                self.unclaim(row.trial)

    def release(self, worker: str, *, died: bool, ended: Callable[[int], int | None] = lambda trial: None) -> list[int]:
        """Take all trials from `worker`. What it trained since their last checkpoints is lost.

        Args:
            worker: whose.
            died: whether it has ended unasked.
            ended: a trial's number -> after how many epochs Optuna has it ended, which the worker may have died before
                writing here; None: it has not.

        Returns:
            The numbers of those that have not ended. Under the same lock, they must go back to Optuna's waiting ones.
        """
        # first, as in `Claims.renew`, so that neither has a row for which the other waits
        self._c.execute(WORKER.delete().where((WORKER.c.study == self._study) & (WORKER.c.worker == worker)))
        theirs = (CLAIM.c.study == self._study) & (CLAIM.c.worker == worker)
        # locked: it may live, and be in the middle of keeping what would be counted as lost here
        rows = self._c.execute(sa.select(CLAIM).where(theirs).order_by(CLAIM.c.trial).with_for_update()).all()
        left = []
        for row in rows:
            end = ended(row.trial)
            if end is None:
                left.append(row.trial)
            kept = max(end or 0, row.epoch)
            _add_span(self._c, row, row.epoch, kept, kept=True)
            _add_span(self._c, row, kept, row.trained, kept=False)
        deaths = CLAIM.c.deaths + 1 if died else CLAIM.c.deaths
        self._c.execute(CLAIM.update().where(theirs).values(worker=None, deaths=deaths))
        return left

    def release_expired(self, ended: Callable[[int], int | None] = lambda trial: None) -> list[int]:
        """Take all trials from workers whose lease has run out; see `release`."""
        time_s = now_s(self._c)
        here, known = WORKER.c.study == self._study, CLAIM.c.study == self._study
        # one that ends later than any lease is from before the machine was started again: see `now_s`
        is_late = (WORKER.c.expires_s < time_s) | (WORKER.c.expires_s > time_s + 10 * max(self._lease_s, LEASE_S))
        late = sa.select(WORKER.c.worker).where(here, is_late)
        signs = sa.select(WORKER.c.worker).where(here)
        mute = sa.select(CLAIM.c.worker).where(known, CLAIM.c.worker.is_not(None), CLAIM.c.worker.not_in(signs))
        dead = {*self._c.execute(late).scalars(), *self._c.execute(mute).scalars()} - {self._worker}
        return [trial for worker in sorted(dead) for trial in self.release(worker, died=True, ended=ended)]

    def workers(self, prefix: str) -> list[str]:
        """The workers that hold trials and whose names begin with `prefix`."""
        named = (CLAIM.c.study == self._study) & CLAIM.c.worker.startswith(prefix, autoescape=True)
        return list(self._c.execute(sa.select(CLAIM.c.worker).where(named).distinct()).scalars())

    def claimed(self) -> list[int]:
        """The trials that any worker holds."""
        taken = (CLAIM.c.study == self._study) & CLAIM.c.worker.is_not(None)
        return list(self._c.execute(sa.select(CLAIM.c.trial).where(taken)).scalars())

    def exclusive_rows(self) -> int:
        """How many trials other living workers, which can read our checkpoints, train on devices of their own."""
        living = (WORKER.c.study == self._study) & (WORKER.c.expires_s >= now_s(self._c))
        others = self._c.execute(sa.select(WORKER).where(living, WORKER.c.worker != self._worker)).all()
        return sum(other.exclusive_rows for other in others if is_same(other.directory, self._directory))

    def directories(self) -> set[str | None]:
        """Those of all workers that have given a sign of life."""
        here = WORKER.c.study == self._study
        return set(self._c.execute(sa.select(WORKER.c.directory).where(here)).scalars())

    def others(self) -> list[int]:
        """The trials that other workers hold."""
        taken = (CLAIM.c.study == self._study) & (CLAIM.c.worker != self._worker)
        return list(self._c.execute(sa.select(CLAIM.c.trial).where(taken)).scalars())


class Owned:
    """One trial that no other worker can claim meanwhile.

    Attributes:
        is_done: all this has been committed before, under the same name.
    """

    def __init__(
        self, connection: sa.Connection, row: Any, operation: str | None, is_done: bool, directory: str | None
    ) -> None:
        self._c, self._row, self._operation, self.is_done = connection, row, operation, is_done
        self._directory = directory
        self._this = (CLAIM.c.study == row.study) & (CLAIM.c.trial == row.trial)
        self._spans = (SPAN.c.study == row.study) & (SPAN.c.trial == row.trial)

    def count(self, back_to: int | None, kept: int | None, ends_at: int | None, trained: int) -> None:
        """Go back, keep and end, each if its epoch is given."""
        if back_to is not None:
            self.go_back(back_to)
        if kept is not None:
            self.keep(kept)
        if ends_at is not None:
            self.end(ends_at, trained)

    def keep(self, epoch: int) -> None:
        """Count the epochs up to `epoch` as kept: a checkpoint holds them."""
        _add_span(self._c, self._row, self._row.epoch, epoch, kept=True)
        self._update(epoch=epoch, trained=epoch, deaths=0, directory=self._directory)

    def go_back(self, epoch: int) -> None:
        """Count all after `epoch`, an earlier checkpoint's or 0, as lost."""
        after = self._spans & SPAN.c.kept & (SPAN.c.to_epoch > epoch)
        for row in self._c.execute(sa.select(SPAN).where(after, SPAN.c.from_epoch < epoch)).all():
            self._c.execute(SPAN.update().where(SPAN.c.span == row.span).values(to_epoch=epoch))
            _add_span(self._c, row, epoch, row.to_epoch, kept=False)
        self._c.execute(SPAN.update().where(after).values(kept=False))
        self._update(epoch=epoch, trained=epoch)

    def end(self, epoch: int, trained: int = 0) -> None:
        """The trial has ended after `epoch` epochs, and was trained for `trained` before that was known."""
        kept = max(epoch, self._row.epoch)
        self.keep(kept)
        _add_span(self._c, self._row, kept, trained, kept=False)
        self._update(worker=None)

    def _update(self, **values: Any) -> None:
        self._c.execute(CLAIM.update().where(self._this).values(operation=self._operation, **values))


def _add_span(c: sa.Connection, of: Any, from_epoch: int, to_epoch: int, *, kept: bool) -> None:
    """Add to the accounts what the worker and the fence of that row have trained."""
    if to_epoch > from_epoch:
        values = {"span": uuid.uuid4().hex, "study": of.study, "trial": of.trial, "fence": of.fence}
        values |= {"worker": of.worker, "from_epoch": from_epoch, "to_epoch": to_epoch, "kept": kept}
        c.execute(SPAN.insert().values(**values))
