"""A trial's state besides its tensors: schedulers, loss scale, clipping, and whether the trial is lost."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trials.fusion.errors import FuseError
from trials.optim.gradients import Gradients, norms_K, overflowed_K
from trials.shrinking.rules import Multipliers
from trials.study import Study
from trials.training.scores.objectives import Score, first_of


@dataclass(slots=True)
class Scale:
    """One trial's loss scale. It grows and shrinks as in `torch.amp.GradScaler`."""

    scale: float = 1.0
    growth_factor: float = 1.0
    backoff_factor: float = 1.0
    growth_interval: int = 1
    _growth_tracker: int = 0

    def __post_init__(self) -> None:
        """Round to float32, as `GradScaler` does."""
        self.scale = float(np.float32(self.scale))

    def update(self, overflowed: bool) -> None:
        """Adapt the scale after a step."""
        if overflowed:
            self.scale = float(np.float32(self.scale * self.backoff_factor))
            self._growth_tracker = 0
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            grown = self.scale * self.growth_factor
            self.scale = float(np.float32(grown)) if grown <= np.finfo(np.float32).max else self.scale
            self._growth_tracker = 0

    @property
    def inverse(self) -> float:
        """The factor that undoes the scale in gradients."""
        return float(np.float32(1 / self.scale))


@dataclass(slots=True)
class Progress:
    """The progress of one trial.

    Attributes:
        schedulers: act on its optimizer, or on what stands for it.
        scale: its loss scale; None: the loss is not scaled.
        clip_norm: the largest norm of its gradients.
        clip_value: the largest absolute value of a gradient.
        lost: whether one of its losses was not finite. From then on its weights stay as they are.
    """

    schedulers: list[LRScheduler] = field(default_factory=list)
    scale: Scale | None = None
    clip_norm: float = inf
    clip_value: float = inf
    lost: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers, without what follows from the trial's hyperparameters."""
        return {
            "schedulers": [copy.deepcopy(scheduler.state_dict()) for scheduler in self.schedulers],
            "scaler": None if self.scale is None else asdict(self.scale),
            "lost": self.lost,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`.

        Raises:
            FuseError: `state` is from a trial with other schedulers.
        """
        if len(state["schedulers"]) != len(self.schedulers):
            raise FuseError(
                f"checkpoint of a trial with {len(state['schedulers'])} schedulers; Study.scheduler gives "
                f"{len(self.schedulers)}"
            )
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(copy.deepcopy(saved))
        self.scale = None if state["scaler"] is None else Scale(**state["scaler"])
        self.lost = state["lost"]


def new_schedulers(study: Study, params: dict[str, Any], optimizer: Any) -> list[LRScheduler]:
    """Return the trial's schedulers as a list."""
    given = study.scheduler(params, optimizer)
    if given is None:
        return []
    made = list(given) if isinstance(given, Sequence) else [given]
    for each in made:
        if not isinstance(each, (LRScheduler, ReduceLROnPlateau)):
            raise FuseError(f"Study.scheduler returned {type(each).__name__}; allowed: torch schedulers, a list, None")
    return made


def new_progress(study: Study, params: dict[str, Any], schedulers: list[LRScheduler]) -> Progress:
    """Return the progress of a fresh trial.

    Raises:
        FuseError: the study gives a limit that is not positive.
    """
    norm, value = _limit("clip_norm", study.clip_norm(params)), _limit("clip_value", study.clip_value(params))
    scaler = study.scaler(params)
    scale = None if scaler is None or not scaler.is_enabled() else Scale(**scaler.state_dict())
    return Progress(schedulers, scale, norm, value)


def step_schedulers(trials: Sequence[Progress]) -> None:
    """Step all schedulers that do not act on scores."""
    for trial in trials:
        for scheduler in trial.schedulers:
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()


def wait_for_score(trials: Sequence[Progress]) -> bool:
    """Whether some scheduler acts on scores."""
    return any(isinstance(scheduler, ReduceLROnPlateau) for trial in trials for scheduler in trial.schedulers)


def step_on_scores(trials: Sequence[Progress], scores: Sequence[Score]) -> None:
    """Step the schedulers that act on scores."""
    for trial, score in zip(trials, scores, strict=True):
        for scheduler in trial.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(first_of(score))


class Control:
    """Scales, clips and skips: what happens to the losses and gradients of K trials in each step."""

    def __init__(self, trials: Sequence[Progress], device: torch.device) -> None:
        """For `trials`, in the order of their rows. Made anew when the rows change."""
        self._trials = trials
        self._device = device
        self._norm_K = self._vector([t.clip_norm for t in trials])
        self._value_K = self._vector([t.clip_value for t in trials])
        self.scales = any(t.scale is not None for t in trials)
        self.clips = any(t.clip_norm < inf for t in trials)
        self._limits = any(t.clip_value < inf for t in trials)
        self.lost = [row for row, trial in enumerate(trials) if trial.lost]

    @property
    def touches(self) -> bool:
        """Whether gradients must be changed at all."""
        return self.scales or self.clips or self._limits

    def total(self, losses_K: Tensor) -> Tensor:
        """Return the scalar to differentiate: the sum of the losses ``[K]``, each times its scale."""
        if not self.scales:
            return losses_K.sum()
        return (losses_K * self._vector([1.0 if t.scale is None else t.scale.scale for t in self._trials])).sum()

    def watch(self, losses_K: Tensor, total: float) -> None:
        """Note which trials are lost, given all losses ``[K]`` and their total."""
        if np.isfinite(total):
            return
        for row, finite in enumerate(torch.isfinite(losses_K).tolist()):
            self._trials[row].lost |= not finite
        self.lost = [row for row, trial in enumerate(self._trials) if trial.lost]

    def gradients(
        self, trained: Sequence[Tensor], all_of_them: Sequence[Tensor], scales: Sequence[Multipliers] = ()
    ) -> tuple[Gradients, list[int]]:
        """Return how to change gradients ``[K, *shape]``, and the rows that take no step.

        Args:
            trained: the gradients of the parameters that the optimizer trains.
            all_of_them: the gradients whose norm is clipped.
            scales: the multipliers of each of these, for surrogates.
        """
        skip = set(self.lost)
        factor_K = limit_K = None
        if self.scales:
            overflowed = overflowed_K(trained).tolist() if trained else [False] * len(self._trials)
            factor_K = self._vector([1.0 if t.scale is None else t.scale.inverse for t in self._trials])
            for row, trial in enumerate(self._trials):
                if trial.scale is not None:
                    trial.scale.update(overflowed[row])
                    skip |= {row} if overflowed[row] else set()
        if self._limits:
            limit_K = self._value_K if factor_K is None else self._value_K / factor_K
        if self.clips and all_of_them:
            norm_K = norms_K(all_of_them, Gradients(factor_K, limit_K), scales).double()
            clip_K = torch.where(self._norm_K.isinf(), 1.0, (self._norm_K / (norm_K + 1e-6)).clamp(max=1.0))
            factor_K = clip_K if factor_K is None else clip_K * factor_K
        return Gradients(factor_K, limit_K), sorted(skip)

    def _vector(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)


def _limit(name: str, given: float | None) -> float:
    if given is not None and not given > 0:
        raise FuseError(f"Study.{name} returned {given!r}; allowed: a positive number or None")
    return inf if given is None else float(given)
