"""Which of a study's hyperparameters transfer from surrogate to target: found by varying one at a time.

What a varied one changes in the study's models and optimizers shows what it is: a number of the optimizer, a schedule,
a layer's number, or a shape.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.weak import WeakIdKeyDictionary

from trials.fusion.compared.describe import Describer
from trials.fusion.own_code.streams import seed_all, undisturbed
from trials.optim.several import by_phase
from trials.shrinking.errors import ShrinkError
from trials.shrinking.settings import as_shrink
from trials.study import Study
from trials.training.inputs.schedulers import new_schedulers
from trials.training.shrunk import model_of, takes_shrink

Fate = Literal["transfers", "regularizer", "width", "unknown"]

_REGULARIZING = ("weight_decay", "lambd")
_DROPOUTS = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase)

Built = dict[tuple[str, str], Hashable]
"""The owner and the name of a number -> the number."""

_checked: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass(frozen=True, slots=True)
class Transfer:
    """What becomes of one hyperparameter.

    Attributes:
        name: as it is suggested.
        fate: whether it transfers, regularizes, sets a width that shrinks, or has an effect that was not seen.
        changes: what it changes.
    """

    name: str
    fate: Fate
    changes: str

    def __str__(self) -> str:
        """In words."""
        said = {
            "transfers": "transfers",
            "regularizer": "does not transfer: its best value depends on the model's size",
            "width": "does not transfer: it changes an axis that shrinks",
            "unknown": "not known to transfer",
        }
        return f"{self.name}: {said[self.fate]} ({self.changes})"


def what_transfers(study: Study) -> list[Transfer]:
    """Vary each hyperparameter that `study` suggests, and say what becomes of it. Those of one value are left out."""
    with undisturbed():
        first = _Varied({})
        base = _built(study, study.suggest(first))
        narrow = _narrow(study, study.suggest(_Varied({})))
        return [
            _fate(study, name, base, narrow, _built_otherwise(study, name, distribution))
            for name, distribution in first.distributions.items()
            if not distribution.single()
        ]


def refuse_what_does_not(study: Study) -> None:
    """Refuse, once per study, to search what does not transfer.

    Raises:
        ShrinkError: it names the hyperparameter, what it changes, and the way out.
    """
    settings = as_shrink(study.shrink)
    if settings is None or settings.is_target or study in _checked:
        return
    for each in what_transfers(study):
        if each.fate == "regularizer" and not settings.regularizers:
            raise ShrinkError(
                f"hyperparameter '{each.name}' changes {each.changes}: the best weight decay and dropout of a "
                "surrogate are not those of its target; allowed: a fixed value, or trials.Shrink(..., "
                "regularizers=True) to search it nevertheless"
            )
        if each.fate == "width":
            raise ShrinkError(
                f"hyperparameter '{each.name}' changes {each.changes}, which shrinks: its best value would be the "
                "surrogate's; allowed: a fixed width, or keep= for what it changes"
            )
    _checked[study] = True


def _fate(study: Study, name: str, base: Built, narrow: Built, other: Built | str) -> Transfer:
    if isinstance(other, str):
        return Transfer(name, "unknown", other)
    changed = [key for key in {**base, **other} if base.get(key) != other.get(key)]
    if not changed:
        named = " on which batches depend" if name in study.batch_params else ""
        return Transfer(name, "transfers" if named else "unknown", f"nothing that was seen{named}")
    shapes = [key for key in changed if key[1].startswith("axis")]
    if shapes:
        scaled = next((key for key in shapes if key in narrow and narrow[key] != base.get(key)), None)
        owner, axis = scaled or shapes[0]
        return Transfer(name, "width" if scaled else "unknown", f"{axis} of {owner}")
    owner, what = changed[0]
    regularizes = [key for key in changed if key[1] in _REGULARIZING or key[1] == "dropout"]
    if regularizes:
        return Transfer(name, "regularizer", f"{regularizes[0][1]} of {regularizes[0][0]}")
    of_layer = owner.startswith("module")
    return Transfer(name, "unknown" if of_layer else "transfers", f"{what} of {owner}")


def _built_otherwise(study: Study, name: str, distribution: BaseDistribution) -> Built | str:
    """What the study builds with another value of one hyperparameter, or why it builds nothing."""
    try:
        return _built(study, study.suggest(_Varied({name: _another(distribution)})))
    except Exception as error:  # the study is the user's code: anything may come
        return f"with another value: {type(error).__name__}: {error}"


def _built(study: Study, params: dict[str, Any]) -> Built:
    """All numbers of what a study builds for its target."""
    seed_all(0)
    build = cast("Any", study.model)
    model: nn.Module = build(params, 1) if takes_shrink(study) else build(params)
    optimizers = study.optimizer(params, model)
    found = dict(_numbers(model))
    describe = Describer()
    for phase, optimizer in by_phase(optimizers).items():
        owner = "the optimizer" if phase == "forward" else f"the optimizer of {phase}"
        found[owner, "class"] = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            where = owner if len(optimizer.param_groups) == 1 else f"group {index} of {owner}"
            found.update(
                {(where, n): describe(value) for n, value in group.items() if n not in ("params", "initial_lr")}
            )
    for number, scheduler in enumerate(new_schedulers(study, params, optimizers)):
        found.update(_settings(scheduler, number))
    found["clipping", "clip_norm"] = study.clip_norm(params)
    found["clipping", "clip_value"] = study.clip_value(params)
    return found


def _settings(scheduler: LRScheduler | ReduceLROnPlateau, number: int) -> Iterator[tuple[tuple[str, str], Hashable]]:
    yield (f"schedule {number}", "class"), type(scheduler).__name__
    for name, value in scheduler.state_dict().items():
        if name not in ("base_lrs", "_last_lr"):
            yield (f"schedule {number}", name), Describer()(value)


def _numbers(model: nn.Module) -> Iterator[tuple[tuple[str, str], Hashable]]:
    for name, tensor in model.named_parameters():
        for axis, size in enumerate(tensor.shape):
            yield (f"'{name}'", f"axis {axis}"), size
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, (int, float, str)) and name != "training":
                drops = isinstance(module, _DROPOUTS) and name in ("p", "dropout")
                yield (f"module '{path}'", "dropout" if drops else name), value


def _narrow(study: Study, params: dict[str, Any]) -> Built:
    """The shapes of the surrogate."""
    seed_all(0)
    return {} if study.shrink is None else dict(_numbers(model_of(study, params)[0]))


class _Varied(optuna.trial.FixedTrial):  # type: ignore[misc]  # of an untyped package
    """Suggests the lowest value, or the first choice, for whatever is asked for, but for those that are given."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(dict(given))

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        self._distributions.setdefault(name, distribution)
        if name in self._params:
            return self._params[name]
        return distribution.choices[0] if isinstance(distribution, CategoricalDistribution) else distribution.low


def _another(distribution: BaseDistribution) -> Any:
    return distribution.choices[-1] if isinstance(distribution, CategoricalDistribution) else distribution.high
