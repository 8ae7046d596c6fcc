"""Computes the user's loss or score, written for one model, for K models at once."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from trials.fusion.errors import FuseError, RefusedError, is_out_of_memory
from trials.fusion.graph.steps import State
from trials.fusion.graph.surroundings import as_written, reentrant_checkpoint, without_recomputing
from trials.fusion.own_code import autocast
from trials.fusion.own_code.below import below
from trials.fusion.own_code.calls import by_rule
from trials.fusion.own_code.draw_orders import DrawOrders
from trials.fusion.own_code.drawing import Drawn
from trials.fusion.own_code.inner import Calls
from trials.fusion.own_code.reached import Reached
from trials.fusion.own_code.streams import drawing_from, drawing_nothing, foreign_streams, refuse_foreign, saved
from trials.fusion.own_code.together import Together
from trials.fusion.own_code.trees import PLAIN_KINDS, apart, dims_of, of_row, refuse_own_kinds
from trials.fusion.registry import replaced_function
from trials.fusion.rows import generator as stream_of
from trials.fusion.scores import losses as _losses  # noqa: F401 - fills the table of calls
from trials.fusion.scores.derivatives import apart_from_others
from trials.fusion.scores.params import NAME, Params, leaving, smoothed, takes_params
from trials.fusion.scores.pure import steps_of
from trials.fusion.ways import Way

Called = Callable[[Callable[..., Any]], Any]
"""Calls the function that it is given."""


class Scalar:
    """A function from one model's outputs and the targets to a scalar, for K models.

    A pure function is traced once, and its steps run without `vmap`. Any other runs under `vmap` each time, or once for
    each trial where `vmap` cannot and under autocast. Each trial draws random numbers from its own stream.

    One that takes the trials' hyperparameters is not traced. Under `vmap` the numbers in which they differ are tensors
    without axes, in the loop they are plain. On the first batch both are computed, and the loop stays if they differ.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Tensor],
        way: Way = "rules",
        on_loop: Callable[[str], None] = lambda reason: None,
        prove: Callable[[Sequence[Called]], bool] = lambda calls: False,
    ) -> None:
        """Take a function.

        Args:
            name: for error messages.
            function: of outputs, targets and perhaps `params`.
            way: by "rules" a pure function is traced; by "loop", or where others have replaced a function of PyTorch's,
                none runs under `vmap`.
            on_loop: called with the reason when one that takes hyperparameters runs once for each trial.
            prove: called before the user's own code runs for the first time, with calls of it for single trials. It
                raises `FuseError` if the first one's result depends on the others, and returns whether to call it
                again before the next run.
        """
        self._takes_params, self._on_loop, self._prove_alone = takes_params(function), on_loop, prove
        self._name, self._function = name, leaving(function, name) if self._takes_params else function
        self._looped = way == "loop" or bool(replaced_function())
        may_trace = way == "rules" and not self._looped and not self._takes_params
        self._steps, self._last = steps_of(function) if may_trace else ([], 0)
        self._seen, self._proves = False, True
        self._stepped: tuple[int, bool] | None = None
        self._params: tuple[list[Any], Params] | None = None
        self._proven: set[object] = {()}
        self._orders = DrawOrders()

    def __call__(
        self,
        outputs: Any,
        targets: Any,
        generators: Sequence[torch.Generator],
        per_trial: bool = False,
        params_K: Sequence[Any] = (),
        reached: Reached | None = None,
    ) -> Tensor:
        """Return one value per trial.

        Args:
            outputs: the model's. Every tensor in it has the leading axis K, one entry per trial.
            targets: tensors in any containers, or none: shared by all trials, or with the axis K too.
            generators: a random stream per trial.
            per_trial: whether they have that axis.
            params_K: the trials' hyperparameters, which not every function takes.
            reached: learns which trials use which outputs.

        Returns:
            ``[K]``.

        Raises:
            FuseError: it is not a scalar, or draws from streams that no trial has for itself.
        """
        values_K, targets_before, self._reached = None, _versions(targets), reached
        if self._steps and type(outputs) in PLAIN_KINDS and type(targets) in PLAIN_KINDS:
            values_K = self._by_steps(outputs, targets, generators, per_trial)
        if values_K is None:
            streams = None if self._seen else foreign_streams()
            if self._proves:
                calls = self._lone_calls(outputs, targets, generators, per_trial, params_K)
                self._proves = self._prove_alone(calls)
            values_K = self._by_code(outputs, targets, generators, per_trial, params_K)
            if streams is not None:
                refuse_foreign(streams, self._name)
            self._seen = True
        if _versions(targets) != targets_before:
            raise RefusedError(
                f"{self._name} changes the targets in place, and the next trial and epoch would see that; allowed: to "
                "change a clone of them"
            )
        if not isinstance(values_K, Tensor) or values_K.ndim != 1 or values_K.is_complex():
            raise self._no_scalar(values_K, 1)
        return values_K

    @property
    def is_static(self) -> bool:
        """Whether its steps run, and not the user's code: the same operations each time."""
        return bool(self._steps) and self._stepped is not None

    def _no_scalar(self, value: Any, axes: int) -> FuseError:
        what: Any = list(value.shape[axes:]) if isinstance(value, Tensor) else type(value).__name__
        if isinstance(value, Tensor) and value.is_complex():
            what = value.dtype
        return FuseError(f"{self._name} returned {what}; allowed: a scalar tensor of a real number")

    def _by_steps(
        self, outputs: Tensor, targets: Tensor, generators: Sequence[torch.Generator], per_trial: bool
    ) -> Tensor | None:
        """Return the values, or None if a step fails: then the user's own code is run, for its error."""
        state = State(len(self._steps) + 2)
        state.values[:2], state.flags[:2] = [outputs, targets], [True, per_trial]
        kind = len(generators), per_trial  # a number (`.item()`) is there for one trial, or of shared targets
        is_known = self._stepped == kind
        draws = any(step.rule is not None for step in self._steps)
        restore = saved({}, generators) if draws and not is_known else None
        try:
            # what is drawn here without a rule would come from no trial's stream, and be the same for all
            with nullcontext() if is_known else drawing_nothing(self._name):
                for step in self._steps:
                    step.generators = list(generators)
                    step.run(state)
            if not state.flags[self._last]:
                raise FuseError(f"{self._name} is the same for all trials")
        except Exception as error:
            if is_out_of_memory(error) or (draws and restore is None):
                raise
            self._steps = []
            if restore is not None:
                restore()
            return None
        self._stepped = kind
        found: Tensor = state.values[self._last]
        return found

    def _by_code(
        self,
        outputs: Any,
        targets: Any,
        generators: Sequence[torch.Generator],
        per_trial: bool,
        params_K: Sequence[Any],
    ) -> Any:
        """Run the user's code: under `vmap`, or else for one trial after another."""
        if any(autocast.is_on(tensor.device) for tensor in apart(outputs)[0]):  # `vmap` gives other types there
            return self._by_loop(outputs, targets, generators, per_trial, params_K)
        if len(generators) > 1 and not self._looped:
            restore = saved({}, generators)
            try:
                refuse_own_kinds(targets)
                params = self._split(params_K)
                self._prove(outputs, targets, generators, per_trial, params_K, params)
                return self._by_vmap(outputs, targets, generators, per_trial, params_K, params)
            except RefusedError:
                raise
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                restore()
                if self._takes_params:
                    self._on_loop(f"{self._name} runs once for each trial: {str(error).partition(chr(10))[0]}")
        self._looped = True
        return self._by_loop(outputs, targets, generators, per_trial, params_K)

    def _split(self, params_K: Sequence[Any]) -> Params | None:
        if not self._takes_params:
            return None
        given = list(params_K)
        if self._params is None or len(self._params[0]) != len(given) or any(map(is_not, self._params[0], given)):
            self._params = given, Params(given)
        return self._params[1]

    def _prove(
        self,
        outputs: Any,
        targets: Any,
        generators: Sequence[torch.Generator],
        per_trial: bool,
        params_K: Sequence[Any],
        params: Params | None,
    ) -> None:
        """Compare the values under `vmap` with those of plain numbers: code may ask for the type of a number.

        Raises:
            FuseError: they differ.
        """
        if params is None or params.unlike in self._proven:
            return
        restore = saved({}, generators)  # both draw the same
        with torch.no_grad():
            by_vmap = self._by_vmap(_copied(outputs), _copied(targets), generators, per_trial, params_K, params)
            restore()
            by_loop = self._by_loop(_copied(outputs), _copied(targets), generators, per_trial, params_K)
            restore()
        if not _are_close(by_vmap, by_loop):
            raise FuseError("with the trials' params as tensors it gives other values than with plain numbers")
        self._proven.add(params.unlike)

    def _by_vmap(
        self,
        outputs: Any,
        targets: Any,
        generators: Sequence[torch.Generator],
        per_trial: bool,
        params_K: Sequence[Any],
        params: Params | None,
    ) -> Any:
        tensors, together = apart(outputs)
        rules, streams = Together({}), _Streams(list(generators))
        numbers_K = [] if params is None else params.numbers(*_kind(tensors))
        rows = torch.arange(len(generators), device=tensors[0].device)
        inside: list[Tensor] = []
        of_trial: list[Tensor] = []

        def call(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
            rules.check_call(function)
            found = smoothed(params, inside, function, args, kwargs)
            if found is not NotImplemented:
                return found
            rule = by_rule(function, args, kwargs, streams, rules)
            if rule is None:
                return self._orders.went(function, args, kwargs, function(*args, **kwargs))
            self._orders.went(function, args, kwargs)
            with rules.outside():
                return below(rule, of_trial[0], args, kwargs)

        def one(row: Tensor, own: list[Tensor], own_targets: Any, numbers: list[Tensor]) -> Tensor:
            of_trial[:], inside[:] = [row], numbers
            named = {} if params is None else {NAME: params.of_one(numbers)}
            with Calls(call), rules:
                return self._function(together(own), own_targets, **named)

        dims, before = (0, 0, dims_of(targets, per_trial), 0), _versions(numbers_K)
        begun = generators[0].get_state()  # what it draws may decide how it goes on

        def alone() -> Any:
            now = generators[0].get_state()
            generators[0].set_state(begun)
            try:
                return self._lone_calls(outputs, targets, generators, per_trial, params_K)[0](self._function)
            finally:
                generators[0].set_state(now)

        with self._orders.compared(streams, (outputs, targets), alone), as_written():
            found = torch.vmap(one, dims, randomness="error")(rows, tensors, targets, numbers_K)
        if params is not None and _versions(numbers_K) != before:
            params.forget_numbers()
            raise FuseError("it changes a number of params in place, which would stay so")
        return found

    def _lone_calls(
        self,
        outputs: Any,
        targets: Any,
        generators: Sequence[torch.Generator],
        per_trial: bool,
        params_K: Sequence[Any],
    ) -> list[Called]:
        """Return a call of the first trial, and calls of the last one with other outputs."""
        (tensors, together), dims = apart(outputs), dims_of(targets, per_trial)

        def of(row: int, factor: float, function: Callable[..., Any]) -> Any:
            own = [tensor[row].detach() for tensor in tensors]
            own = [
                (x * factor if x.is_floating_point() else x.clone()).requires_grad_(x.is_floating_point()) for x in own
            ]
            named = {NAME: params_K[row]} if self._takes_params else {}
            stream = stream_of(generators[row].device, state=generators[row].get_state())
            with drawing_from(stream), without_recomputing(reentrant_checkpoint):
                return function(together(own), _copied(of_row(targets, dims, row)), **named)

        return [partial(of, row, factor) for row, factor in ((0, 1.0), (-1, 0.5), (-1, 2.0))]

    def _by_loop(
        self,
        outputs: Any,
        targets: Any,
        generators: Sequence[torch.Generator],
        per_trial: bool,
        params_K: Sequence[Any],
    ) -> Any:
        tensors, together = apart(outputs)
        rows, dims = [[tensor[row] for row in range(len(tensor))] for tensor in tensors], dims_of(targets, per_trial)
        reached, values = self._reached or Reached(), list[Any]()
        for tensor, own in zip(tensors, rows, strict=True):
            reached.watch(tensor, own)
        for row, generator in enumerate(generators):
            own_targets = of_row(targets, dims, row)
            named = {NAME: params_K[row]} if self._takes_params else {}
            with drawing_from(generator), without_recomputing(reentrant_checkpoint), apart_from_others(self._name):
                values.append(self._function(together([own[row] for own in rows]), own_targets, **named))
            if not isinstance(values[-1], Tensor) or values[-1].ndim:
                raise self._no_scalar(values[-1], 0)
        values_K = torch.stack(values)
        reached.leave(values_K)
        return values_K


@dataclass
class _Streams:
    """See `trials.fusion.own_code.inner.Streams`."""

    generators: list[torch.Generator]
    drawn: list[Drawn] | None = None


def _copied(value: Any) -> Any:
    """Return `value` with copies of its tensors, which code may change."""
    tensors, together = apart(value)
    return together([tensor.detach().clone() for tensor in tensors])


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in apart(value)[0] if not tensor.is_inference()]


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Whether rounding may explain the difference of two tensors."""
    share = max((torch.finfo(each.dtype).eps for each in (one, other) if each.is_floating_point()), default=0.0) ** 0.75
    return torch.allclose(one.double(), other.double(), rtol=share, atol=share, equal_nan=True)


def _kind(outputs: Sequence[Tensor]) -> tuple[torch.dtype, torch.device]:
    """Return the type and the device of numbers that meet a model's outputs."""
    double = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in outputs)
    return torch.float64 if double else torch.float32, outputs[0].device
