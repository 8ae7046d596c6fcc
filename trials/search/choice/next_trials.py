"""Which trials a worker gets next. Under the study's lock it claims them, and lets Optuna know."""

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from ds_hooks.shared.trial_attributes import MILESTONE, PARAMS, WORKER
from trials.own_logger import own_logger
from trials.search.choice.finite import has_begun_all
from trials.search.choice.paused import is_paused, standing_of
from trials.search.choice.placement import assign, groups, trial_name
from trials.search.choice.promotion import Ranking, next_milestone
from trials.search.leftovers import check_numbers, deleted
from trials.search.optuna_study import ended_after
from trials.search.storage.claims import Claim, LockedClaims

if TYPE_CHECKING:
    from trials.study import Study

log = own_logger(__name__)


class Claimed(NamedTuple):
    """A trial that a worker has claimed.

    Attributes:
        trial_id: Optuna's.
        claim: see there.
        milestone: the epoch up to which it may train.
        fits: False if it is known to fit on no living worker's device.
        is_new: whether nobody has begun it before.
    """

    trial_id: int
    claim: Claim
    milestone: int
    fits: bool = True
    is_new: bool = False


class _Candidate(NamedTuple):
    """A trial that may be claimed; `structure` is None if nobody has built it yet."""

    trial: FrozenTrial
    milestone: int
    structure: str | None = None
    fits: bool = True


class NextTrials:
    """The trials of a study that wait, and those that may still begin.

    Args:
        user_study: says how many there may be.
        study: Optuna's.
        seen: the same, as its sampler sees it.
        worker: who claims.
        is_exclusive: whether its device is its own. One in bubbles leaves it promoted trials, as far as there is room.
    """

    def __init__(
        self, user_study: "Study", study: optuna.Study, seen: optuna.Study, worker: str, *, is_exclusive: bool = False
    ) -> None:
        self._is_exclusive = is_exclusive
        self._user_study, self._study, self._seen, self._worker = user_study, study, seen, worker
        self._storage = study._storage
        self._rungs = [rung for rung in user_study.rungs if rung < user_study.epochs] if user_study.promotes else []
        self._ranking = Ranking(self._rungs, user_study.direction == "maximize")
        self._ranked: list[FrozenTrial | None] = []

    def claim(self, held: LockedClaims, most: int, *, may_begin: bool) -> list[Claimed]:
        """Claim up to `most` trials: those that were begun and left, those to promote, those enqueued, then new ones.

        Of trials that wait, those on their last try come first, then those that this device trains best; see
        `trials.search.choice.placement`.
        Last come trials to promote for which an exclusive worker has room. They are the longest to train. If there is
        nothing at all, those of workers come here that have died, or of one that has trained nothing for long.

        Args:
            held: the claims, locked.
            most: how many.
            may_begin: whether trials may begin or be promoted.
        """
        claimed = self._claim(held, most, may_begin=may_begin)
        if most and not claimed and self._take_from_others(held):
            claimed = self._claim(held, most, may_begin=may_begin)
        return claimed

    def _take_from_others(self, held: LockedClaims) -> bool:
        """Let trials wait of workers that have died, or else of one that is idle. Returns whether there were any."""
        ended = ended_after(self._study)
        taken = held.release_expired(ended)
        if requeue(self._study, held.claimed()) or taken:
            return True
        taken = held.release_idle(ended)
        if taken:
            log.info("%d trials come from a worker that has trained nothing for long", len(taken))
            requeue(self._study, held.claimed())
        return bool(taken)

    def _claim(self, held: LockedClaims, most: int, *, may_begin: bool) -> list[Claimed]:
        known = self._study.get_trials(deepcopy=False)
        check_numbers(self._study.study_name, known)
        self._rank(known)
        promoted = self._promoted(known) if may_begin and self._rungs else []
        room = 0 if self._is_exclusive or not promoted else held.exclusive_rows()
        claimed = self._claim_waiting(held, most, known, promoted[room:])
        if not may_begin or len(claimed) == most or held.has_last_try():
            return claimed
        begun_all = has_begun_all(self._seen)
        trials = len(known)
        while not begun_all and len(claimed) < most and trials < self._user_study.trials:
            claimed.append(self._begin(held))
            new = claimed[-1].claim.trial
            if new < trials:
                raise deleted(self._study.study_name, new)
            if new > trials:  # Optuna creates another one where the answer to its first try is cut off
                requeue(self._study, held.claimed())
                again = self._study.get_trials(deepcopy=False)
                self._rank(again)
                claimed += self._claim_waiting(held, most - len(claimed), again, [])
            trials = new + 1
        claimed += self._claim_all(held, most - len(claimed), self._fitting(held, promoted[:room]))
        if not claimed and (begun_all or len(known) >= self._user_study.trials):
            number = self._ranking.last_resort()
            if number is not None:
                last = known[number], self._next(known[number].user_attrs[MILESTONE])
                claimed += self._claim_all(held, most, self._fitting(held, [last]))
        return claimed

    def _claim_waiting(
        self, held: LockedClaims, most: int, known: Sequence[FrozenTrial], promoted: Sequence[tuple[FrozenTrial, int]]
    ) -> list[Claimed]:
        waiting = [t for t in known if t.state is TrialState.WAITING and not self._ranking.is_paused(t.number)]
        left = [trial for trial in waiting if PARAMS in trial.user_attrs]
        begun = [(trial, trial.user_attrs.get(MILESTONE, self._next(0))) for trial in left]
        enqueued = [(trial, self._next(0)) for trial in waiting if PARAMS not in trial.user_attrs]
        placed = self._placed(held, self._fitting(held, [*begun, *promoted]))
        if left:  # one on its last try has perhaps only waited while workers died; behind others it would wait again
            last = held.last_tries()
            placed.sort(key=lambda each: each.trial.number not in last)
        return self._claim_all(held, most, [*placed, *(_Candidate(*each) for each in enqueued)])

    def _claim_all(self, held: LockedClaims, most: int, candidates: Sequence[_Candidate]) -> list[Claimed]:
        """Claim up to `most` of these trials, in order."""
        claimed: list[Claimed] = []
        for each in candidates:
            if len(claimed) >= most:
                break
            claimed += self._take(held, each)
        return claimed

    def _fitting(self, held: LockedClaims, trials: Sequence[tuple[FrozenTrial, int]]) -> list[_Candidate]:
        """Return these trials with their milestones, but for those that fit only where other workers are.

        Structures are looked up only if they matter.
        """
        if not trials:
            return []
        speeds, workers = held.fleet().speeds, held.fleet().directories
        has_choice = len(workers) > 1 and len({structure for structure, _ in speeds}) > 1
        if not has_choice and 0.0 not in speeds.values():
            return [_Candidate(*each) for each in trials]
        known = held.known([trial.number for trial, _ in trials])
        found = []
        for trial, milestone in trials:
            structure, is_saved = known.get(trial.number, (None, False))
            names = structure, trial_name(trial.number)
            fits = held.fleet().fits(self._worker, names)
            if fits or not held.may_fit(names, is_saved=is_saved):
                found.append(_Candidate(trial, milestone, structure, fits))
            else:
                held.left.add(trial.number)
        return found

    def _placed(self, held: LockedClaims, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """Put those of the structure first that this worker is to train first."""
        counts = Counter(each.structure for each in candidates if each.structure is not None)
        if len(counts) < 2:
            return list(candidates)
        slots = {structure: groups(waiting, self._user_study.rows) for structure, waiting in counts.items()}
        before, workers = held.placement, held.readers()
        placed = assign(slots, workers, held.fleet().speeds, before)
        others = held.fleet().directories.keys() - set(workers)
        held.placement = {worker: before[worker] for worker in others & before.keys()} | placed
        first = placed.get(self._worker)
        return sorted(candidates, key=lambda each: each.structure != first)

    def paused(self) -> list[FrozenTrial]:
        """The trials that wait for their promotion."""
        return [trial for trial in self._study.get_trials(deepcopy=False) if is_paused(trial)]

    def _promoted(self, known: Sequence[FrozenTrial]) -> list[tuple[FrozenTrial, int]]:
        """Return the trials to promote, in order, each with its next milestone."""
        numbers = self._ranking.promotable(self._user_study.reduction_factor)
        return [(known[number], self._next(known[number].user_attrs[MILESTONE])) for number in numbers]

    def _rank(self, known: Sequence[FrozenTrial]) -> None:
        """Rank what has changed since the last look: a trial that has is another object."""
        if not self._rungs:
            return
        self._ranked += [None] * (len(known) - len(self._ranked))
        for index, trial in enumerate(known):
            if self._ranked[index] is not trial:
                standing = standing_of(trial, self._next(0), self._user_study.epochs)
                self._ranking.drop(trial.number) if standing is None else self._ranking.put(standing)
        self._ranked = list(known)

    def _next(self, after: int) -> int:
        return next_milestone(self._rungs, self._user_study.epochs, after)

    def _take(self, held: LockedClaims, candidate: _Candidate) -> list[Claimed]:
        """Claim a trial that waits, unless another worker has it."""
        trial = candidate.trial
        claim = held.claim(trial.number)
        if claim is None:
            return []
        milestone = self._next(max(candidate.milestone, claim.epoch) - 1)  # the study's rungs may be others now
        try:
            if self._rungs and trial.user_attrs.get(MILESTONE) != milestone:
                self._storage.set_trial_user_attr(trial._trial_id, MILESTONE, milestone)
            self._storage.set_trial_user_attr(trial._trial_id, WORKER, self._worker)
            self._storage.set_trial_state_values(trial._trial_id, state=TrialState.RUNNING)
        except UpdateFinishedTrialError:  # closed by someone meanwhile
            held.unclaim(trial.number)
            return []
        # one that a user has enqueued with another's attributes only seems begun
        is_new = claim.is_first and "fixed_params" in trial.system_attrs
        return [Claimed(trial._trial_id, claim, milestone, candidate.fits, is_new)]

    def _begin(self, held: LockedClaims) -> Claimed:
        attributes = {WORKER: self._worker, **({MILESTONE: self._next(0)} if self._rungs else {})}
        ours = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attributes)
        trial_id = self._storage.create_new_trial(self._study._study_id, template_trial=ours)
        number = self._storage.get_trial_number_from_id(trial_id)
        claim = held.begin(number)
        if claim is None:
            raise deleted(self._study.study_name, number)
        return Claimed(trial_id, claim, self._next(0), is_new=True)


def requeue(study: optuna.Study, taken: Collection[int]) -> int:
    """Let trials wait that a worker began and none holds. It may have died between writes to Optuna and the claims.

    Returns how many there were.

    Args:
        study: Optuna's. Its claims are locked.
        taken: the trials that some worker holds.
    """
    found = 0
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if trial.number not in taken and WORKER in trial.user_attrs:
            with suppress(UpdateFinishedTrialError):  # closed by someone meanwhile
                study._storage.set_trial_state_values(trial._trial_id, state=TrialState.WAITING)
                found += 1
    return found
