"""Which trials are not lost yet, decided on the device, which the host runs ahead of and learns it from later."""

from collections.abc import Mapping, Sequence
from math import inf

import torch
from torch import Tensor

from trials.optim.block import Counts
from trials.optim.fused import FusedOptimizer
from trials.optim.vector import VectorOptimizer

STEPS_AT_MOST = 64
"""The host learns at least once in so many steps: until then it keeps what it has counted in each."""


def decides_on_device(device: torch.device) -> bool:
    """Whether the host runs ahead of `device`, and would have to wait for a value that it reads in each step."""
    return device.type == "cuda"


class Alive:
    """The trials whose losses have all been finite. The steps of others change nothing on the device.

    The host counts those steps all the same, and takes that back when it learns of them.

    Args:
        lost_K: which trials are lost already.
        device: where they are.

    Attributes:
        alive_K: which are not, ``[K]`` bool, on the device. It is changed in place.
    """

    def __init__(self, lost_K: Sequence[bool], device: torch.device) -> None:
        self.alive_K = torch.tensor([not lost for lost in lost_K], device=device)
        self._taken_K = torch.zeros(len(lost_K), dtype=torch.int32, device=device)
        self._counted: list[tuple[VectorOptimizer, Mapping[str, Counts]]] = []

    def __len__(self) -> int:
        """How many steps there were since the host has learned."""
        return len(self._counted)

    def watch(self, losses_K: Tensor, optimizer: FusedOptimizer) -> None:
        """Take the losses ``[K]`` of a step into account, which `optimizer` takes next. Nothing is read."""
        assert isinstance(optimizer, VectorOptimizer)  # others must know who is lost
        self.alive_K.logical_and_(losses_K.abs() < inf)
        self._taken_K.add_(self.alive_K)
        self._counted.append((optimizer, optimizer.counts()))

    def learn(self) -> list[int]:
        """Read which rows are lost, and take back what was counted for them. Unless all steps have ended, it waits.

        Without a step since the last time, none are returned.
        """
        counted, self._counted = self._counted, []
        if not counted:
            return []
        taken_K = self._taken_K.tolist()
        self._taken_K.zero_()
        lost = [row for row, taken in enumerate(taken_K) if taken < len(counted)]
        for row in lost:
            first = dict(reversed(counted[taken_K[row] :]))  # of each optimizer: before the first step not taken
            for optimizer, counts in first.items():
                optimizer.put_back(row, counts)
        return lost
