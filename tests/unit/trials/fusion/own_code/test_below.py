"""A call leaves a `vmap`, and its output enters it again, as through PyTorch's public way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trials.fusion.own_code.below import _Below, below

WAYS = pytest.mark.parametrize("way", [below, _Below.apply])
SIZE = 3


class Recorder:
    """Notes how it is called, and answers by a function of its arguments."""

    def __init__(self, answer: Callable[..., tuple[Any, Any]]) -> None:
        self.answer = answer

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any]) -> tuple[Any, Any]:
        self.depth = torch._C._functorch.get_dynamic_layer_stack_depth()
        self.dims = dims
        return self.answer(*args, **kwargs)


def mapped(one: Callable[..., Any], *values: Any, in_dims: Any = 0) -> Any:
    return torch.vmap(one, in_dims=(0, *[in_dims] * len(values)), randomness="error")(torch.arange(SIZE), *values)


@WAYS
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_axis_of_trials_comes_first(way: Any, axis: int) -> None:
    x = torch.randn(SIZE, 4, 5)
    recorder = Recorder(lambda x_K: (x_K * torch.arange(SIZE).view(-1, 1, 1), 0))
    y_K = mapped(lambda row, x: way(recorder, row, (x,), {}), x.movedim(0, axis), in_dims=axis)
    assert torch.equal(y_K, x * torch.arange(SIZE).view(-1, 1, 1))
    assert (recorder.dims, recorder.depth) == (((0,), {}), 0), "nothing is mapped there"


@WAYS
def test_gradients_pass(way: Any) -> None:
    x = torch.randn(SIZE, 4, dtype=torch.float64, requires_grad=True)
    recorder = Recorder(lambda x_K: (x_K**2, 0))
    mapped(lambda row, x: way(recorder, row, (x.sin(),), {}).exp(), x).sum().backward()
    own = x.detach().requires_grad_()
    (own.sin() ** 2).exp().sum().backward()
    torch.testing.assert_close(x.grad, own.grad, rtol=0, atol=0)


@WAYS
def test_trees_in_and_out(way: Any) -> None:
    """Arguments that differ between trials, that do not, and that are no tensors; outputs likewise."""
    shared, plain = torch.randn(4), "sum"
    x = torch.randn(SIZE, 4)
    recorder = Recorder(
        lambda pair, how, *, by: (
            {"all": [pair[0] + pair[1], by], "how": how, "none": None},
            {"all": [0, None], "how": None, "none": None},
        )
    )
    kept: list[Any] = []

    def one(row: Tensor, x: Tensor) -> Tensor:
        kept[:] = [way(recorder, row, ([x, shared], plain), {"by": shared})]
        assert kept[0]["all"][1] is shared, "an input that is returned stays the same object"
        return kept[0]["all"][0]

    assert torch.equal(mapped(one, x), x + shared)
    assert (kept[0]["how"], kept[0]["none"]) == ("sum", None)
    assert recorder.dims == (([0, None], None), {"by": None})


@WAYS
def test_an_input_that_is_returned_stays_the_same_object(way: Any) -> None:
    recorder = Recorder(lambda x_K: (x_K, 0))

    def one(row: Tensor, x: Tensor) -> Tensor:
        assert way(recorder, row, (x,), {}) is x
        return x

    mapped(one, torch.randn(SIZE, 4))


@WAYS
def test_what_no_trial_owns_is_passed_on(way: Any) -> None:
    """A constant in the code of a model, and an output that is the same for all."""
    constant = torch.randn(4)
    recorder = Recorder(lambda x: (x * 2, None))
    y_K = mapped(lambda row, x: way(recorder, row, (constant,), {}) + x, torch.zeros(SIZE, 4))
    assert torch.equal(y_K, (constant * 2).expand(SIZE, 4))
    assert recorder.dims == ((None,), {})


@WAYS
def test_within_a_map_of_the_code_itself(way: Any) -> None:
    """The innermost `vmap` is not ours: only what it maps is told, and the trials' axis stays hidden."""
    recorder = Recorder(lambda x_B: (x_B + 1, 0))
    seen: list[int] = []

    def inner(row: Tensor, x: Tensor) -> Any:
        out = torch.vmap(lambda part: way(recorder, row, (part,), {}))(x)
        seen.append(recorder.depth)
        return out

    x = torch.randn(SIZE, 2, 4)
    assert torch.equal(mapped(inner, x), x + 1)
    assert seen == [1]


@WAYS
def test_an_error_leaves_the_map_as_it_was(way: Any) -> None:
    def fails(x_K: Tensor) -> tuple[Any, Any]:
        raise ValueError("no")

    def one(row: Tensor, x: Tensor) -> Tensor:
        depth = torch._C._functorch.get_dynamic_layer_stack_depth()
        with pytest.raises(ValueError, match="no"):
            way(Recorder(fails), row, (x,), {})
        assert torch._C._functorch.get_dynamic_layer_stack_depth() == depth
        return x + row

    assert torch.equal(mapped(one, torch.zeros(SIZE)), torch.arange(SIZE).float())
