"""Decides which trials train next, until the study is done.

Trials of one structure form a *cohort*, normally one `TrialGroup`. Each trial is at an epoch of its own, so it sees the
batches in the order that it would see alone. Between epochs, new trials get the rows that pruning has freed.
Trials that wait are sorted by structure, so that as many as possible begin together. Cohorts take turns. A group whose
units are longer than every bubble is split in halves.
"""

import logging
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ds_hooks.shared import statuses
from ds_hooks.shared.processes.signals import END_SIGNAL
from trials.fusion.errors import ApartError, is_out_of_memory
from trials.fusion.shared_base import Bases
from trials.gate.base import HOST_UNIT, Gate, StopRequested
from trials.own_logger import own_logger
from trials.search.choice.placement import NO_ROOM
from trials.search.client import Search
from trials.side_task.accounts import Accounts
from trials.side_task.audits import Audits
from trials.side_task.checkpoints import Checkpoints
from trials.side_task.cohort import Cohort, Fit
from trials.side_task.epoch import EpochTraining
from trials.side_task.refilling import APART, Refilling
from trials.side_task.results import Results
from trials.side_task.turn import Turn, TurnOver
from trials.side_task.waiting import Waiting
from trials.study import Study, describe_error
from trials.training.inputs.batches import ReplayError
from trials.training.inputs.side_by_side import SideBySide
from trials.training.member import Member, group_key, structure_name
from trials.training.most_fused import MostFused

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping
    from pathlib import Path

    from trials.side_task.offload import Offload

ASK_AHEAD_EPOCHS = 2
"""Ask for as many trials as rows will be free after this many epochs: of those that end, and of those that are likely
to be pruned."""

ASK_SEVERAL = 2
"""Ask for this many times as many where trials differ in structure, to fill groups of one."""

ASK_AGAIN_S = 5.0
"""Where no trials are left, others may still leave some: a worker that dies, or a job that ends."""

PATIENCE = 2
"""A trial of a rare structure begins, however few are like it, when this many times all rows have begun before it."""

log = own_logger(__name__)


class Scheduler:
    """Trains a study's trials, fused, until the study is done.

    Args:
        study: the user's.
        gate: asked before every unit.
        search: supplies trials, and takes their scores.
        report: sends a status to the daemon.
        most: how many trials may train at once, and what that gains; None: as many as the study wants.
        offload: gives memory back to the main job, where that is short.
        directory: the study's, for checkpoints; None: there are none.
        turn: at this study, among others that were submitted; None: there are no others.
    """

    def __init__(
        self,
        study: Study,
        gate: Gate,
        search: Search,
        report: "Callable[[statuses.Status], None]",
        most: MostFused | None = None,
        offload: "Offload | None" = None,
        directory: "Path | None" = None,
        turn: Turn | None = None,
    ) -> None:
        self._study, self._gate, self._search = study, gate, search
        self.report = report
        self._found = most or MostFused(study.rows)
        self._most = self._roomy = min(self._found.trials, study.rows)
        self._offload = offload
        self._turn = turn
        self._cohorts: list[Cohort] = []
        self._fits: dict[Hashable, Fit] = {}
        self._audits = Audits(study, report)
        self._bases, self._beside = Bases(), SideBySide(study, gate)
        self._waiting = Waiting(self._build)
        self._checkpoints = Checkpoints(study, directory, gate, search)
        self._work = self._checkpoints.work
        self._results = Results(study, gate, search, self._checkpoints)
        self._unfit: set[str] = set()
        self._asked = self._exhausted = self._over = False
        self._ask_again_s = 0.0
        self._said: statuses.Progress | None = None
        self._here = 0  # how many trials were here at the last request for more
        self._accounts, self._refilling = Accounts(gate, self._audits), Refilling()
        work = gate, self._accounts, self._checkpoints, self._results, offload
        self._training = EpochTraining(study, *work, report, self._report_progress)

    def run(self) -> None:
        """Train until no trial is left, or until it is another study's turn.

        Raises:
            StopRequested: the daemon asked for the end. Trials are saved, but for those in the middle of a step.
            TurnOver: it is another study's turn. All trials are saved.
        """
        try:
            self._run()
        except StopRequested:
            try:
                self._training.save_at_the_end(self._cohorts)
            except Exception as error:  # such as no memory for a copy; older checkpoints are as they were
                log.warning("trials are not saved at the end: %s: %s", type(error).__name__, error)
            self._report_progress()
            raise

    def hear_out(self, answers: list[dict[str, Any]]) -> None:
        """Report once more, if the search worker's answers since the end of `run` say that it has taken trials."""
        for answer in answers:
            self._take(answer)
        if self._said is not None and self._said.lost != self._work.in_vain():
            self.report(replace(self._said, lost=self._work.in_vain()))

    def _run(self) -> None:
        ready_ms = self._accounts.ready_ns / 1e6
        self.report(statuses.Ready(self._study.trials, ready_ms, self._most, self._found.gain or 0.0))
        while True:
            if self._turn is not None and self._turn.is_over(has_trained=self._accounts.epochs > 0):
                self._leave()
            self._listen()
            if self._cohorts:
                self._results.await_verdicts(self._cohorts[0], self._listen)
            was_idle = not self._cohorts
            self._refill()
            if was_idle and self._cohorts:
                self._report_progress()
            self._ask()
            if not self._cohorts:
                if self._over and not self._waiting and not self._asked:
                    break
                if self._turn is not None and self._exhausted and not self._waiting and self._turn.may_be_left():
                    raise TurnOver(is_idle=True)
                self._gate.rest()
                self._listen(wait_s=0.2)
                if END_SIGNAL in signal.sigpending():
                    raise StopRequested
                continue
            cohort = self._cohorts[0]
            self._train_epoch(cohort)
            self._cohorts = [*self._cohorts[1:], *([cohort] if cohort.groups else [])]
            self._audits.report()
            self._report_progress()
        self._gate.rest()
        self._work.all_ended()
        self._report_progress()
        self.report(statuses.Finished(self._accounts.work))

    def _leave(self) -> None:
        for group in (group for cohort in self._cohorts for group in cohort.groups):
            self._checkpoints.save(group)
        self._report_progress()
        raise TurnOver

    def _report_progress(self) -> None:
        numbers = [number for cohort in self._cohorts for number in cohort.numbers]
        self._said = self._accounts.progress(len(numbers), self._work.in_vain())
        self.report(self._said)

    def _rows(self) -> int:
        return sum(len(cohort.numbers) for cohort in self._cohorts)

    def _ask(self) -> None:
        """Ask ahead, because the search worker takes a while; but not far ahead, because later it knows more scores."""
        readers = [reader for cohort in self._cohorts for reader in cohort.readers]
        here = [*(reader.number for reader in readers), *self._waiting.numbers]
        at = [e.epoch for e in readers if self._checkpoints.milestone(e.number) - e.epoch > ASK_AHEAD_EPOCHS]
        staying = len(at) - self._results.endings.expected(at, ASK_AHEAD_EPOCHS)
        several = len(self._waiting.structures | self._fits.keys()) > 1
        wanted = max(self._most - staying, self._refilling.least(self._most)) * (ASK_SEVERAL if several else 1)
        wanted -= len(self._waiting)
        if self._asked or self._over or wanted <= 0:
            return
        may_be_promoted = self._study.promotes and len(here) < self._here  # since one has paused
        if not self._exhausted or may_be_promoted or time.monotonic() >= self._ask_again_s:
            self._search.send(ask=wanted, here=here)
            self._asked, self._here = True, len(here)

    def _listen(self, wait_s: float = 0.0) -> None:
        """Take what the search worker has answered. Trials that it has pruned or lost give up their rows."""
        for answer in self._search.answers(wait_s):
            self._take(answer)
        if any([cohort.drop(self._results.dropped) for cohort in self._cohorts]):
            self._cohorts = [cohort for cohort in self._cohorts if cohort.groups]
            self._training.in_use = None

    def _take(self, answer: dict[str, Any]) -> None:
        match answer:
            case {"taken": number, "epoch": epoch, "place": place, "cost_s": cost_s}:
                self._work.taken(number, (epoch, place))
                self._checkpoints.taking_cost_s = cost_s
            case {"pruned": number}:
                self._results.dropped.add(number)
                self._results.endings.heard(number, pruned=True)
                self._work.ended(number)
            case {"kept": number}:
                self._results.endings.heard(number)
            case {"lost": number}:
                self._results.dropped.add(number)
                self._results.endings.heard(number)
                self._work.left(number)
        if "said" in answer:
            log.log(logging.WARNING if answer["warns"] else logging.INFO, "%s", answer["said"])
        if "trials" in answer:
            self._results.dropped -= {trial["number"] for trial in answer["trials"]}
            self._checkpoints.take(answer)
            self._waiting.add(answer["trials"])
            self._exhausted, self._over = answer["exhausted"], answer["over"]
            self._here += len(answer["trials"])
            self._asked, self._ask_again_s = False, time.monotonic() + ASK_AGAIN_S

    def _refill(self) -> None:
        """Give free rows to trials that wait, at once if nothing else trains or no further trials will come."""
        while members := self._next():
            self._fuse(members)

    def _next(self) -> list[Member]:
        """Return trials of one structure for which there are rows; none if it is better to wait for more of them."""
        room = self._most - self._rows()
        least = 1 if self._exhausted or not self._cohorts else self._refilling.least(self._most)
        if room <= 0 or not self._waiting or min(room, len(self._waiting)) < least:
            return []
        structure = self._chosen(self._waiting.sort(enough=room), room)
        members = [] if structure is None else self._waiting.take(structure, room)
        self._waiting.free()
        return members

    def _chosen(self, counts: "Mapping[Hashable, int]", room: int) -> "Hashable | None":
        """Return the structure of which most trials wait, unless another has waited for too long."""
        overdue = self._waiting.overdue(PATIENCE * self._most)
        if overdue is not None:
            return overdue
        if self._cohorts:
            counts = {each: n for each, n in counts.items() if min(room, n) >= self._needed(each, n)}
        return max(counts, key=counts.__getitem__, default=None)

    def _needed(self, structure: "Hashable", waiting: int) -> float:
        """Return how many trials of `structure` begin together while others train."""
        fit = self._fits.get(structure)
        joins = fit is not None and fit.mixes and any(cohort.fit is fit for cohort in self._cohorts)
        needed = self._refilling.least(self._most) if joins else APART * self._most
        if self._exhausted:
            return 1 if joins else min(needed, waiting)
        return needed

    def _fuse(self, members: list[Member]) -> None:
        self._gate.enter(HOST_UNIT)
        self._training.in_use = None
        key = group_key(members[0])
        if key not in self._fits:
            self._fits[key] = Fit(self._study.rows, key, self._study.mix_epochs, self._audits.new())
        fit = self._fits[key]
        cohort = next((each for each in self._cohorts if each.fit is fit), None)
        if cohort is None:
            cohort = Cohort(self._study, self._gate, fit, self._beside)
            self._cohorts.append(cohort)
        asked = cohort.asked + [{"number": member.number, "params": member.params} for member in members]
        began_ns, joins = self._gate.busy_ns(), bool(cohort.groups)
        try:
            cohort.add(members)
            if joins:
                self._refilling.joined(self._gate.busy_ns() - began_ns)
            return
        except Exception as error:
            fits = not is_out_of_memory(error)
            lost = [each for each in asked if each["number"] not in cohort.numbers]
            if fits:
                self._fail([each["number"] for each in lost], error)
        if not cohort.groups:
            self._cohorts.remove(cohort)
        if not fits:  # not within `except`, because the error holds tensors that must be freed
            members.clear()
            self._crowded(fit, lost)

    def _build(self, asked: dict[str, Any]) -> Member | None:
        self._gate.enter(HOST_UNIT)
        try:
            member = self._checkpoints.build(asked["number"], asked["params"])
            if member is None:
                return None
            self._bases.adopt(member.model)
            structure = structure_name(group_key(member))
            self._search.send(built=asked["number"], structure=structure)
        except Exception as error:
            self._unable(asked["number"], error) if is_out_of_memory(error) else self._fail([asked["number"]], error)
            return None
        if structure in self._unfit:
            self._unable(asked["number"])
            return None
        return member

    def _train_epoch(self, cohort: Cohort) -> None:
        trials, work, began_s = len(cohort.numbers), self._accounts.work, time.monotonic()
        self._gate.enter(HOST_UNIT)
        began_ns = self._gate.busy_ns()
        try:
            self._training.train(cohort)
            cohort.fit.has_trained()
            cohort.epoch_s = time.monotonic() - began_s
            self._refilling.trained(self._gate.busy_ns() - began_ns)
            ran = {"ran": cohort.fit.structure, "trials": trials, "samples": self._accounts.work - work}
            self._search.send(**ran, began_s=began_s, ended_s=time.monotonic())
            return
        except ApartError as error:
            self._part(cohort, error)
            return
        except ReplayError as error:
            self._go_back(cohort, error)
            return
        except Exception as error:
            fits = not is_out_of_memory(error)
            # a study may fail on a batch for each trial that works on one for all
            parted = fits and cohort.fit.mixes and len({reader.epoch for reader in cohort.readers}) > 1
            if parted:
                self._gate.rest()  # raises if the device itself has failed
                cohort.part_epochs(f"{type(error).__name__}: {error}")
                self._waiting.add(cohort.asked, first=True)
            elif fits:
                self._fail(cohort.numbers, error)
        asked = cohort.asked
        cohort.groups.clear()
        self._training.in_use = None
        if not fits:  # not within `except`, because the error holds tensors that must be freed
            self._crowded(cohort.fit, asked)

    def _go_back(self, cohort: Cohort, error: ReplayError) -> None:
        """Let trials begin an epoch anew in whose middle they were: its batches are not what they were."""
        log.warning("%s. They go back to the end of an epoch", error)
        self._checkpoints.has_changed(error.numbers)
        self._waiting.add([each for each in cohort.asked if each["number"] in error.numbers], first=True)
        cohort.drop(error.numbers)
        self._training.in_use = None

    def _part(self, cohort: Cohort, error: ApartError) -> None:
        """Train each trial of this structure alone from now on, those of `cohort` from their last checkpoints."""
        self._gate.rest()
        log.warning("trials of a structure are not fused any more: %s", error)
        cohort.fit.most = 1
        self._waiting.add(cohort.asked, first=True)
        cohort.groups.clear()
        self._training.in_use = None

    def _unable(self, number: int, error: Exception | None = None) -> None:
        """Leave a trial that does not fit to another worker; where it fits on none, it fails."""
        self._gate.rest()
        self._search.send(unfit=number, reason=describe_error(self._study, error or MemoryError(NO_ROOM)))
        self._work.left(number)
        self._over = False  # it may come back, if the others go

    def _crowded(self, fit: Fit, asked: list[dict[str, Any]]) -> None:
        """Trials did not fit into the device's memory: train half as many at once from now on.

        A half-done step cannot be undone, so these continue from their last checkpoints. No result changes.
        """
        rows = self._rows() + len(asked)
        self._most = max(rows // 2, 1)
        self.report(statuses.OutOfMemory(trials=rows, most=rows // 2))
        if rows > 1 or not fit.is_too_large():
            self._waiting.add(asked, first=True)
        else:
            self._most = self._roomy  # of other structures, more may fit
            self._unfit.add(fit.structure)
            for number in (asked[0]["number"], *self._waiting.drop(fit.key)):
                self._unable(number)
        if self._offload is not None:
            self._gate.enter(HOST_UNIT)
            self._offload.trim()

    def _fail(self, numbers: list[int], error: Exception) -> None:
        """End trials as failed.

        Raises:
            GateError: the device has failed, not the trials.
        """
        self._gate.rest()
        reason = describe_error(self._study, error)
        log.warning("trials %s failed: %s", numbers, reason)
        log.debug("they failed here:", exc_info=error)
        for number in numbers:
            self._search.send(fail=number, reason=reason)
            self._work.ended(number)
