"""Modules without a rule, run by their own code: under one `vmap`, or a loop over the trials where `vmap` cannot.

A whole forward that cannot be traced is one too. Rules still compute its layers: each leaves the `vmap`, and is a unit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from trials.fusion.compared.sharing import refuse_outside, refuse_shared
from trials.fusion.compared.structure import Unchanged, rule_for
from trials.fusion.errors import RefusedError, is_out_of_memory
from trials.fusion.graph.memo import KeepsInsideError, LoneCall, Memo
from trials.fusion.graph.surroundings import as_written, reentrant_checkpoint, without_recomputing
from trials.fusion.own_code import one_by_one
from trials.fusion.own_code.asked import asking, own_attributes
from trials.fusion.own_code.beginning import Beginning
from trials.fusion.own_code.below import below
from trials.fusion.own_code.calls import Outside, instead
from trials.fusion.own_code.draw_orders import DrawOrders
from trials.fusion.own_code.inner import Calls, Inner, is_apart
from trials.fusion.own_code.one_by_one import ChangedError, OneByOne, fits, in_order, in_slots, mark, slots
from trials.fusion.own_code.streams import drawing_from, foreign_streams, refuse_foreign, saved
from trials.fusion.own_code.template import template, use_plain_forwards, without_data
from trials.fusion.own_code.together import Together
from trials.fusion.own_code.trees import apart, hide_objects, of_row, refuse_own_kinds, stack
from trials.fusion.own_code.values import MOST_UNLIKE, UnlikeError, Value
from trials.fusion.own_code.varying import Varying
from trials.fusion.registry import Layer, label
from trials.fusion.rows import Rows, Vectors
from trials.fusion.shared_base import Snapshot, WrittenError
from trials.fusion.units import LayerUnits, Units


class Mapped:
    """A module of K trials, run by its own code.

    Attributes:
        label: the module's name in units and errors.
        looped: why the trials run one after another; empty while `vmap` computes them. See also `OwnCode`.
        memo: what it keeps.
    """

    def __init__(
        self, module: nn.Module, path: str, modes: dict[str, bool], units: LayerUnits, outer: DrawOrders | None = None
    ) -> None:
        """Take a copy of one trial's `module`.

        Args:
            module: its tensors do not matter, because each call uses those of `Rows`.
            path: its path in the model.
            modes: path in the model -> whether that module is in training mode.
            units: its own, to ask the gate for.
            outer: of the code around it, if that runs as a whole too.

        Raises:
            RefusedError: the module cannot be copied, or its code finds tensors elsewhere.
        """
        self._own = own_attributes(module)
        self.module = template(module, path)
        refuse_outside(module, path, self.module)
        self.label, self.looped, self.units = label(module, path), "", units
        self._prefix = f"{path}." if path else ""
        self._modes = {
            inner: modes[f"{self._prefix}{name}" if name else path] for name, inner in self.module.named_modules()
        }
        use_plain_forwards(self.module)
        without_data(self.module)
        self._set_modes()
        self._inner: dict[str, Inner] = {}
        self._row: Tensor | None = None
        self._stream: torch.Generator | None = None
        self._together, self._orders, self._changing = Together(self._inner), outer or DrawOrders(), set[str]()
        self._seen = is_graph = isinstance(self.module, fx.GraphModule)  # what tracing saw needs no second look
        self.memo = Memo(nn.Module() if is_graph else self.module, path)
        self._plain, self._is_inside, self._unlike, self.ran_apart = self.module, outer is not None, 0, False
        self._written = set[str]()  # parameters that it changes in place
        if is_graph:  # fx's own prints what it raises
            setattr(type(self.module), "__call__", nn.Module.__call__)  # noqa: B010

    def number_inside(self, modes: dict[str, bool], units: Units, vectors: Vectors | None) -> list[LayerUnits]:
        """Make every layer inside a whole model a unit of its own, computed by its rule or else by a `Mapped`.

        Args:
            modes: as in ``__init__``.
            units: where the layers' units are numbered.
            vectors: the rows', if the model had a graph: without the numbers of layers that the graph does not call.
        """
        self._plain = self.module if self._seen else template(self.module, "")
        for path, module in self.module.named_modules():
            rule = rule_for(module, path)
            if any(path.startswith(f"{o}.") for o in self._inner) or not is_apart(module, path, rule, vectors):
                continue
            own = LayerUnits(units, f"{label(module, path)} forward")
            mapped = None if isinstance(rule, Layer) else Mapped(module, path, modes, own, self._orders)
            self._inner[path] = Inner(rule, mapped, own, module, self.module)
            module.forward = self._leaving(self._inner[path])
        return [inner.units for inner in self._inner.values()]

    def bind(self, rows: Rows) -> None:
        """Take the tensors of `rows`; called after they were built or changed."""
        self._rows, self._versions = rows, partial(rows.versions, self.module)
        self._parameters, self._buffers = (
            {name: rows.require("", self._prefix + name) for name, _ in named}
            for named in (self.module.named_parameters(), self.module.named_buffers())
        )
        inside = dict(self.module.named_modules())
        canonical = {name: rows.canonical(self._prefix + name) for name in (*self._parameters, *self._buffers)}
        self._held = {name: first for name, first in canonical.items() if first in rows.once}
        self._once = {name: rows.once[first] for name, first in self._held.items()}
        self._ordered = {name: rows.orders[first] for name, first in canonical.items() if first in rows.orders}
        self._slots = slots(inside, lambda name: rows.require("", self._prefix + name))
        self._varying = Varying(inside, rows.vectors, self.memo.kept.renew)
        self._varying.set_common()
        for inner in self._inner.values():
            inner.bind(rows)

    def ways(self) -> Iterator[tuple[str, str]]:
        """Yield the layers and looped calls inside, and how each is computed."""
        for inner in self._inner.values():
            yield from inner.ways(self.looped)
        yield from () if self.looped else self._together.ways(self.label)

    def way(self, reason: str) -> str:
        """Return how the module is computed. `reason` is why it has no rule."""
        return f"loop over trials: {self.looped}" if self.looped else f"vmap: {reason.partition(';')[0]}"

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any], entered: bool = False) -> Any:
        """Call the module for all trials.

        Args:
            args: its inputs; tensors have a leading axis K, or are shared by all trials.
            kwargs: the same by name.
            dims: trees like `args` and `kwargs`: 0 for a tensor with the axis K, None for all else.
            entered: the gate has been asked for the first trial's forward.

        Returns:
            Its output; every tensor in it has the leading axis K.

        Raises:
            RefusedError: the module changes more than its output, or draws from streams that no trial has for itself.
        """
        unchanged, streams = (None, None) if self._seen else (Unchanged(self.module), foreign_streams())
        inputs = [] if getattr(self.module, "inplace", False) else apart((args, kwargs))[0]
        versions = [tensor._version for tensor in inputs]
        self._rows.backward.check()  # it was no part of a training step, which looks by itself
        self.memo.kept.put_back()  # what a call that failed has left
        if not entered:
            self.units.enter()
        output, reason, by_vmap = None, self.looped, self._rows.size > 1 and not self.looped
        held = None if self._seen or not self._held else self._rows.once.snapshot(self._held.values())
        restore = None if self._seen and not by_vmap else self._saved(held)
        with held or nullcontext():
            if by_vmap and restore is not None:
                output, reason = self._try_vmap(args, kwargs, dims, restore)
                if output is None and unchanged is not None:
                    unchanged.check()  # a global variable may hold what exists under `vmap` alone
            self.ran_apart = output is None
            if output is None and versions == [tensor._version for tensor in inputs]:
                output = self._trials(args, kwargs, dims, restore)
        if versions != [tensor._version for tensor in inputs]:
            raise one_by_one.refused_change_of_input(self.label)
        if unchanged is not None and streams is not None:
            unchanged.check()
            refuse_foreign(streams, f"module '{self.label}'")
            self._rows.backward.watch(self.label, self.module, self.memo.kept)
        is_once = self._seen and by_vmap and 0 < self._unlike < MOST_UNLIKE
        self.looped, self._seen = "" if is_once else reason, True
        return output

    def _try_vmap(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any], restore: Callable[[], None]
    ) -> tuple[Any, str]:
        """Return the output, or why `vmap` fails. Then all is as before."""
        try:
            output, self._unlike = self._vmap(args, kwargs, dims), 0
            return output, ""
        except RefusedError:
            raise
        except ChangedError as error:
            self._foresee(error, restore)
            return self._try_vmap(args, kwargs, dims, restore)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            restore()
            self._unlike = self._unlike + 1 if isinstance(error, UnlikeError) else MOST_UNLIKE
            if isinstance(error, KeepsInsideError):
                if self._is_inside:
                    raise
                inner = self._inner.pop(error.path)  # the code around it may read what it keeps
                self.module.get_submodule(error.path).forward = inner.forward
                return self._try_vmap(args, kwargs, dims, restore)
            return None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        finally:
            self._row = None
            self._set_modes()

    def _vmap(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any]) -> Any:
        refuse_own_kinds((args, kwargs))
        together: list[Callable[[Sequence[Tensor]], Any]] = []
        reshaped: list[str] = []

        @as_written()
        def one(row: Tensor, parameters: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
            self._row = row
            mark(parameters.values())
            tensors = {**parameters, **buffers}
            given = self._together.given(tensors, self._changing, self._versions)
            asked = asking(parameters.items(), self._own) if self._own and not self._seen else nullcontext()
            with Calls(self.call), given, asked:
                output = functional_call(self.module, tensors, args, kwargs)
            outputs, rebuild = apart(hide_objects(output, f"module '{self.label}'"))
            together[:] = [rebuild]
            replaced = [name for name in buffers if tensors[name] is not buffers[name]]
            reshaped[:] = [name for name in replaced if not fits(tensors[name], buffers[name])]
            if new := set(replaced).difference(reshaped, self._changing):
                raise ChangedError(new)
            refuse_shared([name for name in replaced if name not in reshaped], tensors)
            return tuple(outputs), {name: tensors[name] for name in buffers.keys() & self._changing - {*reshaped}}

        rows = torch.arange(self._rows.size, device=self._rows.generators[0].device)
        parameters = {**self._parameters, **{name: tensor.detach() for name, tensor in self._once.items()}}
        axes = {name: None if name in self._once else 0 for name in parameters}
        mapped = torch.vmap(one, in_dims=(0, axes, 0, *dims), randomness="error")
        # a backward may need what a replaced buffer was before
        own = {name: t.clone() if name in self._changing else t for name, t in self._buffers.items()}
        changes = self._written if self._seen else self._parameters.keys() - self._once.keys()
        begun = self._begun = Beginning(self._rows.generators[0], self._parameters, changes, self._buffers)
        with self._orders.compared(self._rows, (args, kwargs), partial(self.run_first, args, kwargs, dims)):
            outputs, replaced = mapped(rows, parameters, own, args, kwargs)
            self._put_back(0, reshaped, args, kwargs, dims, by_vmap=True)
        self._written |= begun.keep_changed(self._changing) & self._parameters.keys()
        for name, tensor in replaced.items():
            self._buffers[name].data.copy_(tensor.detach())
        return self._rows.backward.lend(together[0](outputs), None, self.units)

    def run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any]) -> Any:
        """Return the output of the first trial alone, on copies, which says how all of it lies in memory."""
        restore, self._row = saved({}, self._rows.generators), None
        self._varying.set_row(0)
        call = self._begun.of(self._lone_call(0, args, kwargs, dims), self._ordered)
        with self._drawing_from(self._rows.generators[0]):
            output = call.run(self.module)
        self._varying.set_common()
        self._set_modes()
        self.memo.kept.put_back()
        restore()
        return output

    def _trials(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any], restore: Callable[[], None] | None
    ) -> Any:
        run = self._one_by_one if self._rows.size > 1 or self._changing or self._ordered else self._alone
        try:
            return run(args, kwargs, dims)
        except ChangedError as error:
            self._foresee(error, restore)
        return self._trials(args, kwargs, dims, restore)

    def _one_by_one(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any]) -> Any:
        (leaves, spec), owned = tree_flatten((args, kwargs)), tree_flatten(dims)[0]
        tensors_K = self._parameters, self._buffers
        reached, rows = self._rows.reached, OneByOne(*tensors_K, self._changing, self._once, self._ordered)
        rows.watch(reached)
        first, asked = self._rows.backward.first, ([], []) if self._seen else rows.asked
        inputs_K = one_by_one.split(leaves, owned, self._rows.size, reached)
        outputs = []
        for row, generator in enumerate(self._rows.generators):
            if row:
                self.units.enter()
            own_args, own_kwargs = tree_unflatten([own_inputs[row] for own_inputs in inputs_K], spec)
            self._varying.set_row(row)
            with rows.of(row) as (tensors, reshaped), first(*asked, self._own), self._drawing_from(generator):
                outputs.append(functional_call(self.module, tensors, own_args, own_kwargs))
            self._set_modes()
            self._put_back(row, reshaped, args, kwargs, dims)
            own = [tensors[name] for name in self._parameters]
            outputs[-1] = self._rows.backward.lend(outputs[-1], generator, self.units, own)
        self._varying.set_common()
        output = stack(outputs, f"module '{self.label}'")
        reached.leave(output)
        return output

    def _alone(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any]) -> Any:
        """Run a single trial: the module itself, with views of the row as its tensors."""
        own_args, own_kwargs = of_row((args, kwargs), dims, 0)
        first, stream = self._rows.backward.first, self._drawing_from(self._rows.generators[0])
        try:
            with in_slots(self._slots) as (reshaped, own), stream, first(() if self._seen else own, (), self._own):
                output = self.module(*own_args, **own_kwargs)
        finally:
            self._set_modes()
        self._put_back(0, reshaped, args, kwargs, dims)
        output = self._rows.backward.lend(output, self._rows.generators[0], self.units, (view for _, view in own))
        return stack([output], f"module '{self.label}'")

    def _saved(self, held: Snapshot | None) -> Callable[[], None]:
        """Return a function that puts all back. The first batch shows whether the code changes parameters."""
        own = {} if self._seen else {n: t.detach() for n, t in self._parameters.items() if n not in self._once}
        restore = saved({**own, **self._buffers}, self._rows.generators)
        versions = [tensor._version for tensor in self._parameters.values()]

        def put_back() -> None:
            if not own and versions != [tensor._version for tensor in self._parameters.values()]:
                raise one_by_one.refused_change(self.label)
            restore()
            if held is not None:
                held.put_back()
            self.memo.kept.put_back()
            self._set_modes()

        return put_back

    def _foresee(self, error: ChangedError, restore: Callable[[], None] | None) -> None:
        """Note what the code changes in a way of its own, and put all back, to run it again."""
        if restore is None or error.names <= self._changing:
            raise one_by_one.refused_change(self.label) from error
        one_by_one.refuse_ties(self.label, self._rows.aliases, self._prefix, error.names & self._buffers.keys())
        restore()
        if held := error.names & self._held.keys():
            raise WrittenError(self._held[name] for name in held)
        self._changing |= error.names

    def _put_back(
        self, row: int, reshaped: list[str], args: Any, kwargs: Any, dims: tuple[Any, Any], by_vmap: bool = False
    ) -> None:
        """Put back what the forward keeps in attributes, and try whether it matters.

        Raises:
            RefusedError: it does.
            KeepsInsideError: a layer that must not run on its own keeps it.
        """
        one_by_one.refuse_ties(self.label, self._rows.aliases, self._prefix, reshaped)
        if not (attributes := self.memo.changed(reshaped)):
            return
        if self._is_inside:
            raise KeepsInsideError(self.memo.path)
        for path in self._inner if by_vmap else ():
            if any(each == path or each.startswith(f"{path}.") for each, _ in attributes):
                raise KeepsInsideError(path)
        settings = {path: {name: own[row] for name, own in table.items()} for path, table in self._rows.vectors.items()}
        self.memo.prove(self._plain, settings, self._lone_call(row, args, kwargs, dims), attributes)

    def _lone_call(self, row: int, args: Any, kwargs: Any, dims: tuple[Any, Any]) -> LoneCall:
        rows = {name: tensor[row] for table in (self._parameters, self._buffers) for name, tensor in table.items()}
        tensors = {name: in_order(tensor, self._ordered.get(name)) for name, tensor in rows.items()}
        own_args, own_kwargs = of_row((args, kwargs), dims, row)
        return LoneCall(tensors, own_args, own_kwargs, self._rows.generators[row], self.units.enter)

    def _set_modes(self) -> None:
        for module, training in self._modes.items():
            module.training = training

    @contextmanager
    def _drawing_from(self, generator: torch.Generator) -> Iterator[None]:
        """While entered, the global random numbers come from one trial's stream."""
        self._stream = generator
        try:
            with drawing_from(generator), without_recomputing(reentrant_checkpoint, self._versions):
                yield
        finally:
            self._stream = None

    def call(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call `function` for the module's code, by its rule if it has one."""
        inner = None if self._row is None else instead(function, args, kwargs, self._rows, self._together)
        output = function(*args, **kwargs) if inner is None else self._below(inner, args, kwargs)
        found = inner.answer if isinstance(inner, Value) else output
        return found if self._row is None else self._orders.went(function, args, kwargs, found)

    def _below(self, inner: Inner | Outside, args: Any, kwargs: Any) -> Any:
        row, self._row = self._row, None  # what `inner` calls is outside the `vmap`
        assert row is not None  # or there is no `vmap`
        try:
            with self._together.outside():
                return below(inner, row, args, kwargs)
        finally:
            self._row = row

    def _leaving(self, inner: Inner) -> Callable[..., Any]:
        """Return a replacement for the `forward` of an inner layer."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._row is not None and self._together.are_given(inner.entries):
                inner.check()
                self._together.check_layer(args, kwargs)
                self._orders.went(inner.units.name)
                return self._below(inner, args, kwargs)
            if self._stream is None:
                return inner.forward(*args, **kwargs)
            return inner.run_alone(args, kwargs, self._rows.generators.index(self._stream))

        return call
