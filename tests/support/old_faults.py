"""Old faults of fused training, in which trials differed in silence: each function undoes what mends one of them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trials.fusion.compared import describe, structure
from trials.fusion.compared.structure import Unchanged
from trials.fusion.graph import trace, tracer
from trials.fusion.layers import norm
from trials.fusion.own_code import mapped
from trials.fusion.own_code.reached import Reached
from trials.fusion.scores import scalar
from trials.optim.originals import Originals

Undo = Callable[[pytest.MonkeyPatch], object]


def nothing(*_: Any, **__: Any) -> Any:
    """Instead of a check."""


def surroundings_vanish(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tracer, "changed", lambda before, after: "")


def modes_frozen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tracer.Tracer, "check_flags", nothing)


def streams_in_common(patch: pytest.MonkeyPatch) -> None:
    for module in (trace, mapped, scalar):
        patch.setattr(module, "refuse_foreign", nothing)


def state_in_common(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Unchanged, "check", nothing)
    patch.setattr(trace, "_put_back", lambda tables: [])


def questions_frozen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trace, "refuse_questions", nothing)


class Context:
    """What a backward would look at."""

    needs_input_grad = (True,) * 9

    def save_for_backward(self, *_: Any) -> None:
        """For a backward that is lost."""


def backward_lost(patch: pytest.MonkeyPatch) -> None:
    def inside(cls: Any, *args: Any) -> Any:
        return (
            cls.forward(*args)
            if hasattr(cls, "generate_vmap_rule") and cls.generate_vmap_rule
            else cls.forward(Context(), *args)
        )

    patch.setattr(tracer, "_refused_apply", inside)


def settings_forgotten(patch: pytest.MonkeyPatch) -> None:
    step = Originals.step

    def forget(optimizer: Originals, *args: Any) -> None:
        groups = [group for own in optimizer.groups_K for group in own]
        before = [{name: copy.deepcopy(value) for name, value in g.items() if name != "params"} for g in groups]
        step(optimizer, *args)
        for group, saved in zip(groups, before, strict=True):
            group.update(saved)

    patch.setattr(Originals, "step", forget)


def zeros_for_none(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reached, "absent", lambda *_: {})


def lists_not_compared(patch: pytest.MonkeyPatch) -> None:
    call = describe.Describer.__call__
    patch.setattr(
        describe.Describer, "__call__", lambda self, value: "a list" if type(value) is list else call(self, value)
    )


def memory_untied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(structure, "refuse_overlaps", nothing)


def other_types(patch: pytest.MonkeyPatch) -> None:
    def widest(function: Any, x: Tensor) -> torch.dtype:
        return torch.promote_types(x.dtype, torch.float32)

    patch.setattr(norm, "type_of", widest)
