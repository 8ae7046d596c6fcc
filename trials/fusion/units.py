"""Numbers a trial group's units, and asks the gate for them, in the backward pass too.

The gate is asked between units and never touches a tensor, so waiting cannot change a number.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from trials.fusion.own_code.lending import Hook, aside
from trials.fusion.own_code.trees import heads
from trials.gate.base import HOST_UNIT, Gate


class Watch(Protocol):
    """Sees what the layers make of one trial in the midst of others.

    Attributes:
        row: the trial's.
    """

    row: int

    def layer(self, name: str, output: Any, per_trial: bool) -> None:
        """See a layer's output: with the leading axis K, or the trial's own."""


class Units:
    """The units of one group in the order of a training step, and how to enter them.

    Attributes:
        names: a name per unit; the index is the unit's number.
        watch: sees the layers' outputs; None except in an audit.
    """

    def __init__(self, gate: Gate) -> None:
        """Start without units. Call `declare` once all are known."""
        self._gate = gate
        self._under_way = HOST_UNIT
        self.names: list[str] = []
        self.watch: Watch | None = None
        self._asks = True
        self.settle, self.fits, self.expect, self.busy_ns = gate.settle, gate.fits, gate.expect, gate.busy_ns

    def enter(self, unit: int) -> None:
        """See `Gate.enter`."""
        self._under_way = unit
        if self._asks:
            self._gate.enter(unit)

    def again(self) -> None:
        """Ask again for the unit under way. Long units on a CPU ask between their parts."""
        if self._asks:
            self._gate.enter(self._under_way)

    @contextmanager
    def unasked(self) -> Iterator[None]:
        """While entered, the gate is not asked: what is recorded meanwhile is not done."""
        self._asks = False
        try:
            yield
        finally:
            self._asks = True

    def number(self, name: str) -> int:
        """Return the number of the unit called `name`. A new name gets a new number."""
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def declare(self, trials: int) -> None:
        """Announce the numbers' names to the gate, and K, the number of trials."""
        self._gate.use(list(self.names), trials)

    def rest(self) -> None:
        """See `Gate.rest`."""
        self._gate.rest()

    def backward_hook(self, unit: int) -> Hook:
        """Return a function for `ask_before_backward` that enters `unit`."""
        enter = self.enter

        def ask(gradients: Any) -> None:
            enter(unit)

        return aside(ask, others=True)


class LayerUnits:
    """The two units of one layer.

    A call enters its forward. A hook on the forward's output enters its backward.

    Args:
        units: where they are numbered.
        name: the name of the forward's unit.
    """

    def __init__(self, units: Units, name: str) -> None:
        self.name, self._units = name, units
        self._forward = units.number(name)
        self._hook: Hook | None = None

    def declare_backward(self) -> None:
        """Number the backward, and have the gate asked for it."""
        self._hook = self._units.backward_hook(self._units.number(self.name.replace(" forward", " backward")))

    def enter(self) -> None:
        """Ask for the forward."""
        self._units.enter(self._forward)

    def seen(self, output: Any, per_trial: bool = True, row: int | None = None) -> None:
        """Show the output to whoever watches: with the axis K, shared by all trials, or that of the trial in `row`."""
        watch = self._units.watch
        if watch is not None and row in (None, watch.row):
            watch.layer(self.name.removesuffix(" forward"), output, per_trial)

    def before_backward(self, output: Any) -> None:
        """Have the gate asked before the backward of the layer that computed `output`."""
        if self._hook is not None:
            for tensor in heads(output):
                ask_before_backward(tensor, self._hook)


def ask_before_backward(output: Tensor, hook: Hook) -> None:
    """Call `hook` when the gradient of a layer's `output` is complete, before the layer's backward runs.

    A hook on the graph's node costs a quarter of an identity `autograd.Function`, and leaves the output itself as it
    is. Autograd runs nodes in the reverse order of their creation, so nothing of an earlier layer runs in between.
    """
    node = output.grad_fn
    if node is not None:
        node.register_prehook(hook)
