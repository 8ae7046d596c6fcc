"""Questions about values that only a run can answer: a graph, or one `vmap`, would freeze another answer."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, _assert, nn
from torch.nn import functional as F

from tests.support.fused_and_solo import ToyStudy
from tests.support.slow_cases import crossed
from tests.support.two_layers import Forward, TwoLayers, assert_fused_is_alone, batches
from trials import FuseError

DOUBLED = {torch.float64: 2.0}
SIZES = {4: 2.0}


def times(ask: Callable[[Tensor], Any]) -> Forward:
    """A forward that multiplies by 2 or 3, as `ask` says."""
    return lambda m, x: m.b((y := m.a(x)) * (2.0 if ask(y) else 3.0))


def caught(read: Callable[[Tensor], Any]) -> Forward:
    """A forward that has another way where `read` fails."""

    def forward(m: TwoLayers, x: Tensor) -> Tensor:
        y = m.a(x)
        try:
            return m.b(y * read(y))
        except Exception:
            return m.b(y)

    return forward


def suppressed(m: TwoLayers, x: Tensor) -> Tensor:
    y = m.a(x)
    with contextlib.suppress(Exception):
        if y.detach().square().mean() > 0:
            y = y * 2
    return m.b(y)


FORWARDS: dict[str, Forward] = {
    "identity of an attribute": times(lambda y: y.dtype is torch.float64),
    "identity of two attributes": times(lambda y: y.dtype is y.exp().dtype),
    "identity of what an attribute was": times(lambda y: (lambda kind: kind is torch.float64)(y.dtype)),
    "in a set": times(lambda y: y.dtype in {torch.float64, torch.float32}),
    "in a table": lambda m, x: m.b((y := m.a(x)) * DOUBLED.get(y.dtype, 1.0)),
    "size in a table": lambda m, x: m.b((y := m.a(x)) * SIZES.get(y.size(1), 1.0)),
    "text": times(lambda y: "64" in str(y.dtype)),
    "formatted": times(lambda y: f"{y.shape}" == "torch.Size([5, 4])"),
    "formatted in a check": times(lambda y: torch._assert(f"{y.ndim}" == "2", f"{y.ndim}") is None),
    "formatted as of old": times(lambda y: "%s" % y.ndim == "2"),  # noqa: UP031
    "named by a size": lambda m, x: m.b((y := m.a(x)) * getattr(m, f"times{y.size(1)}", 1.0)),
    "a gradient's function": times(lambda y: y.grad_fn is None),
    "a gradient": times(lambda y: y.grad is None),
    "what it is a view of": times(lambda y: y.view(-1, 4)._base is not None),
    "a length, or else": caught(len),
    "a class, or else": caught(lambda y: 2.0 if isinstance(y, Tensor) else 3.0),
    "an attribute, or else": caught(lambda y: y.times if hasattr(y, "times") else 2.0),
    "a number, or else": caught(lambda y: float(y.detach().mean())),
    "a branch, or else": caught(lambda y: 2.0 if y.detach().mean() > -100 else 3.0),
    "its parts, or else": caught(lambda y: sum(part.detach().norm() for part in y)),
    "an array, or else": caught(lambda y: float(np.asarray(y.detach()).mean())),
    "a branch, unless that fails": suppressed,
}


@pytest.mark.parametrize(("name", "size"), crossed(FORWARDS, [1, 3], 3))
def test_forward(name: str, size: int) -> None:
    def with_number(m: TwoLayers) -> None:
        m.times4 = 2.0  # type: ignore[assignment]

    forward = FORWARDS[name]
    assert_fused_is_alone(ToyStudy(lambda n: TwoLayers(forward, with_number).double(), "sgd", batches()), size)


def checked(m: TwoLayers, x: Tensor) -> Tensor:
    size = m.a(x).shape[1]
    torch._assert(
        size == 4,
        f"4 features are needed, not {size}",
    )
    torch._assert(size > 0, f"no feature: {size}")
    return m.b(m.a(x))


def checked_by_its_name(m: TwoLayers, x: Tensor) -> Tensor:
    _assert(x.ndim == 2, f"expected 2D input (got {x.ndim}D input)")
    _assert(
        x.shape[1] % m.a.in_features == 0,
        f"Input ({x.shape[0]!r}*{x.shape[1]:>3}) doesn't match the layer ({m.a.in_features}, {x.dtype!s})",
    )
    return m.b(m.a(x))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("forward", [checked, checked_by_its_name])
def test_the_message_of_a_check_is_no_question(forward: Forward, size: int) -> None:
    study = ToyStudy(lambda n: TwoLayers(forward).double(), "sgd", batches())
    assert assert_fused_is_alone(study, size) == "rule FusedLinear"


@pytest.mark.parametrize("size", [1, 3])
def test_an_output_that_is_not_given_is_no_change_in_place(size: int) -> None:
    study = ToyStudy(lambda n: TwoLayers(lambda m, x: m.b(F.normalize(m.a(x)))).double(), "sgd", batches())
    assert assert_fused_is_alone(study, size) == "rule FusedLinear"


def beside_a_message(m: TwoLayers, x: Tensor) -> Tensor:
    y = m.a(x)
    _assert(y.ndim == 2, f"{y.ndim}D"); scale = 2.0 if f"{y.ndim}" == "2" else 3.0  # fmt: skip  # noqa: E702
    return m.b(y * scale)


def read_on_its_way(m: TwoLayers, x: Tensor) -> Tensor:
    y, met = m.a(x), []
    _assert(y.ndim == 2, f"{met.append(f'{y.ndim}')}")
    return m.b(y * (2.0 if met == ["2"] else 3.0))


def to_another_function(m: TwoLayers, x: Tensor) -> Tensor:
    def _assert(condition: object, message: str) -> float:
        return 2.0 if message == "2" else 3.0

    y = m.a(x)
    return m.b(y * _assert(y.ndim == 2, f"{y.ndim}"))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("forward", [beside_a_message, read_on_its_way, to_another_function])
def test_other_text_is_a_question(forward: Forward, size: int) -> None:
    study = ToyStudy(lambda n: TwoLayers(forward).double(), "sgd", batches())
    assert "makes text of a value" in assert_fused_is_alone(study, size)


class Attends(nn.Module):
    """Asks whether an attention has returned its weights."""

    def __init__(self, *options: Any, **more: Any) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)
        self.options, self.more = options, more

    def forward(self, x_BTE: Tensor) -> Tensor:
        y_BTE, weights = self.attention(x_BTE, x_BTE, x_BTE, *self.options, **self.more)
        y: Tensor = self.head(y_BTE if weights is None else y_BTE * 2 + weights.mean())
        return y


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "make",
    [lambda n: Attends(need_weights=False), lambda n: Attends(None, False), lambda n: Attends()],
    ids=["by name", "by position", "with weights"],
)
def test_weights_that_an_attention_does_not_return(make: Callable[[int], nn.Module], size: int) -> None:
    data = [(torch.randn(5, 3, 4, dtype=torch.float64), torch.ones(5)) for _ in range(2)]
    way = assert_fused_is_alone(ToyStudy(lambda n: make(n).double(), "sgd", data), size)
    assert way == "rule FusedMultiheadAttention"


@pytest.mark.parametrize("size", [1, 2])
def test_freezing_of_one_parameter_is_refused_in_words(size: int) -> None:
    def freezes(m: TwoLayers, x: Tensor) -> Tensor:
        m.a.weight.requires_grad_(False)
        return m.b(m.a(x))

    with pytest.raises(FuseError, match=r"sets requires_grad in .*allowed"):
        assert_fused_is_alone(ToyStudy(lambda n: TwoLayers(freezes).double(), "sgd", batches()), size)


class Shy:
    """Must not be read but by those who own it, as a module that is half imported."""

    @property
    def state(self) -> object:
        raise ImportError("read by a stranger")


def asks_a_shy_object(m: TwoLayers, x: Tensor) -> Tensor:
    def is_known(shy: Any, again: Any) -> bool:
        return shy is again or shy.state is m

    shy = Shy()
    return m.b(m.a(x) * (2.0 if is_known(shy, shy) else 3.0))


def test_no_property_of_an_object_is_read_to_answer_a_question() -> None:
    study = ToyStudy(lambda n: TwoLayers(asks_a_shy_object).double(), "sgd", batches())
    assert assert_fused_is_alone(study, 3) == "rule FusedLinear"
