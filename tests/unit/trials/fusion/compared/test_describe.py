"""Settings are compared by value and type, however deep; what shows no value is equal to itself alone."""

import collections
import dataclasses
import enum
import functools
import random
import re
import threading
import types
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import ToyStudy, assert_fused_is_solo, members
from trials import FuseError, TrialGroup
from trials.fusion.compared.describe import Describer
from trials.gate.base import OpenGate


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Name(enum.StrEnum):
    X = "x"


@dataclasses.dataclass(slots=True)
class Slotted:
    n: int


@dataclasses.dataclass
class Plain:
    n: Any


class Point(NamedTuple):
    x: int


class Bag(list[int]):
    """A list with an attribute."""

    def __init__(self, n: int) -> None:
        super().__init__([1])
        self.n = n


class Hiding:
    """Looks the same in print, and when it is pickled."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __repr__(self) -> str:
        return "Hiding()"

    def __getstate__(self) -> dict[str, int]:
        return {}


def closing(n: Any) -> Callable[[], Any]:
    return lambda: n


def renamed(n: int) -> Callable[[], int]:
    @functools.wraps(closing)
    def call(*_: Any) -> int:
        return n

    return call


def default(n: int) -> Callable[..., Any]:
    def call(x: Any, scale: int = n) -> Any:
        return x * scale

    return call


def marked(n: int) -> Callable[..., Any]:
    def call() -> None:
        pass

    vars(call)["n"] = n
    return call


def made_class(n: int) -> type:
    return type("Made", (), {"n": n})


def long(n: int) -> Any:
    values = torch.zeros(5000)
    values[2500] = n
    return values


def random_with(n: int) -> random.Random:
    return random.Random(n)


PAIRS: dict[str, tuple[Any, Any]] = {
    "order in a list": ([1, 2], [2, 1]),
    "list and tuple": ([1, 2], (1, 2)),
    "1 and 1.0": (1, 1.0),
    "1 and True": (1, True),
    "1 and 1.0, deep": ({"a": [(1,)]}, {"a": [(1.0,)]}),
    "signs of zero": (0.0, -0.0),
    "not a number": (float("nan"), 1.0),
    "complex": (1 + 0j, 1.0),
    "text and bytes": ("a", b"a"),
    "sets": ({1, 2}, {1, 3}),
    "dict values": ({"a": 1}, {"a": 2}),
    "dict order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "ordered dict": (collections.OrderedDict(a=1), {"a": 1}),
    "deques": (collections.deque([1]), collections.deque([2])),
    "namedtuples": (Point(1), Point(2)),
    "namedtuple and tuple": (Point(1), (1,)),
    "namespaces": (types.SimpleNamespace(a=[1]), types.SimpleNamespace(a=[2])),
    "list with an attribute": (Bag(1), Bag(2)),
    "enums": (Colour.RED, Colour.BLUE),
    "enum and its text": (Name.X, "x"),
    "dataclasses": (Plain([1]), Plain([2])),
    "dataclasses with slots": (Slotted(1), Slotted(2)),
    "an object that hides it": (Hiding(1), Hiding(2)),
    "enclosed": (closing([1]), closing([2])),
    "enclosed types": (closing(1), closing(1.0)),
    "under another's name": (renamed(1), renamed(2)),
    "defaults": (default(1), default(2)),
    "attributes of functions": (marked(1), marked(2)),
    "code": (lambda x: x + 1, lambda x: x + 2),
    "code, other type": (lambda x: x + 1, lambda x: x + 1.0),
    "partials": (functools.partial(max, 1), functools.partial(max, 2)),
    "bound to a list": ([1].index, [2].index),
    "bound to an object": (Plain(1).__eq__, Plain(2).__eq__),
    "classes": (made_class(1), made_class(2)),
    "sizes": (torch.Size([1, 2]), torch.Size([2, 1])),
    "size and tuple": (torch.Size([1, 2]), (1, 2)),
    "slices": (slice(1, 2), slice(1, 3)),
    "ranges": (range(2), range(3)),
    "decimals": (Decimal("1.0"), Decimal("1.00")),
    "patterns": (re.compile("a"), re.compile("b")),
    "arrays": (np.zeros(3), np.ones(3)),
    "long arrays": (np.arange(5000) == 2500, np.arange(5000) == 2501),
    "types of arrays": (np.zeros(3, np.float32), np.zeros(3, np.float64)),
    "arrays of objects": (np.array([[1], "a"], dtype=object), np.array([[2], "a"], dtype=object)),
    "numpy's numbers": (np.float64(1.0), 1.0),
    "numpy's small numbers": (np.float32(0.1), np.float32(0.2)),
    "long tensors": ([long(1)], [long(2)]),
    "types of tensors": ([torch.zeros(2)], [torch.zeros(2, dtype=torch.int32)]),
    "complex tensors": ([torch.zeros(2, dtype=torch.complex64)], [torch.ones(2, dtype=torch.complex64).conj()]),
    "sparse tensors": ([torch.eye(2).to_sparse()], [torch.eye(2).to_sparse() * 2]),
    "random streams of Python": (random_with(1), random_with(2)),
    "random streams of numpy": (np.random.default_rng(1), np.random.default_rng(2)),
    "random streams of torch": (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    "modules in a list": ([nn.Dropout(0.1)], [nn.Dropout(0.2)]),
    "weights in a list": ([nn.Linear(2, 2)], [nn.Linear(2, 2)]),
    "locks": (threading.Lock(), threading.Lock()),
    "generators": ((i for i in [1]), (i for i in [1])),
}

EQUAL: dict[str, Callable[[], Any]] = {
    "numbers": lambda: [1, 2.5, True, None, "a", b"b", float("nan"), 1j],
    "containers": lambda: {"a": [1, (2, {3})], "b": collections.deque([4])},
    "objects": lambda: [Plain([1]), Slotted(2), Bag(3), Hiding(4), Colour.RED, types.SimpleNamespace(a=1)],
    "functions": lambda: [closing([1]), default(2), marked(3), renamed(4), functools.partial(max, 1), [1].index, max],
    "classes": lambda: [made_class(1), nn.Linear, Plain, int],
    "arrays": lambda: [np.arange(5000), np.float32(0.1), np.array([[1], None], dtype=object)],
    "tensors": lambda: [torch.arange(5000), torch.zeros(0), torch.zeros((), dtype=torch.bfloat16), torch.eye(2).bool()],
    "streams": lambda: [random_with(1), np.random.default_rng(1), torch.Generator().manual_seed(1)],
    "others": lambda: [
        re.compile("a"),
        slice(1, 2),
        range(3),
        Decimal(1),
        torch.Size([1]),
        ...,
        torch.relu,
        torch.float32,
    ],
    "modules": lambda: [nn.ReLU(), nn.Dropout(0.1), torch.nn.functional.relu, torch.Tensor.relu],
}


@pytest.mark.parametrize("name", PAIRS)
def test_different_values_are_described_differently(name: str) -> None:
    one, other = PAIRS[name]
    assert Describer()(one) != Describer()(other)
    assert Describer()([one]) != Describer()([other])
    assert Describer()(one) == Describer()(one)
    hash(Describer()(one))


@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_are_described_equally(name: str) -> None:
    one, other = EQUAL[name](), EQUAL[name]()
    assert Describer()(one) == Describer()(other)
    assert repr(Describer()(one)) == repr(Describer()(other))


def test_what_contains_itself() -> None:
    def circle() -> list[Any]:
        made: list[Any] = [1]
        made.append(made)
        return made

    assert Describer()(circle()) == Describer()(circle())


class Reads(nn.Module):
    """Looks at a setting in a forward that cannot be traced."""

    def __init__(self, setting: Any) -> None:
        super().__init__()
        self.layer, self.setting = nn.Linear(4, 4), setting

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * float(str(self.setting) != "") if len(x) > 1 else x


def pooled(*shape: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d([*shape]), nn.Flatten(), nn.Linear(2, 2))  # type: ignore[arg-type]


DIFFERENT: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "a list in a layer with a rule": (lambda n: pooled(1 + n, 2 - n), "module '0': output_size"),
    "a list that code reads": (lambda n: Reads([1, n]), "module '': setting"),
    "a number of another type": (lambda n: Reads((1, 1.0)[n]), r"module '': setting is 1\.0, there 1"),
    "a lock of its own": (lambda n: Reads(threading.Lock()), "module '': setting is a lock that cannot be compared"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_trials_with_other_settings_are_not_fused(name: str) -> None:
    make, message = DIFFERENT[name]
    study = ToyStudy(make)
    with pytest.raises(FuseError, match=f"trial 1 cannot join trial 0: {message}"):
        TrialGroup(study, members(study, range(2)), OpenGate())


def test_trials_with_equal_settings_are() -> None:
    assert_fused_is_solo(lambda n: pooled(1, 2), [torch.randn(3, 1, 5, 5)])
    assert_fused_is_solo(lambda n: Reads([1, {"a": np.arange(3)}]), [torch.randn(3, 4)])
