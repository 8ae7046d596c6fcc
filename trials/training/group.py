"""A trial group: K trials of one structure that train as one model. Its rows can be removed, added and saved."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trials.fusion import FuseError, assemble
from trials.fusion.compared.structure import Facts, difference, stack
from trials.fusion.errors import ApartError, RefusedError
from trials.fusion.rows import Rows, generator
from trials.fusion.units import Units
from trials.fusion.ways import Way
from trials.gate.base import AUDIT_UNITS, Gate
from trials.optim.several import Optimizers, by_phase
from trials.study import Study
from trials.training.audits.audit import MODES, Audit
from trials.training.audits.lone import Lone, part_names
from trials.training.audits.record import Record
from trials.training.cuda_graph import can_capture
from trials.training.inputs.batches import BatchCopy, Reader, fuse_batches, parts, rounds, shapes
from trials.training.malloc import keep_freed_memory
from trials.training.member import Member, build_member, facts_of, fuse_optimizers_of, restored
from trials.training.phase import Phase
from trials.training.progress import wait_for_score
from trials.training.roster import Roster
from trials.training.scheduler_steps import SchedulerSteps
from trials.training.scores.objectives import Score
from trials.training.scores.scalars import draw_for_outputs, scalars_of
from trials.training.scores.scored import ScoredGroup
from trials.training.shared import held_once, let_go, refuse_unequal, revived
from trials.training.trial_state import TrialState


class TrialGroup(ScoredGroup):
    """K trials as one model. The loss is the sum of the trials' losses, so no trial sees another's gradient.

    If a unit raises `StopRequested`, the group is in the middle of a step. Continue from what it has exported.

    Shapes: K trials, B examples in a batch.
    """

    def __init__(
        self, study: Study, trials: Sequence[Member | TrialState], gate: Gate, audit: Audit | None = None
    ) -> None:
        """Fuse `trials`. Their tensors and optimizer states are copied.

        Args:
            study: the user's.
            trials: at least one, fresh or as another group has exported it.
            gate: asked before every unit.
            audit: of trials of this structure; None: there are no audits.

        Raises:
            FuseError: they cannot be fused. The message names the module, the difference and what is allowed.
        """
        if not trials:
            raise FuseError("a trial group needs at least one trial")
        keep_freed_memory()
        self._study, self._gate, self._audit = study, gate, audit
        self._build(trials)

    def _build(self, trials: Sequence[Member | TrialState]) -> None:
        self._way: Way = "rules" if self._audit is None else self._audit.way
        members = revived(self._study, trials, self._way)
        self._facts = facts_of(members[0])
        self._first_number = members[0].number
        for member in members[1:]:
            self._check(facts_of(member), self._facts, member.number)
        self._saved_names = list(members[0].model.state_dict())
        self._device = _device(members[0].model)
        self._units = Units(self._gate)
        models = [member.model for member in members]
        structures = [member.structure for member in members]
        once = held_once(self._study, members)
        self._fused = assemble(models, structures, self._generators(members), self._units, self._way, once)
        if draw_for_outputs(self._study):
            self._fused.rows.are_drawn_for = True
            self._fused.bind()
        self._template = models[0]
        let_go(self._template, self._fused.rows)
        self._optimizers, progress = fuse_optimizers_of(self._study, members, self._fused.rows)
        self._roster = Roster.of(members, progress, like=torch.empty(0, dtype=torch.float64))
        phases = by_phase(members[0].optimizer)
        self._phases = [Phase(name, self._fused, self._optimizers[name], self._units) for name in phases]
        self._control = self._new_control()
        self._scalars, self._schedulers = scalars_of(self._study, self._way), SchedulerSteps(self._study)
        self._number_units(models[0])
        self.unproven = set(MODES)
        self.metrics = []
        self.use_units()

    def batches(self, epoch: int) -> Iterator[tuple[Any, Any, bool]]:
        """Yield the arguments of `train_step` for `epoch`, counted from 0, if all trials are at it.

        Raises:
            FuseError: the trials' own batches differ in number or form.
        """
        readers = [Reader(*trial, epoch) for trial in zip(self.numbers, self.params, strict=True)]
        for batches in rounds(self._study, readers):
            yield fuse_batches([batches[number] for number in self.numbers])

    def train_step(self, inputs: Any, targets: Any, per_trial: bool = False) -> None:
        """One step of all trials on one batch: forward, loss, backward and optimizer, each unit through the gate.

        The last unit has not ended. Enter host work next, or let the gate rest.

        Args:
            inputs: tensors ``x_B...`` for all trials, or ``x_KB...`` if `per_trial`, in any containers. If the study
                accumulates gradients, a tuple of such, one for each batch.
            targets: likewise.
            per_trial: whether each trial has a batch of its own.
        """
        self._learn_in_time()
        self._follow()
        for phase in self._phases:
            phase.before_training()
        kind = self.size > 1, per_trial, shapes((inputs, targets))
        if self._audit is None or not self._audit.is_due(self, "training", kind):
            self._train(inputs, targets, per_trial, None)
            return
        kept = BatchCopy(inputs, targets)

        def step(record: Record | None) -> None:
            kept.put_back()
            self._train(inputs, targets, per_trial, record)

        def alone(lone: Lone, record: Record, row: int) -> None:
            lone.train(*kept.of(row if per_trial else None), self._precision, record)

        self._audit.run(self, "training", kind, step, alone)

    def _train(self, inputs: Any, targets: Any, per_trial: bool, record: Record | None) -> None:
        def loss(outputs: Any, own_targets: Any) -> Tensor:
            return self._per_trial("loss", outputs, own_targets, per_trial)

        batches = parts(self._study, inputs, targets)
        losses_K = [
            phase.run(batches, per_trial, loss, self._control, self._precision, self._device, record, self._is_static)
            for phase in self._phases
        ]
        self._roster.note_losses(torch.stack(losses_K).sum(0) if len(losses_K) > 1 else losses_K[0], len(batches))
        if self._study.scheduler_every == "step":
            self._schedulers.step(self._roster, self._optimizers)

    def _is_static(self) -> bool:
        """Whether steps on batches like the last one queue the same operations: a CUDA graph may stand for them.

        With a scaler, or trials that the host skips, it depends on numbers of the host's. A graph's gradients are the
        same tensors each time.
        """
        if not (can_capture(self._device) and self._study.cuda_graphs and len(self._phases) == 1):
            return False
        if self._phases[0].optimizer.may_keep_gradients:
            return False
        if not self._control.is_static or self._fused.rows.once:
            return False
        return self._scalars["loss"].is_static and self._phases[0].has_static_forward

    def end_epoch(self) -> Sequence[Score] | None:
        """Count an epoch and step the schedulers that are due.

        Returns:
            The trials' scores if some scheduler acts on them, else None.
        """
        self._units.settle()  # the sums of the losses are read
        self._control.learn()
        self._roster.end_epoch()
        self._schedulers.begin_epoch()
        self.unproven = set(MODES)
        if self._study.scheduler_every == "epoch":
            self._schedulers.step(self._roster, self._optimizers)
        if not wait_for_score(self._roster.progress):
            return None
        scores = self.evaluate()
        self._schedulers.step(self._roster, self._optimizers, scores)
        return scores

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the trials in `rows`, in that order, with all their state. Without any, the group is over."""
        self._check_rows(rows, "kept")
        self._learn()
        self._optimizers.let_go()
        self._fused.rows.take(rows)
        self._optimizers.take(rows)
        self._roster.take(rows)
        self._changed()

    def add(self, trials: Sequence[Member | TrialState]) -> None:
        """Append trials, fresh or as another group has exported them.

        Raises:
            FuseError: they differ from the group in structure, or in what `Study.shared` names.
        """
        if trials:
            self.to_add(trials)()

    def to_add(self, trials: Sequence[Member | TrialState]) -> Callable[[], None]:
        """Fuse trials as `add` does, and return a function that appends them. Until then, the group is as it was."""
        self._learn()
        self._follow()
        members = revived(self._study, trials, self._way)
        for member in members:
            self._check(_without_devices(facts_of(member)), _without_devices(self._facts), member.number)
        structures = [member.structure for member in members]
        once = held_once(self._study, members)
        rows = stack([member.model for member in members], structures, self._generators(members), once)
        optimizers, progress = fuse_optimizers_of(self._study, members, rows)
        rows.to(self._device)
        refuse_unequal(self._study, self._fused.rows, rows)
        optimizers.moved()
        roster = Roster.of(members, progress, like=self._roster.losses_K)
        return partial(self._append, rows, optimizers, roster)

    def merge(self, other: "TrialGroup") -> None:
        """Take over all trials of `other`, which is empty then.

        Raises:
            FuseError: they differ from these in structure, or in what `Study.shared` names.
        """
        for group in (self, other):
            group._learn()
            group._follow()
        self._check(_without_devices(other._facts), _without_devices(self._facts), other._first_number)
        if not other.size:
            return
        other.to(self._device)
        refuse_unequal(self._study, self._fused.rows, other._fused.rows)
        self._append(other._fused.rows, other._optimizers, other._roster)
        other._roster.take([])

    def split(self, rows: Sequence[int]) -> "TrialGroup":
        """Move the trials in `rows` into a group of their own, in that order. The others stay.

        The gate keeps numbering this group's units. Call `use_units` of the other group before it runs.

        Beside the other group's own model, it takes the memory of one trial. After an error, continue from what has
        been exported.
        """
        self._check_rows(rows, "split off")
        if not rows:
            raise ValueError("rows [] cannot be split off; allowed: at least one")
        self._learn()
        self._follow()
        other, everyone = self._like(rows[0]), replace(self._roster)
        try:
            self._optimizers.let_go()
            self._fused.rows.move(rows, other._fused.rows)
            self._optimizers.move(rows, other._optimizers)
            other._roster = self._roster.part(rows)
            for group in (other, self):
                let_go(group._template, group._fused.rows)
                for phase in group._phases:
                    phase.number_step()
                group._changed()
        except BaseException:
            self._roster = everyone  # in pieces, but whoever asks whose they are finds all trials here
            raise
        return other

    def to(self, device: torch.device | str) -> None:
        """Move all trials to `device`.

        Random streams continue where they were. On another kind of device they continue from a seed that they draw.

        Raises:
            FuseError: an optimizer keeps views of its parameters.
        """
        self._optimizers.check_movable()
        self._learn()
        self._device = torch.device(device)
        self._fused.rows.to(self._device)
        self._optimizers.moved()
        self._roster.to(self._device)
        self._changed()

    def saved(self) -> Callable[[], None]:
        """Return a function that puts all trials back to their present state."""
        self._learn()
        rows, roster = self._fused.rows.state_dict(), self._roster.state_dict()
        return partial(self._put_back, rows, self._optimizers.saved(), roster)

    def rebuild(self, way: Way) -> None:
        """Train in another way from now on, from the present state.

        Raises:
            ApartError: only each trial alone can be trained in that way.
        """
        states = [self.export(row) for row in range(self.size)]
        try:
            self._build([state.member(self._study, way) for state in states])
        except FuseError as error:
            if self.size == 1 or isinstance(error, RefusedError):
                raise
            raise ApartError(f"by {way}, {error}") from error  # rules read less of their modules than their own code
        self._changed()

    def ask(self, part: str) -> None:
        """Ask the gate for a part of an audit."""
        self._units.enter(self._audit_units.get(part, self._audit_units["other"]))

    def _like(self, row: int) -> "TrialGroup":
        """Return a group without trials, but made for such as that in `row`."""
        member = build_member(self._study, self.numbers[row], self.params[row])
        if _device(member.model) == self._device:
            let_go(member.model, self._fused.rows)  # it needs no base of its own
        group = TrialGroup(self._study, [member], self._gate, self._audit)
        if group._device != self._device:
            group.to(self._device)
        group.keep([])
        return group

    def _follow(self) -> None:
        """Train in the way that an audit, perhaps of another group, has chosen."""
        if self._audit is not None and self._way != self._audit.way:
            self.rebuild(self._audit.way)

    def _put_back(self, rows: Mapping[str, Any], optimizers: Callable[[], None], roster: Mapping[str, Any]) -> None:
        self._fused.rows.load_state_dict(rows)
        optimizers()
        progress = [
            restored(self._study, dict(params), holders)
            for params, holders in zip(roster["params"], self._optimizers.holders, strict=True)
        ]
        self._roster = Roster.restored(roster, progress, self._device)
        self._changed()

    def graphs_ns(self) -> list[float]:
        """Return the device time of each CUDA graph that stands for steps."""
        return [cost_ns for phase in self._phases for cost_ns in phase.captured.costs_ns()]

    def use_units(self) -> None:
        """Declare this group's units to the gate, after another group has used it."""
        self._units.declare(self.size)

    def _changed(self) -> None:
        self.unproven = set(MODES)
        self.metrics = []
        self._schedulers.forget()
        for phase in self._phases:
            phase.captured.forget()
        self._control = self._new_control()
        if self._control.touches:
            self._units.number("gradients")
        if self.size:
            self._fused.bind()
            self.use_units()

    def _append(self, rows: Rows, optimizers: Optimizers, roster: Roster) -> None:
        self._optimizers.let_go(optimizers)
        self._fused.rows.append(rows)
        self._optimizers.append(optimizers)
        for phase in self._phases:
            phase.number_step()
        self._roster.append(roster)
        self._changed()

    def _check(self, facts: Facts, ours: Facts, number: int) -> None:
        found = difference(ours, facts)
        if found is not None:
            owner, name, one, other = found
            raise FuseError(
                f"trial {number} cannot join trial {self._first_number}: {owner}: {name} is {other!r}, "
                f"there {one!r}; allowed: the same for all trials of a group"
            )

    def _check_rows(self, rows: Sequence[int], what: str) -> None:
        if len(set(rows)) != len(rows) or not all(0 <= row < self.size for row in rows):
            raise ValueError(f"rows {list(rows)} cannot be {what}; allowed: different ones of 0..{self.size - 1}")

    def _generators(self, members: Sequence[Member]) -> list[torch.Generator]:
        seeds = [self._study.seed(member.params, member.number) for member in members]
        return [generator(self._device, seed, m.rng_state) for seed, m in zip(seeds, members, strict=True)]

    def _number_units(self, model: nn.Module) -> None:
        """Number the units in the order of a step, then the score, and those of audits."""
        for phase in self._phases:
            phase.number_units()
            if self._control.touches:
                self._units.number("gradients")
            phase.number_step()
        self._units.number("score")
        if self._study.has_metrics:
            self._units.number("metrics")
        parts = [] if self._audit is None else [*part_names(model), "other"]
        self._audit_units = {part: self._units.number(f"{AUDIT_UNITS}{part}") for part in parts}


def _without_devices(facts: Facts) -> Facts:
    """Drop the devices, because trials that join are moved to the group's."""
    return {(owner, name): value for (owner, name), value in facts.items() if name != "device"}


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
