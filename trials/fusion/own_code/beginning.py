"""What a run of all trials under `vmap` began with, for a run of the first one alone that is compared with it.

Code may change tensors in place, such as a count of its calls, and go another way for it. So it may by what it draws.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trials.fusion.graph.memo import LoneCall
from trials.fusion.layers.memory_order import Order
from trials.fusion.own_code.one_by_one import in_order


class Beginning:
    """The first trial's tensors and random stream, as they are now."""

    def __init__(
        self,
        generator: torch.Generator,
        parameters: Mapping[str, Tensor],
        changes: Collection[str],
        buffers: Mapping[str, Tensor],
    ) -> None:
        """Take copies.

        Args:
            generator: the first trial's.
            parameters: name -> ``[K, *shape]``.
            changes: the names of those that the run may change in place.
            buffers: likewise; it may change all.
        """
        self._generator, self._state = generator, generator.get_state()
        tensors = {**{name: parameters[name] for name in changes}, **buffers}
        self._stacked = {name: (tensor, tensor._version) for name, tensor in tensors.items()}
        self._first = {name: tensor.detach()[0].clone() for name, tensor in tensors.items()}

    def keep_changed(self, others: Collection[str]) -> set[str]:
        """Keep copies of those alone that the run has changed, and of `others`. Returns which it has."""
        changed = {name for name, (tensor, version) in self._stacked.items() if tensor._version != version}
        self._first = {name: tensor for name, tensor in self._first.items() if name in changed or name in others}
        self._stacked = {}
        return changed

    def of(self, call: LoneCall, orders: Mapping[str, Order]) -> LoneCall:
        """Return a call of the first trial with these tensors, and let its stream continue from here.

        Args:
            call: with the present ones.
            orders: of tensors that lie in another order in memory in the trial alone.
        """
        self._generator.set_state(self._state)
        before = {
            name: in_order(tensor, orders.get(name)).requires_grad_(call.tensors[name].requires_grad)
            for name, tensor in self._first.items()
        }
        return replace(call, tensors={**call.tensors, **before})
