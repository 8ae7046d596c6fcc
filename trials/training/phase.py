"""A phase of a training step: one forward, loss, backward and optimizer step of all trials."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from trials.fusion import Fused
from trials.fusion.graph.trace import FORWARD
from trials.fusion.units import Units
from trials.gate.base import GRAPH_UNITS
from trials.optim import FusedOptimizer
from trials.optim.gradients import Gradients
from trials.shrinking.rules import Multipliers
from trials.training.audits.record import LOSS, Record, named_batch
from trials.training.cuda_graph import Captured
from trials.training.inputs.batches import Batch
from trials.training.progress import Control
from trials.training.step_graph import StepGraphs


class Phase:
    """One optimizer's part of a step. A study with several optimizers has one phase for each.

    Attributes:
        name: the method of the user's model that it calls.
        optimizer: steps at its end.
        captured: its graphs.
    """

    def __init__(self, name: str, fused: Fused, optimizer: FusedOptimizer, units: Units) -> None:
        """For the trials in `fused`."""
        self.name, self.optimizer = name, optimizer
        self._fused, self._forward, self._units = fused, fused.phases[name], units
        self._prefix = "" if name == FORWARD else f"{name} "
        self.captured = Captured(fused.rows, units, f"{GRAPH_UNITS}{self._prefix}forward, loss and backward")
        self._steps = StepGraphs(fused.rows, units, optimizer)

    def number_units(self) -> None:
        """Number the units after the forward's: the loss, its backward and the layers' backwards."""
        self._loss_unit = self._units.number(f"{self._prefix}loss")
        self._loss_backward_unit = self._units.number(f"{self._prefix}loss backward")
        self._forward.declare_backward()

    def number_step(self) -> None:
        """Number the optimizer's units, after the unit of the gradients if there is one."""
        self._step_units = [self._units.number(self._prefix + name) for name in self.optimizer.units]

    def run(
        self,
        batches: Sequence[Batch],
        per_trial: bool,
        loss: Callable[[Any, Any], Tensor],
        control: Control,
        precision: Callable[[], AbstractContextManager[Any]],
        device: torch.device,
        record: Record | None = None,
        is_static: Callable[[], bool] = lambda: False,
    ) -> Tensor:
        """Train all trials, each unit through the gate.

        Args:
            batches: of the step; their losses are averaged. Tensors ``x_B...``, B examples for all trials, or
                ``x_KB...``, B for each of K trials, if `per_trial`, in any containers.
            per_trial: whether each trial has batches of its own.
            loss: from outputs and targets to each trial's loss ``[K]``.
            control: scales, clips and skips.
            precision: makes what forward and loss run in.
            device: where the trials are.
            record: keeps what the step makes of one trial.
            is_static: whether all steps on such batches queue the same operations, so that a graph may stand for them.

        Returns:
            Each trial's loss, ``[K]``.
        """
        rows = self._fused.rows
        self.optimizer.zero_grad()
        rows.note_buffers()
        losses: list[Tensor] = []
        totals: list[Tensor] = []
        prefix = self._prefix and f"{self.name}: "

        def compute(inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
            return self._pass(inputs, targets, len(batches), per_trial, loss, control, precision, device, record)

        captured = self.captured if record is None and len(batches) == 1 and is_static() else None
        for number, (inputs, targets) in enumerate(batches):
            if record is not None:
                record.phase = prefix + named_batch(number, len(batches))
            if captured is None:
                losses_K, total = compute(inputs, targets)
            else:
                losses_K, total = captured.run(inputs, targets, per_trial, compute)
            losses.append(losses_K)
            totals.append(total)
            if record is not None:
                record.put(LOSS, record.phase, losses_K[record.row])
            del losses_K, total
        losses_K = losses[0] if len(losses) == 1 else torch.stack(losses).mean(0)
        if record is not None:
            record.phase = prefix
            record.gradients([(name, p.grad) for name, p in rows.parameters.items()], per_trial=True)
        self._watch(control, losses_K, totals)
        latest = captured.latest if captured is not None and control.is_static else None
        if latest is not None and self._steps.takes(latest):
            self._steps.run(latest, self._enter_step, lambda: self._changed(control), control)
            return losses_K
        gradients, skip = control.unchanged, control.skipped
        if control.touches:
            self._units.enter(self._units.number("gradients"))
            gradients, skip = control.gradients(*self._gradients())
        self.optimizer.step(self._enter_step, gradients, skip)
        return losses_K

    def _watch(self, control: Control, losses_K: Tensor, totals: Sequence[Tensor]) -> None:
        """Find out which trials are lost, or let the device do so. Their buffers stay as they were before the step."""
        rows = self._fused.rows
        if control.alive is not None:
            control.alive.watch(losses_K, self.optimizer)
            rows.put_back_all_but(control.alive.alive_K)
            return
        self._units.settle()
        control.watch(losses_K, sum(totals[1:], totals[0]).item())
        if control.lost:
            rows.put_back(control.lost)

    def _pass(
        self,
        inputs: Any,
        targets: Any,
        count: int,
        per_trial: bool,
        loss: Callable[[Any, Any], Tensor],
        control: Control,
        precision: Callable[[], AbstractContextManager[Any]],
        device: torch.device,
        record: Record | None,
    ) -> tuple[Tensor, Tensor]:
        """Forward, loss and backward of one of `count` batches; for the rest see `run`.

        Returns:
            Each trial's loss, ``[K]``, and the total that was differentiated.
        """
        with precision():
            outputs = self._forward.run(inputs, device, per_trial)
            if record is not None:
                record.outputs(outputs, per_trial=True)
            self._units.enter(self._loss_unit)
            losses_K = loss(outputs, targets)
        total = control.total(losses_K)
        if count > 1:
            total = total / count
        self._fused.rows.reached.start_at(total, one_of_several=count > 1)
        if total.device.type == "cpu":  # a CUDA device runs both without a break
            self._units.enter(self._loss_backward_unit)
        self._fused.rows.backward.run(total)
        return losses_K.detach(), total.detach()

    def before_training(self) -> None:
        """Put the optimizer in its mode for training, if it has one."""
        self.optimizer.train(self._enter_step)

    @property
    def has_static_forward(self) -> bool:
        """See `Forward.is_static`."""
        return self._forward.is_static()

    def before_evaluation(self) -> None:
        """Put the optimizer in its mode for evaluation, if it has one."""
        self.optimizer.eval(self._enter_step)

    def _gradients(self) -> tuple[list[Tensor], list[Tensor], list[Multipliers]]:
        """Return the gradients of this phase's parameters, and those to clip by norm: all, if it is the only phase.

        The last are the multipliers of these, if the trials are surrogates.
        """
        found = {n: p.grad for n, p in self._fused.rows.parameters.items() if p.grad is not None}
        trained = {name: found[name] for name in self.optimizer.names if name in found}
        clipped = found if self.name == FORWARD else trained
        scales = [self.optimizer.scales[name] for name in clipped] if self.optimizer.scales else []
        return list(trained.values()), list(clipped.values()), scales

    def _changed(self, control: Control) -> Gradients | None:
        """How the gradients are changed in steps that all queue the same."""
        return control.gradients(*self._gradients())[0] if control.touches else control.unchanged

    def _enter_step(self, index: int) -> None:
        self._units.enter(self._step_units[index])
