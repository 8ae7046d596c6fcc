"""A trial that a worker holds, and the accounts of what was trained of it."""

import uuid
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from trials.search.storage.claim_tables import ADD_SPAN, SPAN, UPDATE_CLAIM


@dataclass(frozen=True, slots=True)
class Claim:
    """A trial that is this worker's.

    Attributes:
        trial: its number.
        fence: higher with every claim in the study.
        epoch: up to which its training is kept, by a checkpoint or because it has just begun.
        deaths: how many workers have died in it since it was saved last.
        is_saved: whether there is a checkpoint, even of epoch 0.
        is_first: whether no worker has claimed it before.
    """

    trial: int
    fence: int
    epoch: int
    deaths: int
    is_saved: bool = False
    is_first: bool = field(default=False, compare=False)


class Owned:
    """One trial that no other worker can claim meanwhile.

    Attributes:
        is_done: all this has been committed before, under the same name.
    """

    def __init__(
        self, connection: sa.Connection, row: Any, always: dict[str, Any], is_done: bool, directory: str | None
    ) -> None:
        self._c, self._row, self._always, self.is_done = connection, row, always, is_done
        self._directory = directory

    def count(
        self, back_to: int | None, kept: int | None, ends_at: int | None, trained: int, *, lets_go: bool = False
    ) -> None:
        """Go back, keep and end, each if its epoch is given; or let go."""
        if back_to is not None:
            self.go_back(back_to)
        if kept is not None:
            self.keep(kept)
        if ends_at is not None:
            self.end(ends_at, trained)
        if lets_go:
            self.release(trained)

    def keep(self, epoch: int, **further: Any) -> None:
        """Count the epochs up to `epoch` as kept: a checkpoint holds them, and perhaps a part of the next one."""
        add_span(self._c, self._row, self._row.epoch, epoch, kept=True)
        self._update(epoch=epoch, trained=epoch, deaths=0, directory=self._directory, **further)

    def go_back(self, epoch: int) -> None:
        """Count all after `epoch`, an earlier checkpoint's or 0, as lost."""
        spans = (SPAN.c.study == self._row.study) & (SPAN.c.trial == self._row.trial)
        after = spans & SPAN.c.kept & (SPAN.c.to_epoch > epoch)
        for row in self._c.execute(sa.select(SPAN).where(after, SPAN.c.from_epoch < epoch)).all():
            self._c.execute(SPAN.update().where(SPAN.c.span == row.span).values(to_epoch=epoch))
            add_span(self._c, row, epoch, row.to_epoch, kept=False)
        self._c.execute(SPAN.update().where(after).values(kept=False))
        self._update(epoch=epoch, trained=epoch, **({} if epoch else {"directory": None}))

    def end(self, epoch: int, trained: int = 0) -> None:
        """The trial has ended after `epoch` epochs, and was trained for `trained` before that was known."""
        kept = max(epoch, self._row.epoch)
        self.keep(kept, worker=None)
        add_span(self._c, self._row, kept, trained, kept=False)

    def release(self, trained: int) -> None:
        """Let the trial go. What was trained since its last checkpoint, up to `trained`, is lost."""
        add_span(self._c, self._row, self._row.epoch, trained, kept=False)
        self._update(worker=None, trained=self._row.epoch)

    def _update(self, **values: Any) -> None:
        chosen = {"of_study": self._row.study, "of_trial": self._row.trial}
        self._c.execute(UPDATE_CLAIM, {**chosen, **self._always, **values})


def add_span(c: sa.Connection, of: Any, from_epoch: int, to_epoch: int, *, kept: bool) -> None:
    """Add to the accounts what the worker and the fence of that row have trained."""
    if to_epoch > from_epoch:
        values = {"span": uuid.uuid4().hex, "study": of.study, "trial": of.trial, "fence": of.fence}
        values |= {"worker": of.worker, "from_epoch": from_epoch, "to_epoch": to_epoch, "kept": kept}
        c.execute(ADD_SPAN, values)
