"""Dropout: the rate is a vector over trials, and each trial draws its masks from its own random stream."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials.fusion.layers import philox
from trials.fusion.layers.memory_order import Order, back, order_of
from trials.fusion.own_code.streams import lent
from trials.fusion.registry import Layer, call_rule, leading, lift, rule
from trials.fusion.rows import Rows, ask_no_gate

_PART_DRAWN = 1 << 14
"""Draw this many numbers before asking the gate again: an eighth of a millisecond of one core."""

_SELU_FLOOR = 1.7580993408473766  # minus the value that SELU tends to, as PyTorch writes it in alpha dropout


class Masks:
    """The random masks of K trials.

    If a trial's generator has the state that the global one has in the trial alone, it drops the same elements as
    `torch.nn.functional.dropout` drops there. A trial with rate 0 or 1 draws nothing, as in PyTorch.

    Attributes:
        rates_K: per trial, the probability that an element is zeroed.
        any: whether some trial drops anything.
        shares_in_some: whether some trial drops something, and some nothing.
    """

    def __init__(
        self, rates_K: Sequence[float], generators: Sequence[torch.Generator], again: Callable[[], None] = ask_no_gate
    ) -> None:
        """Draw from `generators`, a random stream per trial. On a CPU, call `again` between parts.

        Raises:
            ValueError: a rate is not a probability.
        """
        self.rates_K = list(rates_K)
        if not all(0 <= rate <= 1 for rate in self.rates_K):
            raise ValueError(f"dropout rates {self.rates_K}; allowed: from 0 to 1")
        self.any = any(self.rates_K)
        self.shares_in_some = self.any and not all(self.rates_K)
        self.generators = generators
        self._again = again
        self._vectors: dict[tuple[torch.dtype, torch.device, int, str], Tensor] = {}

    def drop(self, x_K: Tensor, noise_ndim: int | None = None, *, scales: bool = True) -> Tensor:
        """Zero each trial's elements with its own rate, and scale the rest by 1 / (1 - rate).

        Args:
            x_K: ``[K, ...]``.
            noise_ndim: how many leading axes a mask varies over; the elements beyond share it. None: all axes.
            scales: whether it scales.
        """
        if x_K.device.type == "cuda" and noise_ndim is None:
            return self._drop_by_kernel(x_K)
        noise_K = self._keep(x_K, noise_ndim)
        return x_K * (noise_K.div_(self._vector("divisor", x_K, _divisor)) if scales else noise_K)

    def _drop_by_kernel(self, x_K: Tensor) -> Tensor:
        """Drop single elements on a CUDA device.

        There PyTorch has one kernel for a whole dropout, which draws in an order of its own and scales in float32.
        """
        wide = torch.promote_types(x_K.dtype, torch.float32)
        order = _stacked(order_of(x_K[0]))
        in_order = x_K.detach() if order is None else x_K.detach().permute(order)
        numbers = self._for_kernel(x_K, wide)
        noise_K = philox.noise(in_order, self.generators, self.rates_K, numbers)
        if noise_K is None:
            noise_K = self._drawn_one_by_one(x_K) * numbers[2].view(-1, *[1] * (x_K.ndim - 1))
        elif order is not None:
            noise_K = noise_K.permute(back(order))
        return (x_K * noise_K).to(x_K.dtype)

    def _drawn_one_by_one(self, x_K: Tensor) -> Tensor:
        """What each trial keeps, drawn by PyTorch's kernel."""
        keeps = []
        for x, rate, generator in zip(x_K.detach(), self.rates_K, self.generators, strict=True):
            dense = x if x.is_contiguous() else torch.empty_like(x)  # gaps would change the order
            if 0 < rate < 1 and x.numel():
                with lent(generator):
                    keeps.append(torch.native_dropout(dense, rate, True)[1])
            else:
                keeps.append(torch.full_like(dense, rate < 1, dtype=torch.bool))
        return torch.stack(keeps)

    def _for_kernel(self, x_K: Tensor, wide: torch.dtype) -> Tensor:
        """The `numbers` of `philox.noise`."""
        key = (wide, x_K.device, 1, "kernel")
        if key not in self._vectors:
            like = x_K.new_empty((), dtype=wide)
            draws, keep, divisor = (
                leading([number(rate) for rate in self.rates_K], like, 1) for number in (_draws, _keep_rate, _divisor)
            )
            self._vectors[key] = torch.stack([draws, keep, torch.ones_like(divisor).div_(divisor)])
        return self._vectors[key]

    def alpha_drop(self, x_K: Tensor, noise_ndim: int | None = None) -> Tensor:
        """Set elements to SELU's negative limit, and keep mean and variance (Klambauer et al. 2017, section 3)."""
        keep_K = self._keep(x_K, noise_ndim)
        floor_K = self._vector("floor", x_K, _alpha_floor)
        shift_K = (keep_K - 1).mul_(floor_K).add_(self._vector("shift", x_K, _alpha_shift))
        return x_K * keep_K.mul_(self._vector("scale", x_K, _alpha_scale)) + shift_K

    def _keep(self, x_K: Tensor, noise_ndim: int | None) -> Tensor:
        """Return one where an element stays, zero where it is dropped."""
        order = None
        if noise_ndim is not None:
            shape: Sequence[int] = (*x_K.shape[:noise_ndim], *[1] * (x_K.ndim - noise_ndim))
        else:
            order = None if x_K.is_contiguous() else _stacked(order_of(x_K[0]))
            shape = x_K.shape if order is None else [x_K.shape[axis] for axis in order]
        keep_K = torch.empty(shape, dtype=x_K.dtype, device=x_K.device)
        compared = _bernoulli_compares(x_K.device.type)
        drawn_K = torch.empty(shape, dtype=torch.float64, device=x_K.device) if compared else keep_K
        asks, since = x_K.device.type == "cpu", 0
        for drawn, rate, generator in zip(drawn_K.unbind(0), self.rates_K, self.generators, strict=True):
            if not 0 < rate < 1:
                drawn.fill_(0 if compared else 1 - rate)
                continue
            # the numbers to compare are drawn one by one, so drawing in parts gives the same
            divided = compared and drawn.numel() > _PART_DRAWN
            for part in drawn.view(-1).split(_PART_DRAWN) if divided else (drawn,):
                if asks and since >= _PART_DRAWN:
                    self._again()
                    since = 0
                since += part.numel()
                if compared:
                    part.uniform_(generator=generator)
                else:
                    part.bernoulli_(1 - rate, generator=generator)
        if compared:
            torch.lt(drawn_K, self._vector("keep", drawn_K, _keep_rate), out=keep_K)
        return keep_K if order is None else keep_K.permute(back(order))

    def _vector(self, name: str, like: Tensor, number: Callable[[float], float]) -> Tensor:
        """A number of each trial's rate, shaped to broadcast against `like`."""
        key = (like.dtype, like.device, like.ndim, name)
        if key not in self._vectors:
            self._vectors[key] = leading([number(rate) for rate in self.rates_K], like, like.ndim)
        return self._vectors[key]


def _stacked(order: Order) -> list[int] | None:
    """The order of all trials' axes, of which K is the slowest."""
    return None if order is None else [0, *(axis + 1 for axis in order)]


@functools.cache
def _bernoulli_compares(device_type: str) -> bool:
    """Whether `bernoulli_` compares a uniform number with the rate, as on CPUs without Intel's library.

    Then one comparison for all trials gives the same masks in a third of the time.
    """
    if device_type != "cpu":
        return False
    one, other = torch.Generator(), torch.Generator()
    one.manual_seed(0)
    other.manual_seed(0)
    drawn = torch.empty(64).bernoulli_(0.5, generator=one)
    compared = torch.empty(64, dtype=torch.float64).uniform_(generator=other) < 0.5
    return torch.equal(drawn.bool(), compared) and torch.equal(one.get_state(), other.get_state())


def _keep_rate(rate: float) -> float:
    return 1 - rate


def _draws(rate: float) -> float:
    return float(0 < rate < 1)


def _divisor(rate: float) -> float:
    return 1 - rate if rate < 1 else 1.0


def _alpha_scale(rate: float) -> float:
    return ((_SELU_FLOOR**2 * rate + 1) * (1 - rate)) ** -0.5 if rate < 1 else 0.0


def _alpha_floor(rate: float) -> float:
    return _SELU_FLOOR * _alpha_scale(rate)


def _alpha_shift(rate: float) -> float:
    return _alpha_floor(rate) * rate


_AXES: dict[type[nn.Module], int | None] = {nn.Dropout: None, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}
"""How many axes a dropped channel has; None where single elements are dropped."""


def _noise_ndim(x_K: Tensor, axes: int | None) -> int | None:
    """Over how many leading axes the masks of channels with `axes` axes vary."""
    if axes is None:
        return None
    # [B, C, axes...], or [C, axes...] without a batch, except that 2d takes any other rank as batched
    return 2 if x_K.ndim == axes + 2 and axes != 2 else 3


@rule(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
class FusedDropout(Layer):
    """Dropout of K trials; the numbered kinds drop whole channels."""

    varying = ("p",)
    may_share = True

    def __init__(self, module: nn.Module, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.axes = _AXES[type(module)]

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.size = rows.size
        self.masks = Masks(rows.vector(self.path, "p"), rows.generators, rows.again)
        self.shares_in_some = self.masks.shares_in_some
        self.draws = self.masks.any and self.axes is None

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """Any shape; in training, a shared input becomes one per trial, since the masks differ."""
        if not training or not self.masks.any:
            return x, per_trial
        x_K = lift(x, per_trial, self.size)
        return self.masks.drop(x_K, _noise_ndim(x_K, self.axes)), True


@rule(nn.AlphaDropout, nn.FeatureAlphaDropout)
class FusedAlphaDropout(Layer):
    """Dropout of K trials that keeps mean and variance; the feature kind drops whole channels."""

    varying = ("p",)
    may_share = True

    def __init__(self, module: nn.Module, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.noise_ndim = 3 if isinstance(module, nn.FeatureAlphaDropout) else None

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.size = rows.size
        self.masks = Masks(rows.vector(self.path, "p"), rows.generators, rows.again)
        self.shares_in_some = self.masks.shares_in_some
        self.draws = self.masks.any and self.noise_ndim is None

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """Any shape (the feature kind: ``[B, C, ...]``); in training, a shared input becomes one per trial."""
        if not training or not self.masks.any:
            return x, per_trial
        return self.masks.alpha_drop(lift(x, per_trial, self.size), self.noise_ndim), True


def _functional(alpha: bool, noise_ndim: Callable[[Tensor], int | None]) -> Any:
    """The rule for a function whose inputs are x, p, training, inplace; its rate is the same for all trials."""

    def call(
        values: Sequence[Any], per_trial: Sequence[bool], generators: list[torch.Generator]
    ) -> tuple[Tensor, bool]:
        x, rate, training, _ = values
        if not training or not rate:
            return x, per_trial[0]
        masks = Masks([rate] * len(generators), generators)
        x_K = lift(x, per_trial[0], len(generators))
        return (masks.alpha_drop if alpha else masks.drop)(x_K, noise_ndim(x_K)), True

    return call


for _function, _axes in ((functional.dropout, None), (functional.dropout1d, 1), (functional.dropout2d, 2)):
    call_rule(_function)(_functional(False, functools.partial(_noise_ndim, axes=_axes)))
call_rule(functional.dropout3d)(_functional(False, functools.partial(_noise_ndim, axes=3)))
call_rule(functional.alpha_dropout)(_functional(True, lambda x_K: None))
call_rule(functional.feature_alpha_dropout)(_functional(True, lambda x_K: 3))
