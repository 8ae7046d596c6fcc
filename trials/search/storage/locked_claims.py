"""The claims of a study under its lock: who gets a trial, and whose trials are let go."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence

import sqlalchemy as sa

from trials.search.storage import claim_tables
from trials.search.storage.claim_tables import (
    ADD_CLAIM,
    CLAIM,
    DEATHS,
    HIGHEST_FENCE,
    NEW_CLAIM,
    PACE,
    READ_CLAIM,
    SPAN,
    STUDY,
    UPDATE_CLAIM,
    WORKER,
    since_1970_s,
)
from trials.search.storage.directory_identity import is_same
from trials.search.storage.measured import Fleet, forget_old_minutes, forget_speeds, read_fleet, write_speeds
from trials.search.storage.owned import Claim, add_span

LEASE_S = 60.0
"""How long a worker that gives no sign of life keeps its trials."""

MOST_DEATHS = 3
"""A trial is given up once this many workers have died in it without a further checkpoint. Its last try, until it has
one, is without any other: most were only fused with the one that ends processes."""


class LockedClaims:
    """The claims of a study under its lock.

    Attributes:
        elsewhere: trials that could not be claimed -> the directory with their checkpoints, which is not this worker's.
        left: trials that were not claimed since they do not fit here, but may where another worker is; or since a last
            try is alone; or since they are among `avoided`.
        avoided: trials that this worker must not claim.
    """

    def __init__(
        self,
        connection: sa.Connection,
        study: str,
        worker: str,
        lease_s: float,
        directory: str | None,
        placement: str | None,
    ) -> None:
        self._c, self._study, self._worker, self._lease_s = connection, study, worker, lease_s
        self._directory, self._placement = directory, placement
        self.elsewhere: dict[int, str] = {}
        self.left: set[int] = set()
        self.avoided: Collection[int] = ()
        self._fleet: Fleet | None = None
        self._mine: set[bool] | None = None
        self._highest: int | None = None  # fence of the study

    def claim(self, trial: int) -> Claim | None:
        """Claim a trial for this worker; None if it is another's, or if its checkpoints are elsewhere."""
        chosen = {"of_study": self._study, "of_trial": trial}
        row = self._c.execute(READ_CLAIM, chosen).first()
        if row is None:
            return self.begin(trial)
        if row.worker is not None:
            return None
        is_saved = row.epoch > 0 or row.directory is not None
        if is_saved and not is_same(row.directory, self._directory):
            self.elsewhere[trial] = row.directory
            return None
        is_last, is_given_up = row.deaths == MOST_DEATHS - 1, row.deaths >= MOST_DEATHS
        if trial in self.avoided or (self.has_last_try() and not is_given_up) or (is_last and self._holds()):
            self.left.add(trial)
            return None
        self._holds().add(is_last)
        fence = self._next_fence()
        self._c.execute(UPDATE_CLAIM, {**chosen, "worker": self._worker, "fence": fence, "trained": row.epoch})
        return Claim(trial, fence, row.epoch, row.deaths, is_saved)

    def begin(self, trial: int) -> Claim | None:
        """Claim a trial that is new, for this worker; as `claim`, if it is not."""
        fence = self._next_fence()
        fresh = {"study": self._study, "trial": trial, "worker": self._worker, "fence": fence}
        fresh |= {"epoch": 0, "trained": 0, "deaths": 0}
        new = {parameter: fresh[name] for name, parameter in NEW_CLAIM.items()}
        if self._c.execute(ADD_CLAIM, {**new, "of_study": self._study, "of_trial": trial}).rowcount != 1:
            return self.claim(trial)
        if self._mine is not None:
            self._mine.add(False)
        return Claim(trial, fence, 0, 0, is_first=True)

    def _next_fence(self) -> int:
        """One that is higher than all others. Nobody else gives any meanwhile."""
        if self._highest is None:
            self._highest = int(self._c.execute(HIGHEST_FENCE, {"of_study": self._study}).scalar() or 0)
        self._highest += 1
        return self._highest

    def last_tries(self) -> set[int]:
        """The trials of nobody's that are given up if one more worker dies in them."""
        free = (CLAIM.c.study == self._study) & CLAIM.c.worker.is_(None)
        return set(self._c.execute(sa.select(CLAIM.c.trial).where(free, CLAIM.c.deaths == MOST_DEATHS - 1)).scalars())

    def has_last_try(self) -> bool:
        """Whether this worker has a trial that is given up if it dies now, and so must have no other."""
        return True in self._holds()

    def _holds(self) -> set[bool]:
        """For the trials of this worker's, whether they are on their last try."""
        if self._mine is None:
            found = self._c.execute(DEATHS, {"of_study": self._study, "of_worker": self._worker}).scalars()
            self._mine = {deaths == MOST_DEATHS - 1 for deaths in found}
        return self._mine

    def fences(self, since: int) -> dict[int, tuple[int, bool]]:
        """Trials that are claimed, or have been with a fence above `since` -> (fence, whether some worker holds it)."""
        is_mine = CLAIM.c.worker == self._worker
        columns = sa.select(CLAIM.c.trial, CLAIM.c.fence, CLAIM.c.worker.is_not(None), is_mine, CLAIM.c.deaths)
        chosen = (CLAIM.c.study == self._study) & (CLAIM.c.worker.is_not(None) | (CLAIM.c.fence > since))
        rows = self._c.execute(columns.where(chosen)).all()
        self._highest = max((0, since, *(fence for _, fence, *_ in rows)))
        self._mine = {deaths == MOST_DEATHS - 1 for *_, is_mine, deaths in rows if is_mine}
        return {trial: (fence, is_held) for trial, fence, is_held, *_ in rows}

    def forget_all(self) -> None:
        """Forget what is known of all trials, as they are of a study of this name that was deleted."""
        for table in (CLAIM, SPAN, PACE):
            self._c.execute(table.delete().where(table.c.study == self._study))
        self._highest = self._mine = None

    def unclaim(self, trial: int) -> None:
        """Give back what `claim` has just claimed."""
        self._c.execute(UPDATE_CLAIM, {"of_study": self._study, "of_trial": trial, "worker": None})
        self._mine = None

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
            add_span(self._c, row, row.epoch, kept, kept=True)
            add_span(self._c, row, kept, row.trained, kept=False)
        deaths = CLAIM.c.deaths + 1 if died else CLAIM.c.deaths
        self._c.execute(CLAIM.update().where(theirs).values(worker=None, deaths=deaths))
        forget_speeds(self._c, self._study, worker)
        self._fleet = self._mine = None
        return left

    def release_expired(self, ended: Callable[[int], int | None] = lambda trial: None) -> list[int]:
        """Take all trials from workers whose lease has run out; see `release`."""
        time_s = claim_tables.now_s(self._c)
        forget_old_minutes(self._c, self._study, since_1970_s(self._c, time_s))
        here, known = WORKER.c.study == self._study, CLAIM.c.study == self._study
        # one that ends later than any lease is from before the machine was started again: see `now_s`
        is_late = (WORKER.c.expires_s < time_s) | (WORKER.c.expires_s > time_s + 10 * max(self._lease_s, LEASE_S))
        late = sa.select(WORKER.c.worker).where(here, is_late)
        signs = sa.select(WORKER.c.worker).where(here)
        mute = sa.select(CLAIM.c.worker).where(known, CLAIM.c.worker.is_not(None), CLAIM.c.worker.not_in(signs))
        dead = {*self._c.execute(late).scalars(), *self._c.execute(mute).scalars()} - {self._worker}
        return [trial for worker in sorted(dead) for trial in self.release(worker, died=True, ended=ended)]

    def release_idle(self, ended: Callable[[int], int | None]) -> list[int]:
        """Take all trials from a worker whose device has trained nothing for long; see `release`."""
        others = [name for name in self.readers() if name != self._worker]
        holds = sa.select(CLAIM.c.worker).where(CLAIM.c.study == self._study)
        idle = sa.select(sa.func.min(WORKER.c.worker)).where(WORKER.c.study == self._study, WORKER.c.is_idle)
        worker = self._c.execute(idle.where(WORKER.c.worker.in_(others), WORKER.c.worker.in_(holds))).scalar()
        return [] if worker is None else self.release(worker, died=False, ended=ended)

    def workers(self, prefix: str) -> list[str]:
        """The workers that hold trials and whose names begin with `prefix`."""
        named = (CLAIM.c.study == self._study) & CLAIM.c.worker.startswith(prefix, autoescape=True)
        return list(self._c.execute(sa.select(CLAIM.c.worker).where(named).distinct()).scalars())

    def claimed(self) -> list[int]:
        """The trials that any worker holds."""
        taken = (CLAIM.c.study == self._study) & CLAIM.c.worker.is_not(None)
        return list(self._c.execute(sa.select(CLAIM.c.trial).where(taken)).scalars())

    def fleet(self) -> Fleet:
        """The living workers."""
        if self._fleet is None:
            self._fleet = read_fleet(self._c, self._study, self._worker)
        return self._fleet

    def exclusive_rows(self) -> int:
        """How many trials other living workers, which can read our checkpoints, train on devices of their own."""
        return sum(self.fleet().exclusive_rows[name] for name in self.readers() if name != self._worker)

    def known(self, trials: Collection[int]) -> dict[int, tuple[str | None, bool]]:
        """Those of `trials` that were claimed before -> (structure, whether there is a checkpoint)."""
        columns = sa.select(CLAIM.c.trial, CLAIM.c.structure, CLAIM.c.epoch, CLAIM.c.directory)
        chosen = (CLAIM.c.study == self._study) & CLAIM.c.trial.in_(sorted(trials))
        rows = self._c.execute(columns.where(chosen))
        return {trial: (structure, epoch > 0 or where is not None) for trial, structure, epoch, where in rows}

    def readers(self) -> list[str]:
        """The living workers that can read checkpoints of this one's."""
        return self.fleet().readers(self._directory)

    def may_fit(self, names: Sequence[str | None], *, is_saved: bool) -> bool:
        """Whether a trial may fit where any living worker is, as far as is known.

        Args:
            names: of its structure.
            is_saved: whether there is a checkpoint, which is needed to continue.
        """
        workers = self.readers() if is_saved else self.fleet().directories
        return any(self.fleet().fits(worker, names) for worker in workers)

    def note_unfit(self, names: Collection[str]) -> None:
        """Structures of these names do not fit on this worker's device."""
        write_speeds(self._c, self._study, self._worker, dict.fromkeys(names, 0.0))
        self._fleet = None

    @property
    def placement(self) -> dict[str, str]:
        """Worker -> the structure of which it gets trials first, as it was decided last."""
        return dict(json.loads(self._placement)) if self._placement else {}

    @placement.setter
    def placement(self, placed: Mapping[str, str]) -> None:
        text = json.dumps(dict(sorted(placed.items())))
        if text != self._placement:
            self._placement = text
            self._c.execute(STUDY.update().where(STUDY.c.study == self._study).values(placement=text))

    def directories(self) -> set[str | None]:
        """Those of all workers that have given a sign of life."""
        here = WORKER.c.study == self._study
        return set(self._c.execute(sa.select(WORKER.c.directory).where(here)).scalars())

    def others(self) -> list[int]:
        """The trials that other workers hold."""
        taken = (CLAIM.c.study == self._study) & (CLAIM.c.worker != self._worker)
        return list(self._c.execute(sa.select(CLAIM.c.trial).where(taken)).scalars())
