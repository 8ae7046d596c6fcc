"""What a trace would freeze: random streams, questions about values, and Python's state. It is noticed, or refused."""

import collections
import copy
import functools
import itertools
import os
import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor

from tests.support.fused_and_solo import ToyStudy
from tests.support.slow_cases import crossed
from tests.support.two_layers import Forward, TwoLayers, assert_fused_is_alone, batches, plain
from trials import FuseError
from trials.fusion.graph.trace import trace
from trials.fusion.scores.scalar import Scalar

RULE, VMAP = "rule", "vmap"


def study_of(forward: Forward, extra: Callable[[TwoLayers], None] | None = None) -> ToyStudy:
    return ToyStudy(lambda n: TwoLayers(forward, extra).double(), "sgd", batches())


@functools.singledispatch
def dispatched(x: object) -> object:
    return x


@dispatched.register
def _(x: Tensor) -> Tensor:
    return x * 3


def matched(m: TwoLayers, x: Tensor) -> Tensor:
    match m.a(x):
        case Tensor() as y:
            return m.b(y)
        case y:
            return y


def tried(m: TwoLayers, x: Tensor) -> Tensor:
    try:
        return m.b(m.a(x).missing)
    except AttributeError:
        return m.b(m.a(x) * 2)


def same(m: TwoLayers, x: Tensor) -> Tensor:
    y = m.a(x)
    z = y.contiguous()
    return m.b(z) if z is y else y


def either(condition: Callable[[Tensor], bool]) -> Forward:
    return lambda m, x: m.b(m.a(x)) if condition(x) else m.a(x)


QUESTIONS: dict[str, Forward] = {
    "isinstance": either(lambda x: isinstance(x, Tensor)),
    "is_tensor": either(torch.is_tensor),
    "type": either(lambda x: type(x) is Tensor),
    "type of a result": either(lambda x: type(x + 1) is Tensor),
    "type of an attribute": lambda m, x: m.b(m.a(x)) if type(m.a.in_features + x).__name__ == "Tensor" else m.a(x),
    "is a parameter": lambda m, x: m.b(m.a(x)) if isinstance(m.a.weight, torch.nn.Parameter) else m.a(x),
    "is no parameter": either(lambda x: not isinstance(x * 2, torch.nn.Parameter)),
    "a result that is": lambda m, x: m.b(m.a(x)) if x is x.contiguous() else m.a(x),
    "callable result": either(lambda x: not callable(x + 1)),
    "name of the type": either(lambda x: type(x).__name__ == "Tensor"),
    "class": either(lambda x: x.__class__ is Tensor),
    "hasattr": either(lambda x: not hasattr(x, "missing")),
    "callable": either(lambda x: not callable(x)),
    "is": same,
    "match": matched,
    "try": tried,
    "copy": lambda m, x: m.b(copy.copy(m.a(x))),
    "singledispatch": lambda m, x: m.b(dispatched(m.a(x))),
    "is a shape": either(lambda x: isinstance(x.shape, tuple)),
    "requires_grad": lambda m, x: m.b(m.a(x)) if m.a(x).requires_grad else m.a(x),
    "is_grad_enabled": lambda m, x: m.b(m.a(x)) * (2 if torch.is_grad_enabled() else 3),
    "is_autocast_enabled": lambda m, x: m.b(m.a(x)) * (2 if torch.is_autocast_enabled("cpu") else 3),
}


@pytest.mark.parametrize(("name", "size"), crossed(QUESTIONS, [1, 2], 2))
def test_question(name: str, size: int) -> None:
    assert not assert_fused_is_alone(study_of(QUESTIONS[name]), size).startswith(RULE)


@pytest.mark.parametrize("name", ["isinstance", "type", "type of a layer"])
def test_question_about_what_is_known_is_traced(name: str) -> None:
    asks: dict[str, Callable[[TwoLayers], bool]] = {
        "type of a layer": lambda m: type(m.a) is torch.nn.Linear,
        "isinstance": lambda m: isinstance(m.a, torch.nn.Linear),
        "type": lambda m: type(m) is TwoLayers,
    }
    forward: Forward = lambda m, x: m.b(m.a(x)) if asks[name](m) else x  # noqa: E731 - short, and typed
    assert assert_fused_is_alone(study_of(forward), 2).startswith(RULE)


SCALE, TABLE, VALUES = 1.0, {"scale": 1.0}, torch.ones(4, dtype=torch.float64)


class Settings:
    scale = 1.0


SETTINGS = Settings()


def helper(x: Tensor) -> Tensor:
    return x * TABLE["scale"]


class WithClassAttribute(TwoLayers):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return plain(self, x) * self.scale


def set_global(value: float) -> None:
    global SCALE
    SCALE = value


def around() -> tuple[Forward, Callable[[float], None]]:
    scale = 1.0

    def set_it(value: float) -> None:
        nonlocal scale
        scale = value

    return lambda m, x: plain(m, x) * scale, set_it


AROUND = around()
CHANGING: dict[str, tuple[Forward, Callable[[float], object], str]] = {
    "a global number": (lambda m, x: plain(m, x) * SCALE, set_global, "global variable 'SCALE'"),
    "a global dict": (
        lambda m, x: plain(m, x) * TABLE["scale"], lambda v: TABLE.update(scale=v), "global variable 'TABLE'",
    ),
    "a global tensor": (lambda m, x: plain(m, x) * VALUES, VALUES.fill_, "global variable 'VALUES'"),
    "in a helper": (lambda m, x: helper(plain(m, x)), lambda v: TABLE.update(scale=v), "global variable 'TABLE'"),
    "of an object": (
        lambda m, x: plain(m, x) * SETTINGS.scale, lambda v: setattr(SETTINGS, "scale", v), "'scale' of 'SETTINGS'",
    ),
    "of a class": (
        lambda m, x: plain(m, x) * Settings.scale, lambda v: setattr(Settings, "scale", v), "'scale' of 'Settings'",
    ),
    "of a closure": (*AROUND, "variable 'scale' around"),
    "of the environment": (
        lambda m, x: plain(m, x) * float(os.environ.get("TESTS_SCALE", "1")),
        lambda v: os.environ.update(TESTS_SCALE=str(v)),
        "asks __getitem__",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "size"), crossed(CHANGING, [1, 2], 2))
def test_state_that_the_study_changes(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, change, why = CHANGING[name]
    monkeypatch.setenv("TESTS_SCALE", "1")
    try:
        way = assert_fused_is_alone(study_of(forward), size, lambda step: change(1.0 + step))
    finally:
        change(1.0)
    assert why in way


def test_attribute_of_the_models_class_that_the_study_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    study = ToyStudy(lambda n: WithClassAttribute(plain).double(), "sgd", batches())
    way = assert_fused_is_alone(study, 2, lambda step: monkeypatch.setattr(WithClassAttribute, "scale", 1.0 + step))
    assert "attribute 'scale' of class WithClassAttribute has changed" in way


def test_trials_that_differ_in_what_their_own_code_may_read_do_not_leave_their_graph_together() -> None:
    def make(n: int) -> TwoLayers:
        def hold(m: TwoLayers) -> None:
            m.held = n

        return TwoLayers(CHANGING["a global number"][0], hold).double()

    assert assert_fused_is_alone(ToyStudy(make, "sgd", batches()), 2).startswith(RULE)
    try:
        with pytest.raises(FuseError, match=r"'SCALE' has changed.*differ in attributes.*allowed: equal attributes"):
            assert_fused_is_alone(ToyStudy(make, "sgd", batches()), 2, lambda step: set_global(1.0 + step))
    finally:
        set_global(1.0)


def hold(make: Callable[[], object]) -> Callable[[TwoLayers], None]:
    def extra(m: TwoLayers) -> None:
        m.held = make()

    return extra


def counted(m: TwoLayers, x: Tensor) -> Tensor:
    m.held[1000] += 1
    return plain(m, x) * float(m.held[1000])


def queued(m: TwoLayers, x: Tensor) -> Tensor:
    m.held.append(1.0)
    return plain(m, x) * len(m.held)


def generated(m: TwoLayers, x: Tensor) -> Tensor:
    return plain(m, x) + torch.randn(4, generator=m.held)


REFUSED: dict[str, tuple[Forward, Callable[[], object], str]] = {
    "Python's": (lambda m, x: plain(m, x) * random.random(), int, "draws from Python's random.*allowed: PyTorch"),
    "NumPy's": (lambda m, x: plain(m, x) * float(numpy.random.rand()), int, "draws from numpy.random.*allowed"),
    "its own": (lambda m, x: plain(m, x) * m.held.random(), lambda: random.Random(3), "changes the attribute 'held'"),
    "its own of NumPy": (
        lambda m, x: plain(m, x) * m.held.random(), lambda: numpy.random.default_rng(3), "changes the attribute 'held'",
    ),
    "its own of PyTorch": (generated, lambda: torch.Generator().manual_seed(3), "changes the attribute 'held'"),
    "a counter": (lambda m, x: plain(m, x) * next(m.held), itertools.count, "changes the attribute 'held'"),
    "an iterator": (
        lambda m, x: plain(m, x) * next(m.held),
        lambda: (i for i in range(9)),
        "cannot be copied|changes|cannot be compared",
    ),
    "a queue": (queued, collections.deque, "changes the attribute 'held'"),
    "a large array": (counted, lambda: numpy.zeros(2000), "changes the attribute 'held'"),
}  # fmt: skip


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_streams_and_state_of_one_trial_are_refused(name: str, looks: bool) -> None:
    forward, make, message = REFUSED[name]
    looking: Forward = lambda m, x: forward(m, x) if len(x) > 1 else x  # noqa: E731 - short, and typed
    with pytest.raises(FuseError, match=message):
        assert_fused_is_alone(study_of(looking if looks else forward, hold(make)), 2)


def test_what_draws_from_a_gpu_without_naming_its_input_has_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without one: the state of its random numbers is a number here, which each draw moves."""
    state = torch.zeros(1)

    def drawn() -> float:  # as torch.rand((), device="cuda")
        state.add_(1)
        return 0.5

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state.clone()])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: state.copy_(states[0]))
    with pytest.raises(FuseError, match="draws random numbers that do not depend on its input"):
        trace(TwoLayers(lambda m, x: plain(m, x) * drawn()), training=True)
    assert not Scalar("Study.loss", lambda y, t: y.mean() * drawn())._steps
    assert state.item() == 0, "put back"


def test_function_that_refers_to_its_module() -> None:
    def extra(m: TwoLayers) -> None:
        m.held = lambda x: m.a(x) if len(x) > 1 else x

    assert assert_fused_is_alone(study_of(lambda m, x: m.b(m.held(x)), extra), 2).startswith(VMAP)
