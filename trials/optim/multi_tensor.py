"""One kernel that updates all parameters of a block, for all trials, where they are.

A rule's `update` launches several of PyTorch's kernels, for parameters that were copied side by side. Ours is written
in Triton. Where that is not installed, or does not give the same bits, the rule's `update` is used.
"""

import functools
import importlib.util
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trials.optim.gradients import Gradients
from trials.optim.registry import Rule
from trials.own_logger import own_logger
from trials.pinned_memory import copied_to

_TYPES = torch.float32, torch.float64
"""In others PyTorch's kernels round between operations to what they do not store."""
_TRIALS, _SIZES = 8, (5, 1500)
"""Of the comparison: how many trials, and how many weights of each."""

log = own_logger(__name__)


def runs_on(device: torch.device) -> bool:
    """Whether kernels in Triton run there."""
    return device.type == "cuda"


def multi_tensor(rule: Rule, views: Sequence[Tensor], state: Mapping[str, Tensor]) -> "MultiTensor | None":
    """The kernel for a block, if there is one; the arguments are those of `MultiTensor`."""
    takes = rule.multi_tensor is not None and runs_on(views[0].device) and views[0].dtype in _TYPES
    return MultiTensor(rule, views, state) if takes and _kernels() is not None else None


class MultiTensor:
    """Updates the parameters of a block by one launch. It does not hold their memory.

    Args:
        rule: of the block.
        views: the parameters, each ``[K, n]``.
        state: kind -> the state of all of them side by side, ``[K, N]``.

    Attributes:
        addresses: of each parameter and its gradient, ``[parameters, 2]``, on the device. It is not changed in place,
            so a CUDA graph may read it for as long as somebody holds it.
    """

    def __init__(self, rule: Rule, views: Sequence[Tensor], state: Mapping[str, Tensor]) -> None:
        self._rule, self._state = rule, state
        self._kind, self._device, self._size = views[0].dtype, views[0].device, len(views[0])
        self._found: list[int] = []
        self.addresses = torch.empty(0)
        block, column, rows = _kernels().BLOCK, 0, []
        for number, view in enumerate(views):
            rows += [(number, view.shape[1], column, start) for start in range(0, view.shape[1], block)]
            column += view.shape[1]
        self._columns, self._count = column, len(rows)
        # per program: which parameter, how many weights of a trial it has, and where state and program begin
        self._chunks = copied_to(self._device, torch.from_numpy(np.array(rows, dtype=np.int64).reshape(-1, 4)))

    def look(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
        """Note where these are: they may have moved. False: the kernel does not read such."""
        if not all(t.dtype is self._kind and t.is_contiguous() for t in (*parameters, *gradients)):
            return False
        found = [t.data_ptr() for pair in zip(parameters, gradients, strict=True) for t in pair]
        if found != self._found:
            if _is_recorded(self._device):  # whoever records has looked before
                return False
            self._found, self.addresses = found, copied_to(self._device, torch.tensor(found).view(-1, 2))
        return True

    def run(
        self,
        piece: tuple[int, int],
        coefficients: tuple[str, ...],
        table: Tensor,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        change: Gradients | None,
    ) -> bool:
        """Update a piece of the block; see `Block.step`. False: nothing was done, the rule's `update` has to.

        Args:
            piece: number i of n.
            coefficients: their names.
            table: their values, ``[coefficients, K, 1]``, contiguous.
            parameters: of the block.
            gradients: one for each.
            change: changes them first.
        """
        takes = self.look(parameters, gradients)
        takes = takes and _is_believed(self._rule, coefficients, change, self._kind, self._device)
        if takes:
            self._launch(piece, coefficients, table, change)
        return takes

    def _launch(
        self, piece: tuple[int, int], coefficients: tuple[str, ...], table: Tensor, change: Gradients | None
    ) -> None:
        assert table.is_contiguous()
        kernels, change = _kernels(), change or Gradients()
        first, last = (self._count * i // piece[1] for i in (piece[0], piece[0] + 1))
        if first == last or not self._size:
            return
        alive_K = None if change.alive_K is None else change.alive_K.view(torch.uint8)
        getattr(kernels, str(self._rule.multi_tensor))[(last - first, self._size)](
            *(self._chunks, self.addresses, self._columns, first, table),
            *(change.factor_K, change.limit_K, alive_K, kernels.BLOCK),
            **self._state,
            **{name: row for row, name in enumerate(coefficients)},
            **self._rule.switches(),
            **kernels.LAUNCH,
        )


def _is_recorded(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_believed: dict[Hashable, bool] = {}


def _is_believed(
    rule: Rule, coefficients: tuple[str, ...], change: Gradients | None, kind: torch.dtype, device: torch.device
) -> bool:
    """Whether the kernel gives the bits of the rule in steps like this one. It is compared once."""
    change = change or Gradients()
    changes = tuple(own is not None for own in (change.factor_K, change.limit_K, change.alive_K))
    key = type(rule), rule.kinds, *rule.switches().values(), coefficients, changes, kind, device
    if key not in _believed:
        if _is_recorded(device):
            return False
        try:
            _believed[key] = _compared(rule, coefficients, changes, kind, device)
        except Exception as error:  # Triton wants a compiler, and more
            _believed[key] = False
            log.info("optimizers step by PyTorch's kernels: Triton fails (%s: %s)", type(error).__name__, error)
        else:
            if not _believed[key]:
                log.info("%s steps by PyTorch's kernels: ours gives other bits", type(rule).__name__)
    return _believed[key]


def _compared(
    rule: Rule, coefficients: tuple[str, ...], changes: tuple[bool, ...], kind: torch.dtype, device: torch.device
) -> bool:
    """Take a step of made-up parameters both ways."""
    stream = torch.Generator().manual_seed(0)

    def drawn(*shape: int, of: torch.dtype = kind) -> Tensor:
        return copied_to(device, torch.rand(shape, dtype=of, generator=stream))

    p, g = ([drawn(_TRIALS, size) - 0.5 for size in _SIZES] for _ in range(2))
    s = {name: drawn(_TRIALS, sum(_SIZES)) for name in rule.kinds}
    table = drawn(len(coefficients), _TRIALS, 1)
    factor_K, limit_K, alive_K = (drawn(_TRIALS, of=torch.float64) if has else None for has in changes)
    change = Gradients(factor_K, limit_K, None if alive_K is None else alive_K > 0.5)
    whole = torch.cat(p, 1)
    expected = {"p": whole.clone(), **{name: t.clone() for name, t in s.items()}}
    changed = change.apply(torch.cat(g, 1))
    rule.update(
        expected["p"],
        -changed if rule.maximize else changed,
        {name: expected[name] for name in s},
        dict(zip(coefficients, table, strict=True)),
        *(torch.empty_like(whole), torch.empty_like(whole)),
    )
    if change.alive_K is not None:
        before = {"p": whole, **s}
        expected = {name: torch.where(change.alive_K[:, None], t, before[name]) for name, t in expected.items()}
    ours = MultiTensor(rule, p, s)
    ours.look(p, g)
    ours._launch((0, 1), coefficients, table, change)
    found = {"p": torch.cat(p, 1), **s}
    return all(torch.equal(found[name], t) for name, t in expected.items())


@functools.cache
def _kernels() -> Any:
    """None: Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        from trials.optim import multi_tensor_kernel
    except Exception as error:  # it looks for drivers and compilers
        log.info("optimizers step by PyTorch's kernels: Triton fails (%s: %s)", type(error).__name__, error)
        return None
    return multi_tensor_kernel
