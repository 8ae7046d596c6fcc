"""A loss or score of K models at once is the one of each, whether it is traced or not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.fused_and_solo import close
from trials import FuseError
from trials.fusion.scalar import Scalar

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
    "calls what has a rule": (lambda y, t: F.avg_pool1d(y, 3).square().mean(), False),
}


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
    values_K = scalar(y_KBC, t_KB if own else t_KB[0], own)
    alone_K = torch.stack([function(y, t) for y, t in zip(y_KBC, t_KB, strict=True)])
    close(values_K, alone_K, name)
    assert bool(scalar._steps) == traced
    if alone_K.requires_grad:
        fused, alone = (torch.autograd.grad(v.sum(), y_KBC)[0] for v in (values_K, alone_K))
        close(fused, alone, name)


def test_state_is_read_each_time() -> None:
    own, y, t = Own(), torch.randn(2, 6, 3), torch.randint(3, (6,))
    scalar = Scalar("Study.loss", own.reads_itself)
    before = scalar(y, t)
    own.rate = 3.0
    torch.testing.assert_close(scalar(y, t), 3 * before)


def test_error_is_that_of_the_users_code() -> None:
    scalar = Scalar("Study.loss", lambda y, t: F.cross_entropy(y, t))
    with pytest.raises(FuseError, match=r"Study.loss cannot be computed for several trials at once: Expected"):
        scalar(torch.randn(2, 6, 3), torch.zeros(5, dtype=torch.long))
