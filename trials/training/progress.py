"""A trial's state besides its tensors: schedulers, loss scale, clipping, and whether the trial is lost."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trials.fusion.errors import FuseError, RefusedError
from trials.fusion.own_code.streams import foreign_streams, kept_streams, refuse_foreign
from trials.optim.gradients import Gradients, norms_K, overflowed_K
from trials.shrinking.rules import Multipliers
from trials.study import Study
from trials.training.alive import Alive
from trials.training.inputs.schedulers import refuse_own_memory
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
    _has_stepped: bool = False

    def step(self) -> None:
        """Step the schedulers that do not act on scores.

        Raises:
            RefusedError: one of them draws random numbers, which are no trial's there, or keeps what no checkpoint
                holds.
        """
        own = [each for each in self.schedulers if not isinstance(each, ReduceLROnPlateau)]
        is_first = bool(own) and not self._has_stepped
        check = refuse_own_memory(own) if is_first else None
        with _drawing_nothing() if is_first else nullcontext():
            for scheduler in own:
                scheduler.step()
        if check is not None:
            check()
        self._has_stepped = True

    def step_on(self, score: Score) -> None:
        """Step the schedulers that act on scores."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(first_of(score))

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


def new_progress(study: Study, params: dict[str, Any], schedulers: list[LRScheduler]) -> Progress:
    """Return the progress of a fresh trial.

    Raises:
        FuseError: the study gives a limit that is not positive, or not the same each time, or a scaler of its own.
    """
    norm, value = (_limit(method, params) for method in (study.clip_norm, study.clip_value))
    scaler = study.scaler(params)
    if scaler is not None and not _is_ordinary(scaler):
        raise FuseError(f"Study.scaler returned {type(scaler).__name__}; allowed: torch.amp.GradScaler itself, None")
    scale = None if scaler is None or not scaler.is_enabled() else Scale(**scaler.state_dict())
    return Progress(schedulers, scale, norm, value)


@contextmanager
def _drawing_nothing() -> Iterator[None]:
    streams, put_back = foreign_streams(), kept_streams()
    yield
    refuse_foreign(streams, "Study.scheduler")
    if put_back():
        raise RefusedError(
            "Study.scheduler draws PyTorch's random numbers, of which no trial has its own there; allowed: a "
            "torch.Generator that it holds, seeded by the trial's hyperparameters"
        )


def wait_for_score(trials: Sequence[Progress]) -> bool:
    """Whether some scheduler acts on scores."""
    return any(isinstance(scheduler, ReduceLROnPlateau) for trial in trials for scheduler in trial.schedulers)


class Control:
    """Scales, clips and skips: what happens to the losses and gradients of K trials in each step."""

    def __init__(self, trials: Sequence[Progress], device: torch.device, *, decides_on_device: bool = False) -> None:
        """For `trials`, in the order of their rows. Made anew when the rows change.

        With `decides_on_device`, the host learns later which trials are lost, unless it scales losses.
        """
        self._trials = trials
        self._device = device
        self._norm_K = self._vector([t.clip_norm for t in trials])
        self._value_K = self._vector([t.clip_value for t in trials])
        self.scales = any(t.scale is not None for t in trials)
        self.clips = any(t.clip_norm < inf for t in trials)
        self._limits = any(t.clip_value < inf for t in trials)
        self.lost = [row for row, trial in enumerate(trials) if trial.lost]
        self.alive = Alive([t.lost for t in trials], device) if decides_on_device and not self.scales else None

    @property
    def touches(self) -> bool:
        """Whether gradients must be changed at all."""
        return self.scales or self.clips or self._limits

    @property
    def is_static(self) -> bool:
        """Whether all steps queue the same: none depends on numbers of the host's."""
        return not self.scales and (self.alive is not None or not self.lost)

    @property
    def skipped(self) -> list[int]:
        """The rows that the optimizer has to skip: those that are lost, where the device does not see to that."""
        return self.lost if self.alive is None else []

    @property
    def unchanged(self) -> Gradients | None:
        """What `gradients` would return where it need not be called."""
        return None if self.alive is None else Gradients(alive_K=self.alive.alive_K)

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

    def learn(self) -> None:
        """Note which trials the device has found lost; see `Alive.learn`."""
        for row in [] if self.alive is None else self.alive.learn():
            self._trials[row].lost = True
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
        skip = set(self.skipped)
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
        return Gradients(factor_K, limit_K, None if self.alive is None else self.alive.alive_K), sorted(skip)

    def _vector(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)


def _limit(method: Callable[[dict[str, Any]], Any], params: dict[str, Any]) -> float:
    given, again, name = method(params), method(params), method.__name__
    if given is None and again is None:
        return inf
    if not (isinstance(given, (int, float, np.number)) and given > 0):
        raise FuseError(f"Study.{name} returned {given!r}; allowed: a positive number or None")
    if given != again:
        raise FuseError(
            f"Study.{name} returned {given!r} and then {again!r} for one trial; allowed: the same each time, because a "
            "trial's limit is constant"
        )
    return float(given)


def _is_ordinary(scaler: torch.amp.GradScaler) -> bool:
    """Whether it is PyTorch's own, under any of its names."""
    return type(scaler).update is torch.amp.GradScaler.update and type(scaler).step is torch.amp.GradScaler.step
