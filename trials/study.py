"""What a user writes: a study, as ordinary PyTorch for a single model."""

import abc
import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trials.settings import problems
from trials.shrinking.settings import Shrink
from trials.study_error import NO_FILE, StudyError

if TYPE_CHECKING:
    import optuna
    from optuna.artifacts._protocol import ArtifactStore
    from torch.optim.lr_scheduler import LRScheduler

_OURS = ("trials", "squeezer", "ds_hooks", "launch")

MOST_MEASURED = 16
"""The most that ``fused = "auto"`` chooses: samplers learn nothing from trials that begin together."""


class Study(abc.ABC):
    """The search over many trials. Its methods see one trial and one model, though many train as one.

    Attributes:
        trials: how many trials there are in all.
        fused: how many train at once, at most. ``"auto"``: as many, up to 16, as train fastest, by measurement before
            the first one begins. On CUDA, 16 if they fit.
        epochs: the epochs of one trial.
        rungs: epochs after which a trial reports a score and may be stopped; it always reports after the last.
        search: None: trials train on until Optuna's pruner stops them. ``"asha"``: they pause at each rung, and the
            best are promoted to the next.
        reduction_factor: with ``"asha"``, one trial in this many is promoted.
        direction: ``"maximize"`` or ``"minimize"`` the score.
        directions: such a word for each of several objectives; none: `direction` counts. Then `score` returns a tuple,
            or `metric` names as many, and no trial is pruned.
        autocast: the type in which `torch.autocast` runs forward and loss; None: no autocast.
        batch_params: names of hyperparameters on which `batches` depends, such as ``("batch_size",)``. Trials that
            differ in them are not fused.
        accumulate: the batches of one optimizer step, whose losses are averaged. An epoch's last step may have fewer.
        scheduler_every: schedulers step after every ``"epoch"`` or every ``"step"``.
        mix_epochs: whether trials at different epochs may be fused. If so, several epochs are read at once.
        keep_best: how many of the best trials keep their weights.
        shared: patterns, such as ``"base.*"``, of names of parameters that all trials have in common. Frozen parameters
            that are equal, bit by bit, in all trials of a group are held once and computed once in any case. For those
            named here, a trial whose parameter is trainable, or differs, is an error.
        audit: when a fused trial is compared with the trial alone: on first batches and then once per ``"epoch"``, at
            the ``"start"`` only, or never (False).
        deadline: when the study should have ended, as in ``"2099-12-31 08:00"``, local or with a zone; None: whenever.
            It is admitted or refused, and changes nothing that is trained.
        shrink: how many times narrower the models are that the trials train, or a `trials.Shrink`, so that their best
            hyperparameters are those of the model that `model` builds; None: as `model` builds them.
        cuda_graphs: whether, on a GPU, forward, loss and backward of a step may be one CUDA graph, where all of them
            run by rules. It is proven against ordinary steps first.
        metric: which of `metrics` is a trial's score; None: `score` computes it, and is not needed otherwise.
    """

    trials: int
    epochs: int
    fused: int | str = "auto"
    rungs: tuple[int, ...] = ()
    search: str | None = None
    reduction_factor: int = 3
    direction: str = "maximize"
    directions: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    batch_params: tuple[str, ...] = ()
    accumulate: int = 1
    scheduler_every: str = "epoch"
    mix_epochs: bool = True
    keep_best: int = 1
    shared: tuple[str, ...] = ()
    audit: str | bool = "epoch"
    cuda_graphs: bool = True
    metric: str | tuple[str, ...] | None = None
    deadline: str | None = None
    shrink: int | Shrink | None = None

    @property
    def rows(self) -> int:
        """How many trials train at once, at most, before anything is measured."""
        return self.fused if isinstance(self.fused, int) else MOST_MEASURED

    @abc.abstractmethod
    def suggest(self, trial: "optuna.Trial") -> dict[str, Any]:
        """Choose a trial's hyperparameters by asking `trial`. Return plain values, such as numbers or text."""

    @abc.abstractmethod
    def model(self, params: dict[str, Any]) -> nn.Module:
        """Return a fresh model. Random numbers are seeded before the call.

        It may have a second parameter called ``shrink``, by which it divides its widths (1: the model itself).
        Otherwise `trials.shrink` makes surrogates of the model, if `Study.shrink` wants them.
        """

    @abc.abstractmethod
    def optimizer(
        self, params: dict[str, Any], model: nn.Module
    ) -> "torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]":
        """Return an ordinary optimizer over parameters of `model`.

        Or return several, by names of methods of `model`, such as the two of a GAN. A training step then has one phase
        for each, in this order. The phase calls the method instead of `forward` with the batch's inputs, passes the
        result to `loss`, computes fresh gradients, and steps this optimizer.
        """

    @abc.abstractmethod
    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss of one model on one batch, a scalar tensor.

        It may have a third parameter called ``params``, and so may `score`: the trial's hyperparameters, such as the
        weight of a term. If trials differ in numbers there, these are tensors without axes. Where that does not work,
        as in ``if params["x"] > 0.5``, the function runs once for each trial with plain numbers.
        """

    @abc.abstractmethod
    def batches(self, epoch: int) -> Iterable[tuple[Any, Any]]:
        """Return the training batches of `epoch`, counted from 0: pairs ``(inputs_B, targets_B)`` of B examples.

        All trials train on the same batches. If the study has `batch_params`, there is a second argument, a dict of
        these hyperparameters alone, and only trials in which they are equal share batches.

        Both parts are tensors, or dicts, tuples and lists of tensors and plain values, nested at will. The model is
        called with the inputs:

        - ``model(**inputs)`` if they are a dict or another mapping;
        - ``model(*inputs)`` if they are a tuple or a list;
        - ``model(inputs)`` if they are a tensor or a plain value.

        B is the length of the first tensor that has an axis.

        An epoch may be a part of the data: trials are saved, scored and pruned only when one ends.
        """

    @abc.abstractmethod
    def validation(self) -> Iterable[tuple[Any, Any]]:
        """Return the validation batches, pairs ``(inputs_B, targets_B)`` as from `batches`."""

    def score(self, outputs: Any, targets: Any) -> Any:
        """Return the score of one model on one batch, a scalar tensor. A trial's score is the mean over all examples.

        With several `directions` return a tuple of such, or of plain numbers. For ``params`` see `loss`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no score; needed unless it has a metric")

    def metrics(self, outputs: Any, targets: Any) -> Mapping[str, Any]:
        """Return numbers by name, from all outputs and targets of the validation set.

        It is called on the CPU for one trial. Those of all batches are joined along the first axis.
        """
        return {}

    @property
    def promotes(self) -> bool:
        """Whether trials pause at rungs, and the best are promoted."""
        return self.search == "asha"

    @property
    def has_metrics(self) -> bool:
        """Whether `metrics` is overridden."""
        return getattr(self.metrics, "__func__", None) is not Study.metrics

    @property
    def has_own_batches(self) -> bool:
        """Whether `trial_batches` is overridden."""
        return getattr(self.trial_batches, "__func__", None) is not Study.trial_batches

    def scheduler(self, params: dict[str, Any], optimizer: Any) -> "LRScheduler | Sequence[LRScheduler] | None":
        """Return the trial's learning-rate scheduler or schedulers; None: the rate is constant.

        They step every epoch or every step, by `scheduler_every`; `ReduceLROnPlateau` steps after every epoch, with the
        trial's score.

        Args:
            params: the trial's hyperparameters.
            optimizer: what `Study.optimizer` returned.
        """
        return None

    def clip_norm(self, params: dict[str, Any]) -> float | None:
        """Return the limit for the norm of the trial's gradients, as for `clip_grad_norm_`; None: no limit."""
        return None

    def clip_value(self, params: dict[str, Any]) -> float | None:
        """Return the absolute value to which each gradient is clipped, before `clip_norm`; None: no clipping."""
        return None

    def scaler(self, params: dict[str, Any]) -> "torch.amp.GradScaler | None":
        """Return a fresh scaler with the settings for the trial's loss scale; None: the loss is not scaled."""
        return None

    def trial_batches(self, params: dict[str, Any], number: int, epoch: int) -> Iterable[tuple[Any, Any]] | None:
        """Like `batches`, for trial `number` alone: its own order or augmentation. None: `batches` feeds all trials.

        All trials must have the same number of batches. These may differ in the numbers in their tensors alone: not in
        shapes, types, containers, keys or plain values.
        """
        return None

    def seed(self, params: dict[str, Any], number: int) -> int:
        """Return the seed of trial `number`, for its initial weights and its dropout."""
        return number

    def sampler(self) -> "optuna.samplers.BaseSampler | None":
        """Return Optuna's sampler, which proposes hyperparameters; None: Optuna's default."""
        return None

    def pruner(self) -> "optuna.pruners.BasePruner | None":
        """Return Optuna's pruner, which stops trials at rungs; None: Optuna's default, or none if `search` is set."""
        return None

    def callbacks(self) -> "Sequence[Callable[[optuna.Study, optuna.trial.FrozenTrial], None]]":
        """Return functions to call after each result, as for Optuna's `Study.optimize`, such as those of W&B.

        They get Optuna's study and the trial that has ended. They run in the search worker, not where trials train.
        """
        return []

    def artifact_store(self) -> "ArtifactStore | None":
        """Return Optuna's artifact store, which gets the best trials' weights once the study is over; None: none.

        If the study is in a database of several hosts, its checkpoints are there too.
        """
        return None

    def enqueue(self) -> Sequence[Mapping[str, Any]]:
        """Return points to try first, as for Optuna's `Study.enqueue_trial`: some or all parameters by name."""
        return []


def load_study(path: str | Path) -> Study:
    """Import the file at `path` and instantiate the one study that it defines.

    The file's directory comes first on `sys.path`, as for a script, so the file can import modules beside it.

    Raises:
        StudyError: the file is missing or fails, or defines no complete study.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise StudyError(f"{file}: {NO_FILE}")
    if file.suffix != ".py":
        raise StudyError(f"{file}: not a Python file; its name must end in .py")
    _refuse_shadows(file)
    study_class = _find(_execute(file), file)
    lacks_score = study_class.score is Study.score and study_class.metric is None
    missing = sorted([*study_class.__abstractmethods__, *(["score"] if lacks_score else [])])
    if missing:
        raise StudyError(f"{file}: class {study_class.__name__} lacks the methods {', '.join(missing)}")
    try:
        study = study_class()
    except Exception as error:
        raise StudyError(f"{file}: {study_class.__name__}() failed: {_where(error, file)}") from error
    for problem in problems(study):
        raise StudyError(f"{file}: class {study_class.__name__}{problem}")
    return study


def describe_error(study: Study, error: BaseException) -> str:
    """An error in words, with the line of the study's file that led to it, if one did."""
    file = getattr(sys.modules.get(type(study).__module__), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" ({Path(str(file)).name}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


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
    name = f"_squeezer_study_{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise StudyError(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    directory = str(file.parent)
    added = directory not in sys.path
    if added:
        sys.path.insert(0, directory)
    sys.modules[name] = module  # dataclasses and pickle look up their module there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if added:
            sys.path.remove(directory)
        raise StudyError(f"{file}: cannot be imported: {_where(error, file)}") from error
    return module


def _where(error: BaseException, file: Path) -> str:
    """Return the error's message, with the line of the study's file that led to it."""
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
