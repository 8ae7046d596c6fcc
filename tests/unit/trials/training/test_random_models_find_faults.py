"""Random models find each old fault of fused training that is put back: some differ in silence from the trial alone."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

from tests.support.random_models.models import Spec, specs
from tests.support.random_models.runs import check
from trials.fusion.compared import describe
from trials.fusion.compared.structure import Unchanged
from trials.fusion.graph import trace, tracer
from trials.fusion.layers import norm
from trials.fusion.own_code import mapped
from trials.fusion.own_code.reached import Reached
from trials.fusion.scores import scalar
from trials.optim.originals import Originals

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MOST_MODELS = 2000
"""How many random models may be needed to find a fault."""

Patch = Callable[[pytest.MonkeyPatch], object]
Concerns = Callable[[Spec], bool]


def nothing(*_: Any, **__: Any) -> Any:
    """Instead of a check."""


def without_surroundings(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tracer, "changed", lambda before, after: "")


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


def lists_not_compared(patch: pytest.MonkeyPatch) -> None:
    call = describe.Describer.__call__
    patch.setattr(
        describe.Describer, "__call__", lambda self, value: "a list" if type(value) is list else call(self, value)
    )


def other_types(patch: pytest.MonkeyPatch) -> None:
    def widest(function: Any, x: Tensor) -> torch.dtype:
        return torch.promote_types(x.dtype, torch.float32)

    patch.setattr(norm, "type_of", widest)


def with_blocks(*names: str) -> Concerns:
    return lambda spec: not {*names}.isdisjoint(spec.blocks())


def with_stages(*names: str) -> Concerns:
    return lambda spec: any(part in stage.name for stage in spec.stages for part in names)


FAULTS: dict[str, tuple[Patch, Concerns]] = {
    "a context manager vanishes": (
        without_surroundings, with_blocks("no_grad", "no_grad, decorated", "no_grad in a manager", "set_grad_enabled"),
    ),
    "random streams are shared": (
        streams_in_common, with_blocks("Python's random numbers", "numpy's random numbers"),
    ),
    "Python's state is shared": (state_in_common, with_blocks("a counter", "a list that grows", "an iterator")),
    "an answer is frozen": (questions_frozen, with_blocks("type", "type of a result")),
    "a backward is lost": (
        backward_lost, with_blocks("straight-through", "a backward of its own", "a backward for vmap"),
    ),
    "an optimizer's numbers are reset": (
        settings_forgotten, lambda spec: spec.optimizer in ("in param groups", "two modes"),
    ),
    "a gradient of zero for none": (
        lambda patch: patch.setattr(Reached, "absent", lambda *_: {}),
        with_blocks("a layer that some trials use", "a branch on data"),
    ),
    "lists are not compared": (
        lists_not_compared,
        lambda spec: with_blocks("a list of its own")(spec) or with_stages("pool of own sides")(spec),
    ),
    "a norm has another type": (other_types, lambda spec: spec.autocast and with_stages("norm")(spec)),
}  # fmt: skip
"""What puts a fault back, and which models it concerns: only these are tried, and few are needed."""


@contextmanager
def with_fault(put_back: Patch) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        put_back(patch)
        yield


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str) -> None:
    put_back, concerns = FAULTS[name]
    differing: list[tuple[Spec, str]] = []

    @settings(
        max_examples=MOST_MODELS,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(specs())
    def one(spec: Spec) -> None:
        if differing or not concerns(spec):
            return
        with with_fault(put_back):
            try:
                check(spec)
            except AssertionError as error:
                differing.append((spec, str(error)))
            except Exception:  # loud
                return

    one()
    assert differing, f"no model of {MOST_MODELS} differs"
    spec, _ = differing[0]
    assert check(spec).way, "without the fault it is equal or refused"
