"""A loss or score of K models at once is the one of each, whether it is traced or not."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.fused_and_solo import close
from tests.support.random_models.surroundings import Straight
from trials import FuseError
from trials.fusion.own_code.streams import drawing_from
from trials.fusion.scores.scalar import Scalar

RATE = [2.0]


class Own:
    """A study's losses as methods."""

    rate = 1.0

    def cross_entropy(self, y: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(y, t)

    def reads_itself(self, y: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(y, t) * self.rate


def helper(y: Tensor) -> Tensor:
    return y.square()


def with_global(y: Tensor, t: Tensor) -> Tensor:
    return y.mean() * RATE[0]


def with_helper(y: Tensor, t: Tensor) -> Tensor:
    return helper(y).mean()


def with_length(y: Tensor, t: Tensor) -> Tensor:
    return y.sum() / len(t)


def in_place(y: Tensor, t: Tensor) -> Tensor:
    return y.clone().mul_(2).mean()


CLASSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "cross entropy": (lambda y, t: F.cross_entropy(y, t), True),
    "of a study": (Own().cross_entropy, True),
    "ignored and smoothed": (lambda y, t: F.cross_entropy(y, t, ignore_index=1, label_smoothing=0.1), True),
    "weighted": (lambda y, t: F.cross_entropy(y, t, weight=torch.tensor([1.0, 2.0, 0.5]).double()), False),
    "summed": (lambda y, t: F.cross_entropy(y, t, reduction="sum"), True),
    "nll": (lambda y, t: F.nll_loss(F.log_softmax(y, dim=1), t), True),
    "accuracy": (lambda y, t: (y.argmax(-1) == t).double().mean(), True),
    "accuracy along another axis": (lambda y, t: (y.argmax(dim=0) == t[:3]).double().mean(), True),
    "squares": (lambda y, t: F.mse_loss(y, F.one_hot(t, 3).double()), True),
    "absolute, by columns": (lambda y, t: F.l1_loss(y[:, 0], t.double()), True),
    "with logits": (lambda y, t: F.binary_cross_entropy_with_logits(y, F.one_hot(t, 3).double()), True),
    "broadcast": (lambda y, t: F.mse_loss(y.mean(), t.double().mean()), True),
    "sums": (lambda y, t: y.sum(1).sum() + y.square().mean() * torch.sum(y), True),
    "reads the study": (Own().reads_itself, False),
    "reads a global": (with_global, False),
    "calls a helper": (with_helper, False),
    "takes a length": (with_length, False),
    "in place": (in_place, False),
    "calls what has a rule": (lambda y, t: F.avg_pool1d(y, 3).square().mean(), True),
}


def streams(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(number) for number in range(count)]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_scalar(name: str, own: bool) -> None:
    function, traced = CLASSES[name]
    scalar = Scalar("Study.loss", function)
    assert bool(scalar._steps) == traced
    stream = torch.Generator().manual_seed(2)
    y_KBC = torch.randn(4, 6, 3, dtype=torch.float64, generator=stream, requires_grad=True)
    t_KB = torch.randint(3, (4, 6), generator=stream)
    t_KB = t_KB if own else t_KB[:1].expand(4, 6)
    values_K = scalar(y_KBC, t_KB if own else t_KB[0], streams(4), own)
    alone_K = torch.stack([function(y, t) for y, t in zip(y_KBC, t_KB, strict=True)])
    close(values_K, alone_K, name)
    assert bool(scalar._steps) == traced
    if alone_K.requires_grad:
        fused, alone = (torch.autograd.grad(v.sum(), y_KBC)[0] for v in (values_K, alone_K))
        close(fused, alone, name)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", ["cross entropy", "squares", "weighted"])
def test_function_of_pytorch_that_is_replaced_is_called_once(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a function mode, or traced, PyTorch's own would call the other one in its turn."""
    for each in ("cross_entropy", "mse_loss"):
        own = getattr(F, each)
        monkeypatch.setattr(F, each, lambda *args, own=own, **options: own(*args, **options) * 3)
    function = CLASSES[name][0]
    y_KBC, t_B = torch.randn(size, 6, 3, dtype=torch.float64), torch.randint(3, (6,))
    values_K = Scalar("Study.loss", function)(y_KBC, t_B, streams(size))
    close(values_K, torch.stack([function(y, t_B) for y in y_KBC]), name)


def test_state_is_read_each_time() -> None:
    own, y, t = Own(), torch.randn(2, 6, 3), torch.randint(3, (6,))
    scalar = Scalar("Study.loss", own.reads_itself)
    before = scalar(y, t, streams(2))
    own.rate = 3.0
    torch.testing.assert_close(scalar(y, t, streams(2)), 3 * before)


def test_error_is_that_of_the_users_code() -> None:
    scalar = Scalar("Study.loss", lambda y, t: F.cross_entropy(y, t))
    with pytest.raises(ValueError, match="Expected input batch_size"):
        scalar(torch.randn(2, 6, 3), torch.zeros(5, dtype=torch.long), streams(2))


def held(y: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        scale = y.square().mean()
    return (y * scale).mean()


def cast(y: Tensor, t: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return (y.float() @ y.float().t()).mean()


def hooked(y: Tensor, t: Tensor) -> Tensor:
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y.square().mean()


def penalty(y: Tensor, t: Tensor) -> Tensor:
    z = y.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(z.square().sum(), z)
    return gradient.square().mean() + y.mean()


def grad_mode(y: Tensor, t: Tensor) -> Tensor:
    return y.mean() * (2 if torch.is_grad_enabled() else 3)


def caught(y: Tensor, t: Tensor) -> Tensor:
    try:
        scale = float(y.detach().square().mean())
    except Exception:
        scale = 1.0
    return y.mean() * scale


def in_a_nested_function(y: Tensor, t: Tensor) -> Tensor:
    return y.mean() * sum(rate for rate in RATE)


OWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "no_grad": held,
    "isinstance": lambda y, t: y.mean() if isinstance(y, Tensor) else y.sum(),
    "type": lambda y, t: y.mean() if type(y) is Tensor else y.sum(),
    "is_tensor": lambda y, t: y.mean() if torch.is_tensor(y) else y.sum(),
    "straight-through": lambda y, t: Straight.apply(y * 3).square().mean(),
    "a hook": hooked,
    "derivatives": penalty,
    "a number": lambda y, t: y.mean() * y.sum().item(),
    "a branch": lambda y, t: y.mean() if y.sum() > 0 else y.sum(),
    "a number, or else": caught,
    "identity of an attribute": lambda y, t: y.mean() if y.dtype is torch.float64 else y.sum(),
    "text": lambda y, t: y.mean() if "64" in str(y.dtype) else y.sum(),
    "autocast that is off": cast,
    "a global in a nested function": in_a_nested_function,
}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", OWN)
def test_what_a_graph_would_lose(name: str, size: int) -> None:
    function = OWN[name]
    y_KBC = torch.randn(size, 6, 3, dtype=torch.float64, generator=streams(1)[0], requires_grad=True)
    scalar = Scalar("Study.loss", function)
    with torch.autocast("cpu", torch.bfloat16):
        values_K = scalar(y_KBC * 1, torch.zeros(6), streams(size))
        alone_K = torch.stack([function(y * 1, torch.zeros(6)) for y in y_KBC])
    assert values_K.dtype == alone_K.dtype
    close(values_K, alone_K, name)
    fused, alone = (torch.autograd.grad(v.sum(), y_KBC)[0] for v in (values_K, alone_K))
    close(fused, alone, name)


def test_gradient_mode_is_asked_each_time() -> None:
    y, scalar = torch.ones(2, 6, 3), Scalar("Study.score", grad_mode)
    assert scalar(y, torch.zeros(6), streams(2)).tolist() == [2, 2]
    with torch.no_grad():
        assert scalar(y, torch.zeros(6), streams(2)).tolist() == [3, 3]


def test_each_trial_draws_from_its_own_stream() -> None:
    def noisy(y: Tensor, t: Tensor) -> Tensor:
        return (y + torch.rand(3)).mean()

    values_K = Scalar("Study.loss", noisy)(torch.zeros(2, 6, 3), torch.zeros(6), own := streams(2))
    torch.testing.assert_close(values_K, torch.stack([torch.rand(3, generator=each).mean() for each in streams(2)]))
    assert not torch.equal(own[0].get_state(), streams(1)[0].get_state())


LIKE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"outputs": lambda y, t: y, "targets": lambda y, t: t}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("like", LIKE)
def test_noise_like_a_tensor_is_each_trials_own(size: int, like: str) -> None:
    y_KBC, t_BC = torch.randn(size, 6, 3), torch.zeros(6, 3)
    before = torch.get_rng_state()
    values_K = Scalar("Study.loss", lambda y, t: (y - torch.randn_like(LIKE[like](y, t))).square().mean())(
        y_KBC, t_BC, streams(size)
    )
    assert torch.equal(before, torch.get_rng_state())
    for y, value, stream in zip(y_KBC, values_K, streams(size), strict=True):
        torch.testing.assert_close(value, (y - torch.randn(6, 3, generator=stream)).square().mean())


NOISY: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "noise": (lambda y, t: (y - torch.randn(6, 3)).square().mean() * torch.rand(()), True),
    "noise like the outputs": (lambda y, t: (y - torch.rand_like(y) * y).square().mean(), True),
    "classes": (lambda y, t: F.cross_entropy(y, torch.randint(3, (6,))), True),
    "some examples": (lambda y, t: y[torch.randperm(6)[:3]].square().mean(), True),
    "dropout": (lambda y, t: F.dropout(y, 0.4).square().mean(), True),
    "a number": (lambda y, t: y.mean() * torch.rand(()).item(), True),
    "noise, not traced": (lambda y, t: helper(y - torch.randn(6, 3)).mean() * torch.rand(()), False),
    "noise in memory of its own": (lambda y, t: helper(y + torch.empty(3).normal_()).mean(), False),
    "a distribution": (lambda y, t: helper(torch.distributions.Normal(y, 1.0).rsample()).mean(), False),
    "dropout in place": (lambda y, t: (F.dropout(y * 1, 0.4, True, True) * y).mean(), False),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", NOISY)
def test_what_a_loss_draws_is_each_trials_own(name: str, size: int) -> None:
    function, is_traced = NOISY[name]
    y_KBC = torch.randn(size, 6, 3, dtype=torch.float64, generator=streams(1)[0], requires_grad=True)
    t_B, own, before = torch.zeros(6), streams(size), torch.get_rng_state()
    scalar = Scalar("Study.loss", function)
    assert bool(scalar._steps) == is_traced
    found = [scalar(y_KBC * 1, t_B, own) for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state())
    for row, (stream, alone) in enumerate(zip(own, streams(size), strict=True)):
        for values_K in found:
            with drawing_from(alone):
                expected = function(y_KBC[row] * 1, t_B)
            close(values_K[row], expected, name)
            one, other = (torch.autograd.grad(v, y_KBC, retain_graph=True)[0] for v in (values_K[row], expected))
            close(one, other, name)
        assert torch.equal(stream.get_state(), alone.get_state())
    in_a_loop = size > 1 and name in ("a number", "dropout in place")
    assert scalar._looped == in_a_loop or (size == 1 and not is_traced)


def test_what_a_loss_with_hyperparameters_draws_is_each_trials_own() -> None:
    def noisy(y: Tensor, t: Tensor, params: dict[str, float]) -> Tensor:
        return (y - params["deviation"] * torch.randn(6, 3)).square().mean()

    y_KBC, params_K, own, loops = (
        torch.zeros(3, 6, 3),
        [{"deviation": 0.1 * n} for n in range(3)],
        streams(3),
        list[str](),
    )
    scalar = Scalar("Study.loss", noisy, on_loop=loops.append)
    found = [scalar(y_KBC, torch.zeros(6), own, params_K=params_K) for _ in range(2)]
    assert not loops
    for row, alone in enumerate(streams(3)):
        for values_K in found:
            with drawing_from(alone):
                torch.testing.assert_close(values_K[row], noisy(y_KBC[row], torch.zeros(6), params_K[row]))


def padded(y: Tensor, t: Tensor) -> Tensor:
    return (F.dropout(F.pad(y, (1, 1, 1, 1)), 0.4) * helper(y).mean()).square().mean()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("last", [False, True])
def test_what_a_loss_drops_does_not_depend_on_how_the_outputs_lie(last: bool, size: int) -> None:
    y_KBCHW = torch.randn(size, 2, 3, 4, 4, dtype=torch.float64, generator=streams(1)[0])
    if last:
        y_KBCHW = y_KBCHW.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    scalar, own, alone_K = Scalar("Study.loss", padded), streams(size), streams(size)
    for _ in range(2):
        values_K = scalar(y_KBCHW, torch.zeros(2), own)
        for y, value, alone in zip(y_KBCHW, values_K, alone_K, strict=True):
            with drawing_from(alone):
                close(value, padded(y, torch.zeros(2)), "loss")
    assert scalar._looped == (last or size == 1)


def test_a_traced_loss_that_fails_for_several_trials_has_drawn_nothing() -> None:
    """Of one trial, its steps know a number."""
    function, _ = NOISY["a number"]
    scalar, y_KBC, t_B = Scalar("Study.loss", function), torch.ones(3, 6, 3), torch.zeros(6)
    scalar(y_KBC[:1], t_B, streams(1))
    assert scalar.is_static
    values_K = scalar(y_KBC, t_B, streams(3))
    torch.testing.assert_close(values_K, torch.stack([torch.rand((), generator=each) for each in streams(3)]))


TRACED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "outputs": lambda y, t: F.rrelu(y, training=True).square().mean(),
    "targets": lambda y, t: (y * F.rrelu(t - 1, training=True)).mean(),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("like", TRACED)
def test_so_is_what_a_trace_draws_only_when_it_runs(size: int, like: str) -> None:
    y_KBC, t_BC = torch.randn(size, 6, 3), torch.zeros(6, 3)
    before = torch.get_rng_state()
    scalar = Scalar("Study.loss", TRACED[like])
    assert scalar._steps, "it is traced, for the trace draws nothing"
    values_K = scalar(y_KBC, t_BC, streams(size))
    assert torch.equal(before, torch.get_rng_state())
    for y, value, stream in zip(y_KBC, values_K, streams(size), strict=True):
        with drawing_from(stream):
            torch.testing.assert_close(value, TRACED[like](y, t_BC))


def test_streams_of_no_trial_are_refused() -> None:
    scalar = Scalar("Study.loss", lambda y, t: y.mean() * random.random())
    with pytest.raises(FuseError, match=r"Study\.loss draws from Python's random.*allowed: PyTorch's random numbers"):
        scalar(torch.ones(2, 6, 3), torch.zeros(6), streams(2))
