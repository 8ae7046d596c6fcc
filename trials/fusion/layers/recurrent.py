"""Recurrent layers: RNN, LSTM and GRU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trials.fusion.autotune import Turns, choose
from trials.fusion.layers import cells
from trials.fusion.layers.dropout import Masks
from trials.fusion.own_code.streams import drawing_from, seeded_recurrence
from trials.fusion.registry import FuseError, JointLayer, rule
from trials.fusion.rows import Rows

_KINDS: dict[str, tuple[Callable[..., Any], cells.Cell]] = {
    "RNN_TANH": (torch.rnn_tanh, cells.Plain(relu=False)),
    "RNN_RELU": (torch.rnn_relu, cells.Plain(relu=True)),
    "LSTM": (torch.lstm, cells.LSTM()),
    "GRU": (torch.gru, cells.GRU()),
}
"""Mode -> PyTorch's own function, and the cell."""


@rule(nn.RNN, nn.LSTM, nn.GRU)
class FusedRecurrent(JointLayer):
    """`nn.RNN`, `nn.LSTM`, `nn.GRU` of K trials.

    Either all trials run at once, step by step in time, or one after another by PyTorch's own function, whichever
    proves faster. A packed sequence is left to the loop over trials.
    """

    varying = ("dropout",)
    is_recordable = False

    def __init__(self, module: nn.RNNBase, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.function, self.cell = _KINDS[module.mode]
        self.layers, self.directions, self.batch_first = module.num_layers, 1 + module.bidirectional, module.batch_first
        self.widths = (module.proj_size or module.hidden_size, module.hidden_size)[: 1 + self.cell.remembers]
        self.biased = module.bias
        self.situation = (module.mode, self.layers, self.directions, module.bias, module.proj_size)
        suffixes = [f"_l{layer}{side}" for layer in range(self.layers) for side in ("", "_reverse")[: self.directions]]
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        self.names = [[kind + suffix for kind in kinds] for suffix in suffixes]

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.size, self.turns = rows.size, Turns(rows.again, rows.settle)
        rates = rows.vector(self.path, "dropout") if self.layers > 1 else [0.0] * rows.size
        self.masks = Masks(rates, rows.generators, rows.again)
        self.weights_K = [rows.get(self.path, name) for names in self.names for name in names]

    def run_joint(self, values: Sequence[Any], per_trial: Sequence[bool], training: bool) -> tuple[Any, bool]:
        """The input ``[N, T, I]``, ``[T, N, I]`` or ``[T, I]`` per trial, and None or the first states."""
        x, given = values
        if not isinstance(x, Tensor):
            raise FuseError(f"module '{self.label}': input of type {type(x).__name__}; allowed: a tensor")
        axes, own = x.ndim - per_trial[0], per_trial[0]
        if axes not in (2, 3):
            raise FuseError(f"module '{self.label}': input of {axes} axes; allowed: 3, or 2 without a batch")
        batch = -2 if axes == 2 else None
        if batch is not None:
            x = x.unsqueeze(batch)
        elif self.batch_first:
            x = x.transpose(-3, -2)
        states_K = self._states(given, axes, x)
        y_KTNH, *last_K = self._compute(x if own else x.expand(self.size, *x.shape), states_K, training)
        if batch is not None:
            y_KTNH, last_K = y_KTNH.squeeze(batch), [state.squeeze(batch) for state in last_K]
        elif self.batch_first:
            y_KTNH = y_KTNH.transpose(1, 2)
        return (y_KTNH, tuple(last_K) if self.cell.remembers else last_K[0]), True

    def _states(self, given: Any, axes: int, x: Tensor) -> list[Tensor]:
        """The first states, each ``[K, layers · directions, N, H]``."""
        count = self.layers * self.directions
        if given is None:
            return [x.new_zeros(self.size, count, x.shape[-2], width) for width in self.widths]
        states_K = []
        for state, width in zip(given if self.cell.remembers else (given,), self.widths, strict=True):
            own = state.ndim == axes + 1
            shape = (count, width) if axes == 2 else (count, x.shape[-2], width)
            if tuple(state.shape[own:]) != shape:
                raise FuseError(
                    f"module '{self.label}': first state of shape {list(state.shape[own:])}; allowed: {list(shape)}"
                )
            state = state if own else state.expand(self.size, *state.shape)
            states_K.append(state.unsqueeze(-2) if axes == 2 else state)
        return states_K

    def _compute(self, x_KTNI: Tensor, states_K: Sequence[Tensor], training: bool) -> list[Tensor]:
        """``y_KTNH`` and the last states."""
        drops = training and self.masks.any
        tensors = (*states_K, *self.weights_K)
        if self.size == 1 or torch.is_autocast_enabled(x_KTNI.device.type):
            return self._looped(training, drops, x_KTNI, *tensors)
        # measured without dropout, which would draw random numbers
        ways = {
            "at once": lambda *t: self._at_once(False, *t)[0],
            "looped": lambda *t: self._looped(training, False, *t)[0],
        }
        way = choose(self.situation, ways, x_KTNI, *tensors, turns=self.turns)
        if way == "at once":
            return self._at_once(drops, x_KTNI, *tensors)
        return self._looped(training, drops, x_KTNI, *tensors)

    def _at_once(self, drops: bool, x_KTNI: Tensor, *tensors: Any) -> list[Tensor]:
        count, each = len(self.widths), len(self.names[0])
        states_K, weights = tensors[:count], tensors[count:]
        last: list[list[Tensor]] = [[] for _ in states_K]
        for layer in range(self.layers):
            outputs = []
            for direction in range(self.directions):
                row = layer * self.directions + direction
                own: Any = weights[row * each : (row + 1) * each]
                first = tuple(state[:, row] for state in states_K)
                y_KTNH, *ends = cells.run(self.cell, x_KTNI, own, first, reverse=bool(direction))
                outputs.append(y_KTNH)
                for table, end in zip(last, ends, strict=True):
                    table.append(end)
            x_KTNI = torch.cat(outputs, 3) if len(outputs) > 1 else outputs[0]
            if drops and layer < self.layers - 1:
                x_KTNI = self.masks.drop(x_KTNI)
        return [x_KTNI, *(torch.stack(table, 1) for table in last)]

    def _looped(self, training: bool, drops: bool, x_KTNI: Tensor, *tensors: Any) -> list[Tensor]:
        count = len(self.widths)
        given = [tensor for tensor in (x_KTNI, *tensors) if tensor is not None]
        rows_K = [[tensor.squeeze(0)] if self.size == 1 else tensor.unbind(0) for tensor in given]
        found = []
        for row, generator in enumerate(self.masks.generators):
            x, *rest = [rows[row] for rows in rows_K]
            states, weights = rest[:count], rest[count:]
            rate = self.masks.rates_K[row] if drops else 0.0
            with _drawing(generator) if rate else nullcontext():
                found.append(
                    self.function(
                        *(x, states if self.cell.remembers else states[0], weights, self.biased),
                        *(self.layers, rate, training, self.directions == 2, False),
                    )
                )
        if len(found) == 1:
            return [tensor.unsqueeze(0) for tensor in found[0]]
        return [torch.stack(tensors) for tensors in zip(*found, strict=True)]


@contextmanager
def _drawing(generator: torch.Generator) -> Iterator[None]:
    with drawing_from(generator), seeded_recurrence():
        yield
