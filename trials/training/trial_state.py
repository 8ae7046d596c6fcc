"""One trial as the user knows it, outside any group: the form in which it is split off, moved, saved and taken back."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trials.fusion.errors import FuseError, is_out_of_memory
from trials.fusion.shared_base import Seal
from trials.fusion.ways import Way
from trials.optim.optimizer_state import OptimizerState, from_plain
from trials.optim.several import by_phase
from trials.study import Study
from trials.training.inputs.batches import batch_params_of
from trials.training.inputs.trees import mapped
from trials.training.member import Built, Member, build


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialState:
    """A copy of one trial's state.

    Its tensors are its own, but for frozen parameters that the group holds once: it refers to the group's. Nothing may
    write to these. What is saved to a file has all tensors in full.

    Attributes:
        number: the trial's, in the study.
        params: its hyperparameters.
        epoch: how many epochs it has finished.
        loss: of its last step; NaN before the first.
        tensors: name in the user's model -> tensor; the names in `buffers` are not parameters.
        buffers: see above.
        saved: the names of the model's own `state_dict` -> the names in `tensors`; tied ones share one.
        optimizers: by phase.
        progress: its schedulers and its loss scale, each as its own `state_dict`, and whether it is lost.
        stream: where its random numbers continue.
        history: its losses and scores so far; see `History.plain`.
        seals: name of a tensor that is the group's -> what knows whether it is as it was.
    """

    number: int
    params: dict[str, Any]
    epoch: int
    loss: float
    tensors: Mapping[str, Tensor]
    buffers: frozenset[str]
    saved: Mapping[str, str]
    optimizers: Mapping[str, OptimizerState]
    progress: Mapping[str, Any]
    stream: Tensor
    history: Mapping[str, Any]
    seals: Mapping[str, Seal] = field(default_factory=dict)

    @property
    def model(self) -> dict[str, Tensor]:
        """The ordinary `state_dict`, which the user's own module loads."""
        return {name: self.tensors[canonical] for name, canonical in self.saved.items()}

    @property
    def place(self) -> int:
        """How many batches of the epoch under way it has trained on."""
        return int(self.history.get("steps", 0))

    @property
    def is_lost(self) -> bool:
        """Whether one of its losses was not finite. From then on its weights stay as they are."""
        return bool(self.progress["lost"])

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))

    def member(self, study: Study, way: Way = "rules", *, moves: bool = False) -> Member:
        """Return the trial as one that can be fused.

        Args:
            study: the user's.
            way: how it is fused.
            moves: whether it continues on the device where the study builds models; else where it is. On another kind
                of device its random stream begins anew.

        Raises:
            FuseError: the study now builds another model, other optimizers or other schedulers for it.
        """
        model, given, _, schedulers, roles = self.revive(study, None if moves else self.device)
        return Member(
            *(self.number, self.params, model, given, self.stream, schedulers, way),
            roles=roles,
            epoch=self.epoch,
            loss=self.loss,
            progress=self.progress,
            history=self.history,
            batch_params=batch_params_of(study, self.params),
        )

    def revive(self, study: Study, device: torch.device | None) -> Built:
        """Return the parts of the trial as the user knows them, in this state.

        Args:
            study: the user's.
            device: where they are; None: where the study builds them.

        Raises:
            FuseError: see `member`.
        """
        built = build(study, self.number, self.params)
        model, given, _, schedulers, _ = built
        if device is not None:
            model.to(device)
        self._load(model)
        optimizers = by_phase(given)
        if list(optimizers) != list(self.optimizers):
            raise FuseError(
                f"checkpoint of trial {self.number} has optimizers for {list(self.optimizers)}; Study.optimizer now "
                f"gives them for {list(optimizers)}"
            )
        for phase, optimizer in optimizers.items():
            with self._named(optimizer):
                self.optimizers[phase].give(optimizer)
        if len(schedulers) != len(self.progress["schedulers"]):
            raise FuseError(
                f"checkpoint of trial {self.number} with {len(self.progress['schedulers'])} schedulers; "
                f"Study.scheduler gives {len(schedulers)}"
            )
        for scheduler, saved in zip(schedulers, self.progress["schedulers"], strict=True):
            with self._named(scheduler):
                scheduler.load_state_dict(copy.deepcopy(saved))
        return built

    @contextmanager
    def _named(self, part: object) -> Iterator[None]:
        """Say what cannot continue from here, such as the same class of another version of PyTorch."""
        try:
            yield
        except FuseError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise FuseError(
                f"checkpoint of trial {self.number} does not fit {type(part).__name__}: {type(error).__name__}: {error}"
            ) from error

    def plain(self) -> dict[str, Any]:
        """Return plain containers that ``torch.load(..., weights_only=True)`` reads; see `from_plain`.

        Raises:
            FuseError: an optimizer keeps something that is neither number, text nor tensor.
        """
        self._check_seals()
        return {
            "number": self.number,
            "params": copy.deepcopy(self.params),
            "epoch": self.epoch,
            "loss": self.loss,
            "tensors": dict(self.tensors),
            "buffers": sorted(self.buffers),
            "saved": dict(self.saved),
            "optimizers": {phase: optimizer.plain() for phase, optimizer in self.optimizers.items()},
            "progress": dict(self.progress),
            "stream": self.stream,
            "history": copy.deepcopy(dict(self.history)),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "TrialState":
        """The reverse of `plain`."""
        optimizers = {phase: from_plain(saved) for phase, saved in plain["optimizers"].items()}
        return cls(**{**plain, "buffers": frozenset(plain["buffers"]), "optimizers": optimizers})

    def on_host(self) -> "TrialState":
        """Return it with all tensors in the host's memory.

        Raises:
            FuseError: see `plain`.
        """
        return TrialState.from_plain(mapped(Tensor.cpu, self.plain()))

    def _check_seals(self) -> None:
        for name, seal in self.seals.items():
            if not seal.is_whole:
                raise FuseError(
                    f"parameter '{name}' of trial {self.number}, which its group held in common, has been changed in "
                    "place since the trial was exported; allowed: changes of trainable parameters"
                )

    def _load(self, model: nn.Module) -> None:
        self._check_seals()
        own = {name for name, _ in model.named_parameters()}
        missing = sorted(own - self.tensors.keys())
        if missing:
            raise self._unlike(f"'{missing[0]}' is absent there")
        for name, value in self.tensors.items():
            path, _, attribute = name.rpartition(".")
            try:
                owner = model.get_submodule(path)
                present = getattr(owner, attribute)
            except AttributeError as error:
                raise self._unlike(f"'{name}' is absent here") from error
            is_own = attribute in owner._parameters or attribute in owner._buffers
            if is_own and (present is None or (present.shape, present.dtype) != (value.shape, value.dtype)):
                raise self._unlike(f"'{name}' is {_described(value)} there, and {_described(present)} here")
            if is_own:
                with torch.no_grad():
                    present.copy_(value)  # in place, since optimizers and other modules may hold it
            else:
                there = present.device if isinstance(present, Tensor) else value.device
                setattr(owner, attribute, value.to(there, copy=True))

    def _unlike(self, what: str) -> FuseError:
        return FuseError(f"checkpoint of trial {self.number} is of another structure: {what}")


def _described(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
