"""Audits: a group proves on its own data that a trial in it gives what the trial gives alone.

In an audited step, one trial drawn at random also takes the step alone. What both made is compared, layer by layer. A
difference that rounding does not explain moves all trials of the structure to the next way of training, from the
state before the step.
"""

import random
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from trials.fusion.errors import RefusedError, is_out_of_memory
from trials.fusion.ways import Way, plainer
from trials.own_logger import own_logger
from trials.study import Study
from trials.training.audits.budget import Budget
from trials.training.audits.compare import Comparison, Precision, compare
from trials.training.audits.lone import Lone, Nudges
from trials.training.audits.record import LAYER, Noisy, Record
from trials.training.trial_state import TrialState

Mode = Literal["training", "evaluation"]

MODES: tuple[Mode, ...] = ("training", "evaluation")

MOST_KINDS = 6
"""The first step of each kind is audited whatever it costs, for this many kinds in each mode: on whole batches, on an
epoch's last, on batches of each trial's own, of one trial and of several. Batches may differ in length without end."""

NUDGED_RUNS = 4
"""How often a trial takes the step alone, each time nudged differently, before a difference counts."""

SHAKEN = 3, 2.0**-6
"""A ReLU or a maximum may lie so near its kink that rounding decides, and no nudge finds that. A fault is there for
other parameters too: a difference must show again this many times, with all parameters changed by this share."""

log = own_logger(__name__)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A trial in a group differs from the trial alone.

    Attributes:
        trial: its number in the study.
        trials: how many the group has.
        mode: of the step.
        first: the first difference, in the order of the step.
        way: how they were trained.
        then: how they are trained from now on; None: not at all.
    """

    trial: int
    trials: int
    mode: Mode
    first: Comparison
    way: Way
    then: Way | None

    @property
    def what(self) -> str:
        """The first difference, in words."""
        found = self.first
        return f"{found.key} " + (
            found.text or f"differs by {found.difference:.1e}, of which rounding explains {found.bound:.1e}"
        )

    def __str__(self) -> str:
        """One line for the user."""
        then = f"from this step on, by {self.then}" if self.then else "no more: they fail"
        return (
            f"the audit found that trial {self.trial}, fused by {self.way} with {self.trials - 1} others, differs in "
            f"{self.mode} from the trial alone: {self.what}; trials of its structure are trained {then}"
        )


class Group(Protocol):
    """A trial group, as an audit sees it."""

    unproven: set[Mode]

    @property
    def numbers(self) -> list[int]:
        """The trials' numbers."""

    def sound(self) -> list[int]:
        """The rows of trials that still learn."""

    def export(self, row: int) -> TrialState:
        """A copy of one trial's state."""

    def saved(self) -> Callable[[], None]:
        """A function that puts all trials back to their present state."""

    def shake(self, row: int, share: float) -> None:
        """Change each of one trial's parameters by at most `share` of itself."""

    def watched(self, record: Record, before: TrialState) -> AbstractContextManager[None]:
        """Keep in `record` what the step within makes of its trial."""

    def ask(self, part: str) -> None:
        """Ask the gate for a part of the audit."""

    def coarse(self) -> dict[str, float]:
        """Phase -> the rounding of an optimizer that computes in a coarser type than its parameters'."""

    def rebuild(self, way: Way) -> None:
        """Train in another way from now on."""


Step = Callable[[Record | None], Any]
"""Lets a group take a step, and returns its result."""

Alone = Callable[[Lone, Record, int], None]
"""Lets the trial of a row take it alone."""


class Audit:
    """The audits of trials of one structure.

    Args:
        study: the user's; `Study.audit` says when.
        budget: shared by all structures; None: one of its own.
        on_mismatch: called with each.

    Attributes:
        way: how these trials are trained.
        done: how many audits there were.
        mismatches: and how many found a difference.
        tables: what each compared, if they are to be shown: then no cost counts. Else None.
    """

    def __init__(
        self,
        study: Study,
        budget: Budget | None = None,
        on_mismatch: Callable[[Mismatch], None] = lambda found: None,
    ) -> None:
        self.study, self.budget, self._on_mismatch = study, budget or Budget(), on_mismatch
        self.way: Way = "rules"
        self.done = self.mismatches = 0
        self.tables: list[tuple[Mode, list[Comparison]]] | None = None
        self._tried: dict[Mode, set[Hashable]] = {mode: set() for mode in MODES}
        self._proven: set[Mode] = set()
        self._last_ns = dict.fromkeys(MODES, 0)
        self._draws = random.Random(0)  # never a trial's own stream

    def is_due(self, group: Group, mode: Mode, kind: Hashable) -> bool:
        """Whether the next step of `group` in `mode` is audited.

        Args:
            group: takes the step.
            mode: of the step.
            kind: what may lead the step to other code than earlier ones, such as the shapes of its batch.
        """
        when = self.study.audit
        if not when:
            return False
        if not self._is_first(mode, kind):
            if mode not in group.unproven:
                return False
            more = when == "epoch" or mode not in self._proven
            if self.tables is None and not (more and self.budget.allows(self._last_ns[mode])):
                return False
        return bool(group.sound())

    def _is_first(self, mode: Mode, kind: Hashable) -> bool:
        """Whether no step of this kind has been audited yet, or tried to be."""
        tried = self._tried[mode]
        return kind not in tried and len(tried) < MOST_KINDS

    def run(self, group: Group, mode: Mode, kind: Hashable, step: Step, alone: Alone) -> Any:
        """Take a step and audit it. After a mismatch it is taken again, in the next way.

        Returns:
            What `step` returned last.

        Raises:
            RefusedError: there is no other way.
        """
        is_first = self._is_first(mode, kind)
        row = self._draws.choice(group.sound())
        while True:
            audited = _Audited(self, group, mode, row, step, alone)
            try:
                result, first = audited.run()
            finally:
                self._tried[mode].add(kind)  # if it does not fit, it may not be tried at any cost
                self._last_ns[mode] = audited.cost_ns
                self.budget.spend(audited.cost_ns, is_first=is_first)
            if first is None:
                group.unproven.discard(mode)
                if not audited.left_out:
                    self._proven.add(mode)
                return result
            self._move_on(group, mode, row, first)
            is_first = True

    def _move_on(self, group: Group, mode: Mode, row: int, first: Comparison) -> None:
        then = plainer(self.way)
        found = Mismatch(group.numbers[row], len(group.numbers), mode, first, self.way, then)
        self.mismatches += 1
        log.warning("%s", found)
        self._on_mismatch(found)
        if then is None:
            raise RefusedError(str(found))
        self.way = then
        self._proven.clear()
        for tried in self._tried.values():
            tried.clear()
        group.rebuild(then)


def _kept_attributes(owner: object) -> Callable[[], None]:
    """Return a function that gives `owner` its present attributes back, such as the number of its calls."""
    before = dict(vars(owner))

    def put_back() -> None:
        own = vars(owner)
        own.clear()
        own.update(before)

    return put_back


class _Audited:
    """One audited step.

    Attributes:
        cost_ns: CPU time of all but the group's own step.
        left_out: whether memory was too small for the audit, so that it says nothing.
    """

    def __init__(self, audit: Audit, group: Group, mode: Mode, row: int, step: Step, alone: Alone) -> None:
        self._audit, self._group, self._mode, self._row = audit, group, mode, row
        self._step, self._alone = step, alone
        self.cost_ns = 0
        self.left_out = False
        self._nudges_inputs = True

    def run(self) -> tuple[Any, Comparison | None]:
        """Take the step, and look for a difference.

        Returns:
            The step's result, and the first difference. If there is one, the state is that before the step.
        """
        began_ns, put_back, taken = time.process_time_ns(), None, None
        try:
            put_back = self._saved()
            taken = self._take(put_back)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        if taken is None:  # not within `except`, because the error holds tensors that must be freed
            taken = self._take_unaudited(put_back)
        own_ns, result, first = taken
        if self.left_out:
            log.warning("an audit does not fit into memory, and is left out")
        self.cost_ns = time.process_time_ns() - began_ns - own_ns
        return result, first

    def _saved(self) -> Callable[[], None]:
        """Return a function that puts the group and the study back to their present state."""
        self._group.ask("snapshot")
        group, study = self._group.saved(), _kept_attributes(self._audit.study)

        def put_back() -> None:
            self._group.ask("snapshot")
            group()
            study()

        return put_back

    def _take(self, put_back: Callable[[], None]) -> tuple[int, Any, Comparison | None]:
        audit = self._audit
        own_ns, result, found = self._look(nudged_runs=1)
        if self.left_out:
            return own_ns, result, None
        audit.done += 1
        if audit.tables is not None:
            audit.tables.append((self._mode, found))
        return own_ns, result, self._confirmed(found, put_back)

    def _take_unaudited(self, put_back: Callable[[], None] | None) -> tuple[int, Any, None]:
        """Take the step as if no audit were due: it must not fail for what the audit holds beside it."""
        self.left_out = True
        if put_back is not None:
            put_back()
        began_ns = time.process_time_ns()
        result = self._step(None)
        return time.process_time_ns() - began_ns, result, None

    def _confirmed(self, found: Sequence[Comparison], put_back: Callable[[], None]) -> Comparison | None:
        """Return the first difference that shows again with other parameters; see `SHAKEN`."""
        suspects = {each.key for each in found if not each.equal}
        if not suspects:
            return None
        times, share = SHAKEN
        restore = self._saved()
        for _ in range(times):
            put_back()
            self._group.shake(self._row, share)
            try:
                _, _, again = self._look(NUDGED_RUNS)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                continue  # the user's code refuses such parameters
            suspects -= {each.key for each in again if each.equal}
            if not suspects:
                restore()
                return None
        put_back()
        return next(each for each in found if each.key in suspects)

    def _look(self, nudged_runs: int) -> tuple[int, Any, list[Comparison]]:
        """Take the step in the group, and its trial alone.

        Returns:
            The CPU time of the group's own step, its result, and what both made.
        """
        group, study = self._group, self._audit.study
        before, put_back_study = group.export(self._row), _kept_attributes(study)

        def alone(record: Record, nudges: Nudges) -> Record:
            group.ask("setup")
            put_back_study()  # the user's code may count its calls there
            self._alone(Lone(study, before, group.ask, nudges), record, self._row)
            return record

        fused = Record(self._row)
        began_ns = time.process_time_ns()
        with group.watched(fused, before):
            result = self._step(fused)
            own_ns = time.process_time_ns() - began_ns
            group.ask("comparison")
        restore = _kept_attributes(study)
        precision = Precision.of(list(before.tensors.values()), study.autocast)
        layers = {key for key in fused.values if key.kind == LAYER}
        try:
            records = [alone(Record(only=layers), Nudges())]
            for run in range(1, 1 + nudged_runs):
                own = Noisy(records[0], records[1], layers, run) if len(records) > 1 else Record(only=layers)
                records += self._nudged(alone, own, Nudges(precision.eps, group.coarse(), seed=run))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.left_out = True
            return own_ns, result, []
        finally:
            restore()
        group.ask("comparison")
        return own_ns, result, compare(fused, records[0], records[1:], precision)

    def _nudged(self, alone: Callable[[Record, Nudges], Record], record: Record, nudges: Nudges) -> list[Record]:
        """Take the step alone with its numbers changed; no record if the user's code refuses them, even in part."""
        for inputs in (True, False) if self._nudges_inputs else (False,):
            try:
                return [alone(record, replace(nudges, inputs=inputs))]
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self._nudges_inputs = False  # such as whole numbers, or bits
                record.clear()
        return []
