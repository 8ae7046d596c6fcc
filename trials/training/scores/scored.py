"""K trials in a group, and how they are scored."""

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trials.fusion import FuseError
from trials.fusion.graph.inputs import moved
from trials.fusion.scores.scalar import Scalar
from trials.fusion.ways import Way
from trials.gate.base import HOST_UNIT, Gate
from trials.training.audits.audit import Audit, Mode
from trials.training.audits.lone import Lone
from trials.training.audits.record import SCORE, Record
from trials.training.group_state import GroupState
from trials.training.inputs.batches import BatchCopy, as_batch, shapes
from trials.training.inputs.endless import with_an_end
from trials.training.inputs.trees import examples
from trials.training.phase import Phase
from trials.training.scores.metrics import Validated, metrics_of, on_host, score_of
from trials.training.scores.objectives import Score, per_trial_scores


class ScoredGroup(GroupState, abc.ABC):
    """K trials, which can be scored."""

    _gate: Gate
    _audit: Audit | None
    _phases: Sequence[Phase]
    _scalars: dict[str, Scalar]
    unproven: set[Mode]

    @abc.abstractmethod
    def saved(self) -> Callable[[], None]:
        """Return a function that puts all trials back to their present state."""

    @abc.abstractmethod
    def rebuild(self, way: Way) -> None:
        """Train in another way from now on, from the present state."""

    @abc.abstractmethod
    def ask(self, part: str) -> None:
        """Ask the gate for a part of an audit."""

    @abc.abstractmethod
    def _follow(self) -> None:
        """Train in the way that an audit, perhaps of another group, has chosen."""

    @torch.no_grad()
    def evaluate(self) -> Sequence[Score]:
        """Return each trial's score: the mean over the validation batches, weighted by their sizes, or a metric.

        Raises:
            FuseError: the study has no validation batches, its score is not a scalar, or it lacks the metric.
        """
        self._follow()
        total_K = torch.zeros(self._scores_shape(), dtype=torch.float64, device=self._device)
        count = 0
        for phase in self._phases:
            phase.before_evaluation()
        validated: list[Validated] = []
        for batch in with_an_end(self._study, self._study.validation(), "Study.validation"):
            inputs_B, targets_B = as_batch(batch, "Study.validation")
            size = examples(inputs_B, targets_B)
            scores_K, own = self._audited_scores(inputs_B, targets_B)
            total_K += scores_K.double() * size
            validated += own
            self._gate.enter(HOST_UNIT)  # the loader's time is not the score's
            count += size
        if not count:
            raise FuseError("Study.validation gave no batches; at least one is needed for a score")
        mean_K = total_K / count
        self._units.settle()
        scores: Sequence[Score] = mean_K.tolist()
        if validated:
            self.metrics = metrics_of(self._study, self.numbers, validated, self._enter_metrics)
        if self._study.metric is not None:
            scores = [score_of(own, self._study.metric) for own in self.metrics]
        self._units.rest()
        return scores

    def _scores_shape(self) -> tuple[int, ...]:
        """``[K]``, or ``[K, J]`` of J objectives."""
        return (self.size, len(self._study.directions)) if self._study.directions else (self.size,)

    def _scores(self, inputs_B: Any, targets_B: Any, record: Record | None = None) -> tuple[Tensor, list[Validated]]:
        """Return each trial's score of a batch, ``[K]`` or ``[K, J]``, and what metrics are computed of."""
        validated: list[Validated] = []
        with self._precision():
            outputs = self._fused.eval.run(inputs_B, self._device)
            self._units.enter(self._units.number("score"))
            if self._study.has_metrics:
                self._units.settle()
                validated.append(on_host(outputs, targets_B))
            if self._study.metric is None:
                streams = self._fused.rows.generators
                scores_K = per_trial_scores(self._study, lambda n: self._per_trial(n, outputs, targets_B), streams)
            else:
                scores_K = torch.zeros(self._scores_shape(), device=self._device)
        if record is not None:
            record.outputs(outputs, per_trial=True)
            if self._study.metric is None:
                record.put(SCORE, "", scores_K[record.row])
        return scores_K, validated

    def _audited_scores(self, inputs_B: Any, targets_B: Any) -> tuple[Tensor, list[Validated]]:
        kind = self.size > 1, shapes((inputs_B, targets_B))
        if self._audit is None or not self._audit.is_due(self, "evaluation", kind):
            return self._scores(inputs_B, targets_B)
        kept = BatchCopy(inputs_B, targets_B)

        def step(record: Record | None) -> tuple[Tensor, list[Validated]]:
            kept.put_back()
            return self._scores(inputs_B, targets_B, record)

        def alone(lone: Lone, record: Record, row: int) -> None:
            lone.score(*kept.of(None), self._precision, record)

        found: tuple[Tensor, list[Validated]] = self._audit.run(self, "evaluation", kind, step, alone)
        return found

    def _enter_metrics(self) -> None:
        self._units.enter(self._units.number("metrics"))

    def _per_trial(self, name: str, outputs: Any, targets: Any, per_trial: bool = False) -> Tensor:
        """Evaluate the user's function of one model, a scalar, for each of K models. Returns ``[K]``."""
        targets = moved(targets, self._device)
        rows, scalar = self._fused.rows, self._scalars[name]
        values_K = scalar(outputs, targets, rows.generators, per_trial, self.params, rows.reached)
        if not scalar.is_static:
            rows.backward.expect_own_code()
        return values_K

    def _precision(self) -> AbstractContextManager[Any]:
        kind = self._study.autocast
        return nullcontext() if kind is None else torch.autocast(self._device.type, kind)
