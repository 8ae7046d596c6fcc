"""The search worker's share in a study: it asks Optuna for trials, claims them, and writes what becomes of them."""

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from trials.own_logger import own_logger
from trials.search.begin import Beginner, Unbegun
from trials.search.callbacks import Callbacks
from trials.search.choice.finite import is_finite
from trials.search.choice.next_trials import Claimed, NextTrials, requeue
from trials.search.choice.paused import as_samplers_see
from trials.search.choice.placement import trial_name
from trials.search.choice.space import check_begun, check_space
from trials.search.config import WorkerConfig as WorkerConfig
from trials.search.deadline_outlook import DeadlineWatch, outlook
from trials.search.files import checkpoint_files
from trials.search.files.study_files import StudyFiles
from trials.search.measures import Measures
from trials.search.optuna_study import ended_after, open_study, safe_sampler
from trials.search.optuna_trials import OptunaTrials
from trials.search.storage.claims import Claims, LockedClaims
from trials.search.storage.database import START_PATIENCE_S, connect, is_away, patiently
from trials.search.storage.directory_identity import Unseen, identity
from trials.search.storage.host_lock import hold
from trials.search.storage.journal import together
from trials.search.storage.late_epochs import LateEpochs
from trials.search.study_lock import StudyLock
from trials.study import Study

log = own_logger(__name__)


class SearchWorker:
    """One worker's share in a study.

    Args:
        study: the user's.
        config: where its trials are.
        holder: runs all work that is done under the lock of the study's workers.

    Attributes:
        trained: number of a trial of this worker's -> how many epochs it has trained.
        measures: what it measures of itself.
        beat: see `Claims.beat`.
    """

    def __init__(self, study: Study, config: WorkerConfig, holder: Executor) -> None:
        self._user_study = study
        self._config = config
        sampler = safe_sampler(study, config.storage)
        self._host = hold(config.storage, config.directory)  # for as long as this file is open
        directory = None if config.directory is None else identity(config.directory)
        engine = connect(config.storage, config.directory)
        name, rows = config.study_name, config.exclusive_rows
        begin = partial(Claims, engine, name, config.worker, config.lease_s, directory, rows)
        self._claims = patiently(lambda again: holder.submit(begin).result(), START_PATIENCE_S)
        self.beat = self._claims.beat
        self._held: dict[int, Claimed] = {}
        self._lock = StudyLock(self._claims, holder, lambda: [each.claim for each in self._held.values()])
        opened = partial(open_study, study, config, sampler, directory)
        self._study: optuna.Study = patiently(lambda again: self._lock.locked(opened), START_PATIENCE_S)
        self._lock.study = self._study
        check_space(study, self._study)
        self._files = StudyFiles(study, self._study, config, self._lock.alone)
        directory = self._files.identity(directory)
        self._claims.keep_in(directory)
        self._unseen = Unseen(directory)
        self._study.stop = partial(setattr, self, "_stopped", True)  # Optuna's own raises outside `optimize`
        self._seen = patiently(lambda again: as_samplers_see(self._study)) if study.promotes else self._study
        self._stopped = self._over = False
        self._is_finite = is_finite(self._study.sampler)
        self._next = NextTrials(study, self._study, self._seen, config.worker, is_exclusive=rows > 0)
        self._callbacks = Callbacks(study, self._study)
        self._storage = self._study._storage
        self._ended_after = ended_after(self._study)
        self._trials = OptunaTrials(self._study, self._seen, self._ended_after)
        self._beginner = Beginner(study, self._seen, self._trials.known)
        self._lost_here, self._unnoticed = set[int](), set[int]()  # lost: the side task has them, or this one held them
        self._closed, self._news = list[tuple[int, int]](), list[dict[str, Any]]()
        self._late = LateEpochs(self._claims)
        self.trained, self.measures = dict[int, int](), Measures()
        self._watch = DeadlineWatch(study.deadline, lambda: outlook(study, self._study, self._claims.account()))
        self._release(died=True)
        patiently(lambda again: self.renew())
        self._files.adopt()
        self._unseen.warn_of(self._lock.alone(LockedClaims.directories))

    def ask(self, most: int, here: Collection[int] = ()) -> dict[str, Any]:
        """Return up to `most` trials to train: first those that others have begun and left, then new ones.

        They are exhausted if the study has as many trials as it wants, if a sampler of finitely many points has begun
        them all, or if someone has called Optuna's `Study.stop`: the sampler, the pruner, a callback or the user's
        `suggest`. They are over if no other worker trains any either. Until then, one may die and leave some, and a
        trial may pause, so that another is promoted.

        Args:
            most: how many trials.
            here: those that the side task has. What it still says of a lost one must not count for a new claim.
        """
        self._lost_here &= set(here)
        self._late.keep(here)
        self._files.check_and_retry()
        found: list[dict[str, Any]] = []
        exhausted = self._over = False
        while len(found) < most and not exhausted:
            # one by one under the lock, so that the sampler knows what others have begun, and repeats no point
            wanted = 1 if self._is_finite else most - len(found)
            claimed, self._over, begun = self._lock.alone(partial(self._claim, most=wanted))
            exhausted = len(claimed) < wanted
            self._news += map(self._lost, self._unnoticed & self._held.keys())
            self._held |= {each.claim.trial: each for each in claimed}  # not earlier: now it is committed
            self.trained |= {each.claim.trial: each.claim.epoch for each in claimed}
            while self._closed:  # not under the lock: the artifact store may be slow
                self._ended(*self._closed.pop(0))
            for each in begun or patiently(partial(self._begin_all, claimed)):
                if isinstance(each, dict):
                    found += [each] if self._is_here(**each) else []
                    continue
                self._end(each.number, each.state, self.trained[each.number], each.reason)
                if each.is_refused:
                    check_space(self._user_study, self._study)
        return {"trials": found, "exhausted": exhausted, "over": self._over, "bar": self._files.bar}

    def report(
        self,
        number: int,
        epoch: int,
        value: float | list[float],
        final: bool,
        weights: str | None = None,
        history: dict[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Record a score. Returns an answer where the pruner was asked, or if the trial is lost.

        Args:
            number: the trial's.
            epoch: how many epochs it has trained.
            value: its score, or one for each objective.
            final: whether this is the last one.
            weights: the file of its weights, if it may be among the best.
            history: its losses and scores so far.
        """
        if number not in self._held:
            checkpoint_files.discard(weights)
            return None  # it was pruned or lost while this score was on its way
        self.trained[number] = max(epoch, self.trained[number])
        trial = patiently(lambda again: self._trials.trial(number))
        pauses = not final and self._user_study.promotes and epoch >= self._held[number].milestone
        state = TrialState.COMPLETE if final else TrialState.WAITING if pauses else TrialState.RUNNING
        write = partial(self._trials.report, trial, epoch, value, state, history)
        if weights is not None:
            self._files.offer(number, weights)
        if not self._owning(number, write, released_at=epoch if final or pauses else None):
            checkpoint_files.discard(weights)
            return self._lost(number)
        said = patiently(lambda again: self._watch.judge())
        self._news += [] if said is None else [said]
        if final:
            if weights is not None:
                self._files.take(number, weights)
            self._ended(number, trial._trial_id)
        if final or self._user_study.promotes:
            return None
        try:
            # a worker that died was not told to prune it here, and the pruner would look at what came later
            is_latest = trial._cached_frozen_trial.last_step == epoch
            if not (is_latest and patiently(lambda again: trial.should_prune())):
                return {"kept": number}
        except (Exception, SystemExit) as error:
            if is_away(error):
                raise
            reason = f"pruner: {type(error).__name__}: {error}"
            log.warning("trial %d failed: %s", number, reason)
            return self.fail(number, reason) or {"pruned": number}
        return self._end(number, TrialState.PRUNED, epoch) or {"pruned": number}

    def fail(self, number: int, reason: str) -> dict[str, Any] | None:
        """End trial `number` as failed for `reason`. Returns an answer if it is lost."""
        if number not in self._held:
            return None
        check_begun(self._user_study, patiently(lambda again: self._trials.frozen(number)), reason)
        return self._end(number, TrialState.FAIL, self.trained[number], reason)

    def does_not_fit(self, number: int, reason: str) -> dict[str, Any] | None:
        """Let another worker have a trial that does not fit here; if it fits on none, it fails. As `fail` else."""
        if number not in self._held:
            return None
        name = self.measures.structure(number) or trial_name(number)
        self.measures.does_not_fit(name)
        is_saved = self._held[number].claim.is_saved

        def may_fit(held: LockedClaims) -> bool:
            held.note_unfit([name])
            return held.may_fit([name], is_saved=is_saved)

        if not self._lock.alone(may_fit):
            return self.fail(number, reason)
        trial_id = patiently(lambda again: self._trials.id(number))
        log.info("trial %d does not fit into memory here, and waits for another worker", number)
        if not self._owning(number, partial(self._trials.release, trial_id), lets_go=True):
            return self._lost(number)
        return None

    def checkpoint(self, number: int, written: Path) -> dict[str, Any] | None:
        """Take a checkpoint that the side task has written. Returns whether it did, or that the trial is lost."""
        if number not in self._held:
            checkpoint_files.discard(written)
            return None
        trial_id, claim, *_ = self._held[number]
        saved = self._files.save(number, written, claim.fence)
        if saved is None:
            return None
        self.trained[number] = saved.epoch
        if not self._owning(number, partial(self._trials.note_checkpoints, trial_id, saved.stored), kept=saved.epoch):
            self._files.discard(saved)
            return self._lost(number)
        self._files.keep(saved)
        return {"taken": number, "epoch": saved.epoch, "place": saved.place}

    def began(
        self, number: int, epoch: int, score: float | list[float] | None = None, history: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """The side task begins a trial at `epoch`: earlier than claimed, if no newer checkpoint can be used.

        Args:
            number: the trial's.
            epoch: how many epochs it has trained.
            score: at that epoch, if it is a rung.
            history: its losses and scores so far.

        Returns:
            An answer as to `report`, if that score has not been recorded, or if the trial is lost.
        """
        if number not in self._held:
            return None
        if epoch < self._held[number].claim.epoch:
            log.warning("trial %d continues from epoch %d: no newer checkpoint can be used", number, epoch)
            self.trained[number] = epoch
            if not self._owning(number, lambda: None, back_to=epoch):
                return self._lost(number)
        trial = patiently(lambda again: self._trials.trial(number))
        pauses = self._user_study.promotes and epoch >= self._held[number].milestone
        if score is None or (epoch in trial._cached_frozen_trial.intermediate_values and not pauses):
            return None
        return self.report(number, epoch, score, False, history=history)

    def news(self) -> list[dict[str, Any]]:
        """Return answers that nobody has asked for, each once."""
        found, self._news = self._news, []
        return found

    def note(self, epochs: Mapping[int, int]) -> None:
        """Note how many epochs trials have trained so far."""
        self.trained.update({number: epoch for number, epoch in epochs.items() if number in self._held})
        self._late.note(epochs)

    def renew(self) -> None:
        """Give a sign of life."""
        sign = self.measures.sign(dict(self.trained))
        self.measures.told(sign, self._claims.renew(sign))

    def take_over(self) -> "Future[None]":
        """Release soon the trials of workers that give no sign of life. The next `ask` of any worker finds them."""
        return self._lock.soon(lambda held: self._released(held, held.release_expired(self._ended_after)))

    def stop(self, recorded: Callable[[], None] = lambda: None) -> bool:
        """Release all trials of this worker. The next one that asks resumes them. Returns whether the study is over.

        Args:
            recorded: called before it waits for the user's callbacks.
        """
        patiently(lambda again: self.renew())  # with what it has trained
        self._held.clear()
        self.trained.clear()
        self._release(died=False)
        self._files.finish(lambda each: self._ended_after(each) is not None, is_over=self._over)
        self._claims.close()
        recorded()
        self._callbacks.finish(is_over=self._over)
        return self._over

    def _owning(
        self,
        number: int,
        write: Callable[[], None],
        *,
        released_at: int | None = None,
        kept: int | None = None,
        back_to: int | None = None,
        lets_go: bool = False,
    ) -> bool:
        """Write something of a trial, if it is still this worker's. Returns whether it was.

        Args:
            number: the trial's.
            write: writes to Optuna's storage.
            released_at: the number of epochs after which the trial ends or pauses with this.
            kept: the number of epochs that a checkpoint holds.
            back_to: the number of epochs after which the trial continues; what was kept of later ones is lost.
            lets_go: another worker may have the trial.
        """
        claim, operation, structure = self._held[number].claim, uuid.uuid4().hex, self.measures.structure(number)
        counts = lets_go or {released_at, kept, back_to} != {None}

        def owned(again: bool) -> bool:
            with self._claims.owned(claim, operation, structure, writes=counts) as mine:
                if mine is None or mine.is_done:
                    return mine is not None
                try:
                    with together(self._storage):
                        if not (again and released_at is not None and self._ended_after(number) is not None):
                            write()
                except UpdateFinishedTrialError:  # closed by someone meanwhile
                    mine.end(self._ended_after(number) or 0, self.trained[number])
                    return False
                mine.count(back_to, kept, released_at, self.trained[number], lets_go=lets_go)
                return True

        if not patiently(owned):
            return False
        if released_at is not None or lets_go:
            self._forget(number)
        return True

    def _end(self, number: int, state: TrialState, epoch: int, reason: str | None = None) -> dict[str, Any] | None:
        """End a trial without a result. Returns an answer if it is lost."""
        trial_id = patiently(lambda again: self._trials.id(number))
        write = partial(self._trials.end, number, trial_id, state, reason)
        self._late.end(self._held[number].claim, self.trained[number])
        if not self._owning(number, write, released_at=epoch):
            return self._lost(number)
        self._ended(number, trial_id)
        return None

    def _ended(self, number: int, trial_id: int) -> None:
        self._files.forget(number, partial(self._stored, trial_id))
        self._callbacks.call(trial_id)

    def _lost(self, number: int) -> dict[str, Any]:
        has_ended = patiently(lambda again: self._ended_after(number)) is not None
        whose = "was ended by someone else" if has_ended else "is another worker's"
        log.warning("trial %d %s: perhaps this one gave no sign of life for too long", number, whose)
        self._forget(number)
        self._lost_here.add(number)
        return {"lost": number}

    def _forget(self, number: int) -> None:
        del self._held[number], self.trained[number]

    def _claim(self, held: LockedClaims, most: int) -> tuple[list[Claimed], bool, list[dict[str, Any] | Unbegun]]:
        """Claim up to `most` trials. Returns them; whether the study is over; and what was begun under the lock."""
        held.avoided = {*self._held, *self._lost_here, *self._files.waiting()}
        may_enqueue = self._callbacks.may_enqueue
        claimed = self._next.claim(held, most, may_begin=not self._stopped)
        self._unnoticed = held.left & self._held.keys()
        self._unseen.warn_of(held.elsewhere.values())
        over = len(claimed) < most and not (held.others() or held.left or held.has_last_try() or may_enqueue)
        if over and self._user_study.promotes and not held.elsewhere:
            over = not (self._held or claimed)  # a trial that pauses may let another be promoted
            for trial in self._next.paused() if over else ():
                with suppress(UpdateFinishedTrialError):  # closed by someone meanwhile
                    self._storage.set_trial_state_values(trial._trial_id, state=TrialState.RUNNING)
                    self._trials.tell(trial.number, state=TrialState.PRUNED)
                    self._closed.append((trial.number, trial._trial_id))
        return claimed, over, self._begin_all(claimed) if self._is_finite else []

    def _is_here(self, number: int, epoch: int = 0, **rest: Any) -> bool:
        """Whether a trial can begin here; if not, it waits for another try."""
        trial_id = self._held[number].trial_id
        if self._files.bring(number, epoch, partial(self._stored, trial_id)):
            return True
        self._owning(number, partial(self._trials.release, trial_id), lets_go=True)
        self._over = False
        return False

    def _stored(self, trial_id: int) -> list[str]:
        return patiently(lambda again: self._trials.checkpoints(trial_id))

    def _release(self, *, died: bool) -> None:
        """Release all trials of this worker, or of one of its name that died."""
        name = self._config.worker
        self._lock.alone(lambda held: self._released(held, held.release(name, died=died, ended=self._ended_after)))

    def _released(self, held: LockedClaims, numbers: list[int]) -> None:
        requeue(self._study, held.claimed())
        if numbers:
            log.info("a worker has left %d trials, which wait for another", len(numbers))

    def _begin_all(self, claimed: Sequence[Claimed], again: bool = False) -> list[dict[str, Any] | Unbegun]:
        with together(self._storage):
            return [self._beginner.begin(each, again) for each in claimed]
