"""What one step made of one trial, by name and in the order in which it came: fused with others, or alone."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trials.fusion.own_code.trees import apart
from trials.fusion.shared_base import same_bits

LAYER, OUTPUT, LOSS, SCORE = "output of", "the model's output", "loss", "score"
BACK, GRADIENT = "gradient at the output of", "gradient of"
UPDATE, BUFFER, STATE, SETTING = "update of", "buffer", "optimizer's state:", "optimizer's setting:"
SCALE, STREAM = "loss scale:", "random stream"


class Key(NamedTuple):
    """One of the kinds above, and whose it is."""

    kind: str
    name: str

    def __str__(self) -> str:
        """In a user's words."""
        return f"{self.kind} {self.name}".strip()


class Record:
    """The tensors and numbers of one step.

    Args:
        row: the trial's row, where tensors have the axis K.
        only: the layers' tensors to keep; None: all.

    Attributes:
        values: what was made, in order.
        sizes: the tensors that updates were added to.
        phase: prefix of the names in the phase under way.
        ended: whether the step was cut short, by a loss that is not finite.
    """

    def __init__(self, row: int = 0, only: Collection[Key] | None = None) -> None:
        self.row, self._only = row, only
        self.values: dict[Key, Any] = {}
        self.sizes: dict[Key, Tensor] = {}
        self.phase = ""
        self.ended = False
        self._calls: Counter[str] = Counter()

    def layer(self, name: str, output: Any, per_trial: bool) -> Any:
        """See `trials.fusion.units.Watch`. The gradient at an output of one tensor is kept when it comes.

        Returns:
            What takes the output's place; None: nothing does.
        """
        tensors = apart(output)[0]
        for own, tensor in zip(self._called(name, output), tensors, strict=True):
            if tensor.is_nested or _is_within(tensor) or (self._only is not None and Key(LAYER, own) not in self._only):
                continue
            self.put(LAYER, own, tensor[self.row] if per_trial else tensor)
            # of several, one may be computed from another, whose gradient then depends on where it is looked at
            if tensor.requires_grad and len(tensors) == 1:
                tensor.register_hook(self._keeper(own, per_trial))
        return None

    def outputs(self, output: Any, per_trial: bool) -> None:
        """Keep what the model returned."""
        for index, tensor in enumerate(apart(output)[0]):
            self.put(OUTPUT, self.phase + (f"[{index}]" if index else ""), tensor[self.row] if per_trial else tensor)

    def gradients(self, named: Iterable[tuple[str, Tensor | None]], per_trial: bool) -> None:
        """Keep the gradients of parameters, the last first, as a backward pass reaches them. Some have none."""
        for name, gradient in reversed(list(named)):
            own = gradient[self.row] if gradient is not None and per_trial else gradient
            self.put(GRADIENT, self.phase + name, own)

    def updates(
        self,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        buffers: Collection[str],
        frozen: Collection[str] = (),
    ) -> None:
        """Keep how parameters changed, and what buffers are. Of the `frozen` nothing is kept, unless they changed."""
        for name, old in before.items():
            if name in frozen and same_bits(after[name], old):
                continue
            if name in buffers:
                self.put(BUFFER, name, after[name])
            else:
                exact = torch.complex128 if old.is_complex() else torch.float64
                self.put(UPDATE, name, after[name].detach().to(exact) - old.to(exact))
                self.sizes[Key(UPDATE, name)] = old

    def optimizer(self, phase: str, names: list[str], saved: Mapping[str, Any]) -> None:
        """Keep an optimizer's `state_dict`: the numbers, texts and tensors in it, in whatever containers they are."""
        for position, state in saved.get("state", {}).items():
            known = isinstance(position, int) and position < len(names)
            for name, value in _parts(names[position] if known else str(position), state):
                self.put(STATE, phase + name, value)
        for index, group in enumerate(saved.get("param_groups", [])):
            own = {kind: value for kind, value in group.items() if kind != "params"}
            for name, value in _parts(f"group {index}", own):
                self.put(SETTING, phase + name, value)

    def put(self, kind: str, name: str, value: Any) -> None:
        """Keep a copy of a tensor, or a plain value."""
        self.values[Key(kind, name)] = value.detach().clone() if isinstance(value, Tensor) else value

    def clear(self) -> None:
        """Forget all, for another try."""
        self.values.clear()
        self.sizes.clear()
        self._calls.clear()
        self.phase, self.ended = "", False

    def _called(self, name: str, output: Any) -> list[str]:
        """Count a call of the layer `name`, and return a name for each tensor of its output."""
        name = self.phase + name
        self._calls[name] += 1
        name += f"#{self._calls[name]}" if self._calls[name] > 1 else ""
        count = len(apart(output)[0])
        return [f"{name}[{index}]" for index in range(count)] if count > 1 else [name] * count

    def _keeper(self, name: str, per_trial: bool) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            self.put(BACK, name, gradient[self.row] if per_trial else gradient)

        return keep


def named_batch(number: int, count: int) -> str:
    """Return a prefix of the names in one of the batches of a step, if it has several."""
    return f"batch {number + 1}: " if count > 1 else ""


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what `value` consists of; only what can be compared."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _parts(f"{name} {key}", part)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _parts(f"{name}[{index}]", part)
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        yield name, torch.from_numpy(np.array(value))
    elif isinstance(value, (Tensor, bool, int, float, str, type(None))):
        yield name, value


def _is_within(tensor: Tensor) -> bool:
    """Whether a tensor lives within a transform of the user's, such as `torch.func.grad`, and cannot be kept."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


class Noisy(Record):
    """A record of a step in which rounding differs at each layer by itself.

    In a step that is only nudged, roundings may cancel as they do in the step that is not: behind a batch norm over two
    examples two of them are equal and opposite. Other kernels round the two apart.

    Args:
        lone: of the step of a trial alone.
        nudged: the same, nudged. By as much as the two differ, outputs and gradients change here, with random signs.
        only: see `Record`.
        seed: of the signs.
    """

    def __init__(self, lone: Record, nudged: Record, only: Collection[Key], seed: int) -> None:
        super().__init__(only=only)
        self._lone, self._nudged = lone, nudged
        self._draws = torch.Generator().manual_seed(seed)

    def layer(self, name: str, output: Any, per_trial: bool) -> Any:
        """See `Record`."""
        tensors, together = apart(output)
        names = self._called(name, output)
        if any(map(_is_within, tensors)):
            return None
        self.values.update(
            {Key(LAYER, own): tensor.detach().clone() for own, tensor in zip(names, tensors, strict=True)}
        )
        return together([self._changed(own, tensor) for own, tensor in zip(names, tensors, strict=True)])

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        changed = tensor + self._noise(Key(LAYER, name), tensor)
        if changed.requires_grad:
            changed.register_hook(lambda gradient: gradient + self._noise(Key(BACK, name), gradient))
        return changed

    def _noise(self, key: Key, like: Tensor) -> Tensor | float:
        one, other = self._lone.values.get(key), self._nudged.values.get(key)
        if one is None or other is None or not like.is_floating_point():
            return 0.0
        apart: Tensor = (other - one).abs().nan_to_num(0.0, 0.0, 0.0)
        return apart * (torch.randint(2, like.shape, generator=self._draws).to(like) * 2 - 1)
