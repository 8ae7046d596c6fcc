"""What a user writes: a study, as ordinary PyTorch for a single model."""

import abc
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    import optuna
    from torch.optim.lr_scheduler import LRScheduler

_OURS = ("trials", "squeezer", "ds_hooks", "launch")


class StudyError(Exception):
    """A study's file or class is not usable; the text names the file and what is missing."""


class Study(abc.ABC):
    """The search over many trials. Its methods see one trial and one model; that K are trained at once never shows.

    Attributes:
        trials: how many trials in all.
        fused: how many are trained at once, at most.
        epochs: the budget of one trial.
        rungs: epochs after which a trial reports a score and may be stopped; it always reports after the last.
        direction: whether a score is to ``"maximize"`` or to ``"minimize"``.
        autocast: the type in which `torch.autocast` runs forward and loss, or None.
        scheduler_every: whether schedulers step after every ``"epoch"`` or every ``"step"``.
        mix_epochs: whether trials at different epochs may be fused; `batches` is read for several epochs at once then.
    """

    trials: int
    epochs: int
    fused: int = 16
    rungs: tuple[int, ...] = ()
    direction: str = "maximize"
    autocast: torch.dtype | None = None
    scheduler_every: str = "epoch"
    mix_epochs: bool = True

    @abc.abstractmethod
    def suggest(self, trial: "optuna.Trial") -> dict[str, Any]:
        """Choose a trial's hyperparameters by asking `trial`; plain numbers, strings and the like."""

    @abc.abstractmethod
    def model(self, params: dict[str, Any]) -> nn.Module:
        """A fresh model; random numbers are seeded before the call."""

    @abc.abstractmethod
    def optimizer(
        self, params: dict[str, Any], model: nn.Module
    ) -> "torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]":
        """An ordinary optimizer over parameters of `model`.

        Or several, by names of methods of `model`, as for the two of a GAN. A training step then has a phase for each,
        in this order: the method is called with the batch's inputs, in place of `forward`; `loss` is given what it
        returns; all gradients are fresh; and this optimizer steps.
        """

    @abc.abstractmethod
    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss of one model on one batch, a scalar."""

    @abc.abstractmethod
    def batches(self, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        """The training batches ``(inputs_B, targets_B)`` of an epoch, counted from 0; the same for all trials."""

    @abc.abstractmethod
    def validation(self) -> Iterable[tuple[Tensor, Tensor]]:
        """The validation batches ``(inputs_B, targets_B)``."""

    @abc.abstractmethod
    def score(self, outputs: Any, targets: Tensor) -> Tensor:
        """The score of one model on one batch, a scalar tensor; a trial's score is the mean over all examples."""

    def scheduler(self, params: dict[str, Any], optimizer: Any) -> "LRScheduler | Sequence[LRScheduler] | None":
        """The trial's learning-rate scheduler or schedulers, over `optimizer`, which is what the method of
        that name has returned.

        They step as `scheduler_every` says, `ReduceLROnPlateau` after every epoch with the trial's score.
        """
        return None

    def clip_norm(self, params: dict[str, Any]) -> float | None:
        """The norm to which the trial's gradients are clipped, as `torch.nn.utils.clip_grad_norm_` does."""
        return None

    def clip_value(self, params: dict[str, Any]) -> float | None:
        """The absolute value to which each gradient is clipped, before `clip_norm`."""
        return None

    def scaler(self, params: dict[str, Any]) -> "torch.amp.GradScaler | None":
        """How the trial's loss is scaled: a fresh scaler, of which the settings are read."""
        return None

    def trial_batches(self, params: dict[str, Any], number: int, epoch: int) -> Iterable[tuple[Tensor, Tensor]] | None:
        """Like `batches`, but for trial `number` alone: its own order or augmentation. None: `batches` feeds all.

        All trials' batches must have the same number and shapes.
        """
        return None

    def seed(self, params: dict[str, Any], number: int) -> int:
        """The seed of trial `number`: its initial weights and its dropout do not depend on its neighbours."""
        return number

    def sampler(self) -> "optuna.samplers.BaseSampler | None":
        """What proposes hyperparameters; None for the usual choice."""
        return None

    def pruner(self) -> "optuna.pruners.BasePruner | None":
        """What stops trials at rungs; None for the usual choice."""
        return None


def load_study(path: str | Path) -> Study:
    """Import the file at `path` and instantiate the one study that it defines.

    The file's directory comes first on `sys.path`, as for a script, so that it can import its own helpers.

    Raises:
        StudyError: the file is missing or fails, or what it defines is not a complete study.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise StudyError(f"{file}: no such file; expected a Python file that defines a Study")
    if file.suffix != ".py":
        raise StudyError(f"{file}: not a Python file; its name must end in .py")
    _refuse_shadows(file)
    study_class = _find(_execute(file), file)
    missing = sorted(study_class.__abstractmethods__)
    if missing:
        raise StudyError(f"{file}: class {study_class.__name__} lacks the methods {', '.join(missing)}")
    try:
        study = study_class()
    except Exception as error:
        raise StudyError(f"{file}: {study_class.__name__}() failed: {_where(error, file)}") from error
    _check(study, file)
    return study


def _refuse_shadows(file: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    if file.parent == root:
        return
    for name in _OURS:
        for found in (file.parent / f"{name}.py", file.parent / name / "__init__.py"):
            if found.exists():
                raise StudyError(
                    f"{file}: its directory contains {found.name if found.stem == name else name + '/'}, which hides "
                    f"the package '{name}' of Bubble Squeezer; rename it or move the study"
                )


def _execute(file: Path) -> ModuleType:
    name = f"_squeezer_study_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise StudyError(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    directory = str(file.parent)
    added = directory not in sys.path
    if added:
        sys.path.insert(0, directory)
    sys.modules[name] = module  # dataclasses and pickling look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if added:
            sys.path.remove(directory)
        raise StudyError(f"{file}: cannot be imported: {_where(error, file)}") from error
    return module


def _where(error: BaseException, file: Path) -> str:
    """The error's own message, with the line of the study's file that led to it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines.append(error.lineno)
    line = f"line {lines[-1]}: " if lines else ""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{line}{type(error).__name__}: {message}"


def _find(module: ModuleType, file: Path) -> type[Study]:
    found = {
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Study) and value.__module__ == module.__name__
    }
    if not found:
        raise StudyError(f"{file}: defines no subclass of trials.Study; exactly one is needed")
    if len(found) > 1:
        names = ", ".join(sorted(value.__name__ for value in found))
        raise StudyError(f"{file}: defines several studies ({names}); exactly one is needed")
    return found.pop()


def _check(study: Study, file: Path) -> None:
    where = f"{file}: class {type(study).__name__}"
    for name in ("trials", "epochs", "fused"):
        value = getattr(study, name, None)
        if value is None:
            raise StudyError(f"{where} lacks the attribute '{name}', a positive whole number")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise StudyError(f"{where}: {name} = {value!r}; allowed: a positive whole number")
    rungs: Any = study.rungs
    whole = isinstance(rungs, (tuple, list)) and all(isinstance(r, int) and not isinstance(r, bool) for r in rungs)
    if not whole or list(rungs) != sorted(set(rungs)) or any(not 1 <= r <= study.epochs for r in rungs):
        raise StudyError(f"{where}: rungs = {rungs!r}; allowed: increasing epochs from 1 to epochs = {study.epochs}")
    if study.direction not in ("maximize", "minimize"):
        raise StudyError(f"{where}: direction = {study.direction!r}; allowed: 'maximize' or 'minimize'")
    if study.scheduler_every not in ("epoch", "step"):
        raise StudyError(f"{where}: scheduler_every = {study.scheduler_every!r}; allowed: 'epoch' or 'step'")
    if not isinstance(study.mix_epochs, bool):
        raise StudyError(f"{where}: mix_epochs = {study.mix_epochs!r}; allowed: True or False")
