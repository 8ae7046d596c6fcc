"""The state of K trials in a group, and what can be read of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trials.fusion import Fused
from trials.fusion.graph.trace import FORWARD
from trials.fusion.units import Units
from trials.gate.base import HOST_UNIT
from trials.optim.several import Optimizers
from trials.optim.vector import VectorOptimizer
from trials.study import Study
from trials.training.alive import STEPS_AT_MOST, decides_on_device
from trials.training.audits.compare import is_continuous
from trials.training.audits.record import SCALE, STREAM, Record
from trials.training.inputs.batches import Reader
from trials.training.progress import Control
from trials.training.roster import Roster
from trials.training.scores.objectives import Score
from trials.training.trial_state import TrialState


class GroupState:
    """K trials: their tensors, optimizers and numbers, one row each. A `TrialGroup` trains them."""

    _study: Study
    _units: Units
    _fused: Fused
    _optimizers: Optimizers
    _roster: Roster
    _control: Control
    _device: torch.device
    _saved_names: list[str]
    metrics: list[dict[str, float]]
    """Each trial's, from the last evaluation; empty if the study has none."""

    @property
    def size(self) -> int:
        """K."""
        return len(self._roster)

    @property
    def numbers(self) -> list[int]:
        """The trials' numbers in the study, one per row."""
        return self._roster.numbers

    @property
    def params(self) -> list[dict[str, Any]]:
        """Their hyperparameters, one per row."""
        return self._roster.params

    @property
    def epochs_done(self) -> list[int]:
        """How many epochs each has finished, as counted by `end_epoch`."""
        return self._roster.epochs_done

    @property
    def place(self) -> int:
        """How many batches of the epoch under way they have trained on."""
        return max((history.steps for history in self._roster.histories), default=0)

    def readers(self) -> list[Reader]:
        """The trials, and the epoch that each trains next, counted from 0."""
        return self._roster.readers()

    def losses_K(self) -> Tensor:
        """Each trial's loss in the last step, ``[K]``; with several phases their sum. NaN before the first step."""
        return self._roster.losses_K

    def finite_K(self) -> Tensor:
        """Whether all losses of each trial were finite, ``[K]``, bool.

        Weights, buffers and optimizers of the others stay as before the step that lost them.
        """
        self._learn()
        return torch.tensor([not trial.lost for trial in self._roster.progress], dtype=torch.bool)

    def _learn(self, *, after: int = 1) -> None:
        """Learn which trials the device has found lost, after so many steps at least.

        Who reads or changes what the host knows of the trials calls it first. Host work may follow.
        """
        if self._control.alive is not None and len(self._control.alive) >= after:
            self._units.settle()
            self._control.learn()
            self._units.enter(HOST_UNIT)

    def _learn_in_time(self) -> None:
        """The same before a step, now and then."""
        self._learn(after=STEPS_AT_MOST)

    def _new_control(self) -> Control:
        """For the trials as they are now."""
        by_vectors = all(isinstance(optimizer, VectorOptimizer) for optimizer in self._optimizers)
        on_device = by_vectors and decides_on_device(self._device)
        return Control(self._roster.progress, self._device, decides_on_device=on_device)

    def extract(self, row: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the trial in `row` as the user knows it: its module's `state_dict`, and its optimizer's."""
        self._learn()
        rows = self._fused.rows
        model = {name: rows.require("", name)[row].detach().clone() for name in self._saved_names}
        return model, self._optimizers.extract(row)

    def progress(self, row: int) -> dict[str, Any]:
        """Return the other state of the trial in `row`.

        Returns:
            ``schedulers`` and ``scaler``, each as its own `state_dict`; ``lost``, whether a loss was not finite; and
            ``rng_state``, where its random stream continues.
        """
        self._learn()
        return {**self._roster.progress[row].state_dict(), "rng_state": self._fused.rows.generators[row].get_state()}

    def sound(self) -> list[int]:
        """Return the rows of trials whose losses have all been finite."""
        self._learn()
        return [row for row, trial in enumerate(self._roster.progress) if not trial.lost]

    def export(self, row: int, mark: str = "") -> TrialState:
        """Return a copy of the trial in `row`, which a group of any size takes back.

        Parameters that the group holds once are not copied: the state refers to the group's own.

        Args:
            row: the trial's.
            mark: of what it has trained on in the epoch under way, see `BatchesSeen`.
        """
        self._learn()
        history = self._roster.history(row)
        if history["steps"]:
            history["mark"] = mark
        rows = self._fused.rows
        named = {**rows.parameters, **rows.buffers}
        own = {n: t for n, t in named.items() if not n.rpartition(".")[2].startswith("_tensor_constant")}
        return TrialState(
            number=self.numbers[row],
            params=self.params[row],
            epoch=self.epochs_done[row],
            loss=self._roster.losses_K[row].item(),
            tensors={
                name: rows.once[name] if name in rows.once else tensor[row].detach().clone()
                for name, tensor in own.items()
            },
            seals=dict(rows.once.seals),
            buffers=frozenset(rows.buffers),
            saved={name: rows.aliases.get(name, name) for name in self._saved_names},
            optimizers={phase: optimizer.state(row) for phase, optimizer in self._optimizers.items()},
            progress=self._roster.progress[row].state_dict(),
            stream=rows.generators[row].get_state(),
            history=history,
        )

    def set_lr(self, row: int, value: float, group: int | None = None) -> None:
        """Set the learning rate of the trial in `row`, in one of its optimizer's param groups or in all."""
        self._optimizers.set_lr(row, value, group)

    def ways(self) -> list[tuple[str, str]]:
        """Return each layer's name, and how its training forward is computed. Known after the first step."""
        return list(dict.fromkeys(pair for phase in self._fused.phases.values() for pair in phase.ways()))

    def note_scores(self, scores: Sequence[Score]) -> None:
        """Keep the trials' scores, one per row, and their metrics of the same evaluation."""
        metrics = self.metrics or [{}] * self.size
        for row, history in enumerate(self._roster.histories):
            history.note_score(self.epochs_done[row], scores[row], metrics[row])

    def history(self, row: int) -> dict[str, Any]:
        """Return the losses and scores of the trial in `row`, for JSON; see `History.shown`."""
        return self._roster.histories[row].shown()

    @torch.no_grad()
    def shake(self, row: int, share: float) -> None:
        """Change each of one trial's parameters by at most `share` of itself; what is held once, for all trials."""
        draws, rows = torch.Generator().manual_seed(row), self._fused.rows

        def factors(like: Tensor) -> Tensor:
            return 1 + share * (2 * torch.rand(like.shape, generator=draws).to(like) - 1)

        for name, tensor in rows.parameters.items():
            if is_continuous(tensor) and name not in rows.once:
                tensor[row] *= factors(tensor[row])
        if rows.once:  # others may refer to it, so that it must stay as it is
            rows.share({n: t * factors(t) for n, t in rows.once.items() if is_continuous(t)})

    @contextmanager
    def watched(self, record: Record, before: TrialState) -> Iterator[None]:
        """Keep in `record` what the step within makes of its trial, whose state was `before`."""
        self._units.watch = record
        try:
            yield
        finally:
            self._units.watch = None
        self._learn()
        row, rows = record.row, self._fused.rows
        after = {**rows.parameters, **rows.buffers}
        record.phase = ""
        own = {name: after[name][row] for name in before.tensors}
        record.updates(before.tensors, own, before.buffers, before.seals)
        for phase, optimizer in self._optimizers.items():
            record.optimizer("" if phase == FORWARD else f"{phase}: ", optimizer.names, optimizer.extract(row))
        for name, value in (self._roster.progress[row].state_dict()["scaler"] or {}).items():
            record.put(SCALE, name, value)
        if self._device.type == "cpu":  # a CUDA device counts launches as well
            record.put(STREAM, "", rows.generators[row].get_state())

    def coarse(self) -> dict[str, float]:
        """Return the rounding of each phase's optimizer that computes in a coarser type than its parameters'."""
        types = {phase: optimizer.computes_in for phase, optimizer in self._optimizers.items()}
        return {phase: torch.finfo(kind).eps for phase, kind in types.items() if kind is not None}
