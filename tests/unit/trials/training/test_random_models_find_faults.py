"""Random models find each old fault of fused training that is put back: some differ in silence from the trial alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.support import old_faults
from tests.support.old_faults import Undo
from tests.support.random_models.models import Spec, specs
from tests.support.random_models.runs import check

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MOST_MODELS = 2000
"""How many random models may be needed to find a fault."""

Concerns = Callable[[Spec], bool]


def with_blocks(*names: str) -> Concerns:
    return lambda spec: not {*names}.isdisjoint(spec.blocks())


def with_stages(*names: str) -> Concerns:
    return lambda spec: any(part in stage.name for stage in spec.stages for part in names)


FAULTS: dict[str, tuple[Undo, Concerns]] = {
    "a context manager vanishes": (
        old_faults.surroundings_vanish,
        with_blocks("no_grad", "no_grad, decorated", "no_grad in a manager", "set_grad_enabled"),
    ),
    "a mode is frozen": (old_faults.modes_frozen, with_blocks("a mode for a while", "a mode that stays")),
    "random streams are shared": (
        old_faults.streams_in_common, with_blocks("Python's random numbers", "numpy's random numbers"),
    ),
    "Python's state is shared": (
        old_faults.state_in_common, with_blocks("a counter", "a list that grows", "an iterator"),
    ),
    "an answer is frozen": (old_faults.questions_frozen, with_blocks("type", "type of a result")),
    "a backward is lost": (
        old_faults.backward_lost, with_blocks("straight-through", "a backward of its own", "a backward for vmap"),
    ),
    "an optimizer's numbers are reset": (
        old_faults.settings_forgotten, lambda spec: spec.optimizer in ("in param groups", "two modes"),
    ),
    "a gradient of zero for none": (
        old_faults.zeros_for_none, with_blocks("a layer that some trials use", "a branch on data"),
    ),
    "lists are not compared": (
        old_faults.lists_not_compared,
        lambda spec: with_blocks("a list of its own")(spec) or with_stages("pool of own sides")(spec),
    ),
    "shared memory is untied": (old_faults.memory_untied, with_blocks("a transposed weight", "a view of a weight")),
    "a norm has another type": (
        old_faults.other_types, lambda spec: spec.autocast and with_stages("norm")(spec),
    ),
}  # fmt: skip
"""What undoes a mend, and which models it concerns: only these are tried, and few are needed."""


@contextmanager
def with_fault(undo: Undo) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        undo(patch)
        yield


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str) -> None:
    undo, concerns = FAULTS[name]
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
        with with_fault(undo):
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
