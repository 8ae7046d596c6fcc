"""What a forward keeps in attributes for its next call, such as a table of rotations for the lengths it has met.

A trial alone keeps it from call to call. Fused trials share one module's attributes. So these are put back after each
call, and each call begins with what the module was made with. That is exact if results do not depend on what was kept,
which `Memo` tries: it lets one trial's call begin with what calls of other parameters, inputs, random numbers and modes
have kept. Each must give the same, and leave the same.
"""

import copy
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from trials.fusion.compared.contents import contents
from trials.fusion.compared.describe import Describer
from trials.fusion.compared.reads import PLAIN
from trials.fusion.errors import FuseError, RefusedError
from trials.fusion.graph.module_attributes import Attribute, ModuleAttributes
from trials.fusion.graph.surroundings import reentrant_checkpoint, without_recomputing
from trials.fusion.own_code.one_by_one import fits, mark
from trials.fusion.own_code.streams import drawing_from
from trials.fusion.own_code.template import template
from trials.fusion.registry import label
from trials.fusion.rows import generator

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ROUNDINGS = 256.0
"""A table that is kept may be longer than one made anew, and other kernels may have made it."""


class KeepsInsideError(FuseError):
    """A layer keeps something, which code around the layer may read too: it must run as a part of that code.

    Attributes:
        path: of the layer.
    """

    def __init__(self, path: str) -> None:
        super().__init__(f"layer '{path}' keeps something in an attribute")
        self.path = path


@dataclass(frozen=True, slots=True)
class LoneCall:
    """One trial's call of a module.

    Attributes:
        tensors: the trial's parameters and buffers.
        args: its inputs.
        kwargs: the same by name.
        stream: its random numbers; not drawn from.
        ask: asks the gate for it.
    """

    tensors: Mapping[str, Tensor]
    args: Any
    kwargs: Any
    stream: torch.Generator
    ask: Callable[[], None]

    def copy(self) -> "LoneCall":
        """Return the same call, of inputs that are no part of a graph."""

        def own(x: Any) -> Any:
            return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

        return replace(self, args=tree_map(own, self.args), kwargs=tree_map(own, self.kwargs))

    def run(self, module: nn.Module) -> Any:
        """Return what `module` gives, on copies of all tensors, with PyTorch's own random numbers."""
        self.ask()
        own = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in self.tensors.items()}
        mark(own[name] for name, _ in module.named_parameters() if name in own)
        call = self.copy()
        return functional_call(module, own, call.args, call.kwargs)

    @property
    def signature(self) -> Hashable:
        """What a table may depend on."""
        leaves = tree_leaves((self.args, self.kwargs))
        kinds = [(tuple(x.shape), x.dtype, str(x.device)) if isinstance(x, Tensor) else repr(x) for x in leaves]
        return torch.is_grad_enabled(), tuple(kinds)


class Memo:
    """What the forward of one module keeps.

    Args:
        module: runs for all trials. Its attributes are as it was made.
        path: of the module in the model.

    Attributes:
        kept: its attributes.
        path: see above.
        is_allowed: whether something may be kept. Several methods share it alone, and each has its own module here.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        self.kept = ModuleAttributes(module)
        self._module, self.path, self.is_allowed = module, path, True
        # per signature: how many others were known, and which attributes had changed
        self._proven: dict[Hashable, tuple[int, frozenset[Attribute]]] = {}
        self._veterans: list[_Copy] = []  # one at most: what calls of all signatures have left

    def changed(self, reshaped: Collection[str]) -> list[Attribute]:
        """Put back what a forward has changed. Returns where, buffers among them that are `reshaped`.

        Raises:
            RefusedError: it cannot be put back.
        """
        inside = self.kept.changed_inside()
        if inside:
            raise self.error(inside[0])
        attributes = self.kept.changed()
        if attributes:
            self.kept.put_back()
        for name in reshaped:
            path, _, own = name.rpartition(".")
            attributes.append((path, own))
        if attributes and not self.is_allowed:
            raise self.error(attributes[0])
        return attributes

    def prove(
        self,
        plain: nn.Module,
        settings: Mapping[str, Mapping[str, Any]],
        call: LoneCall,
        attributes: Collection[Attribute],
    ) -> None:
        """Try whether results depend on what is kept at `attributes`, unless a call like this one has been tried.

        Args:
            plain: the module, with all layers in it run by their own code.
            settings: path -> attributes that the trial has for itself there.
            call: a trial's.
            attributes: where its forward has changed something.

        Raises:
            RefusedError: they do.
        """
        number, known = self._proven.get(call.signature, (0, frozenset()))
        if known.issuperset(attributes) and number == len(self._proven):
            return
        made, call = template(plain, self.path), call.copy()
        for path, module in made.named_modules():
            vars(module).update(settings.get(path, {}))
        fresh = _Copy(made, known.union(attributes))
        first, own = fresh.run(call)
        for attribute in attributes:
            if is_saved(first.module, attribute):
                allowed = "register_buffer(..., persistent=False), which is not saved with the weights"
                raise self.error(attribute, allowed)
        begun = self._veterans or [first]
        if not known.issuperset(attributes):
            changing = own.changed(call) | fresh.changed_in_the_other_mode(call)
            states, is_like_first = first.states(call), fresh.is_like_after(first, call)
            for other in (first, *fresh.after_other_calls(call, changing)):
                after, result = other.run(call)
                if not is_like_first or not result.is_like(own) or after.state() not in states:
                    raise self.error(min(attributes))
            begun = [*fresh.after_other_calls(call, changing, mode=True), *begun]
        for other in begun:  # these may keep more
            after, result = other.run(call)
            if not result.is_like(own):
                raise self.error(min(attributes))
        self._veterans = [after]
        self._proven[call.signature] = 0, fresh.attributes
        self._proven[call.signature] = len(self._proven), fresh.attributes

    def error(self, attribute: Attribute, allowed: str = "") -> RefusedError:
        """Return the error for a forward that has changed something at `attribute`."""
        path, name = attribute
        whole = ".".join(filter(None, (self.path, path)))
        return RefusedError(
            f"module '{label(self._module.get_submodule(path), whole)}': its forward changes the attribute '{name}', "
            "which trials that train at once cannot each do for themselves; allowed: "
            + (allowed or "a buffer (register_buffer), another output, or what each call would make again")
        )


@dataclass(frozen=True, slots=True)
class _Result:
    """What a call made, beside what it keeps."""

    output: Any
    tensors: Mapping[str, Tensor]
    stream: Tensor

    def is_like(self, other: "_Result") -> bool:
        """Whether both are equal but for rounding."""
        ours, theirs = tree_leaves(self.output), tree_leaves(other.output)
        common = self.tensors.keys() & other.tensors.keys()
        pairs = [*zip(ours, theirs, strict=False), *((self.tensors[name], other.tensors[name]) for name in common)]
        return len(ours) == len(theirs) and torch.equal(self.stream, other.stream) and all(_alike(*p) for p in pairs)

    def changed(self, call: LoneCall) -> set[str]:
        """Return the names of the buffers that the call has changed."""
        return {name for name, tensor in self.tensors.items() if not torch.equal(tensor, call.tensors[name])}


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of the module as some calls have left it.

    Attributes:
        module: the copy.
        attributes: what is looked at.
        kept: buffers that were replaced by others of another shape.
    """

    module: nn.Module
    attributes: frozenset[Attribute]
    kept: Mapping[str, Tensor] = field(default_factory=dict)

    def run(self, call: LoneCall, other_mode: bool = False) -> "tuple[_Copy, _Result]":
        """Make a call alone. Returns what the copy is then, and the result."""
        call.ask()
        module = _copied(self.module, call)
        modes = [(each, each.training) for each in module.modules()]
        if other_mode:
            module.train(not module.training)
        own = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in call.tensors.items()}
        own.update(self.kept)
        mark(own[name] for name, _ in module.named_parameters() if name in own)
        stream = generator(call.stream.device, state=call.stream.get_state())
        with drawing_from(stream), without_recomputing(reentrant_checkpoint):
            output = functional_call(module, own, call.args, call.kwargs)
        kept = {name: tensor for name, tensor in own.items() if not fits(tensor, call.tensors[name])}
        if other_mode:
            module.train(modes[0][1])
        for each, mode in modes:
            each.training = mode
        left = {name: tensor.detach() for name, tensor in own.items() if name not in kept}
        return _Copy(module, self.attributes, kept), _Result(output, left, stream.get_state())

    def is_like_after(self, later: "_Copy", call: LoneCall) -> bool:
        """Whether this gives what `later` gives with other parameters, and other tensors where the call sets them.

        The `call` begins with what a first call has left, and so with what that may have set for good.
        """

        def with_others(names: Collection[str]) -> LoneCall:
            draws = torch.Generator().manual_seed(0)
            own = {n: _changed(t, draws) if n in names or t.requires_grad else t for n, t in call.tensors.items()}
            return replace(call, tensors=own)

        try:
            all_others = with_others(call.tensors)
            other = with_others(self.run(all_others)[1].changed(all_others))
            # see `after_other_calls`
            begun = later.run(other, other_mode=True)[0] if self.is_scored else later
            return begun.run(other)[1].is_like(self.run(other)[1])
        except Exception:  # it takes no such tensors, so no trial meets them
            return True

    @property
    def is_scored(self) -> bool:
        """Whether a call is a score's."""
        return not self.module.training and not torch.is_grad_enabled()

    def states(self, call: LoneCall) -> list[Hashable]:
        """Describe what may be kept after `call`: training between two scores may have added something of its own."""
        found = [self.state()]
        if self.is_scored:
            with suppress(Exception):  # it has no such mode
                found.append(self.run(call, other_mode=True)[0].run(call)[0].state())
        return found

    def changed_in_the_other_mode(self, call: LoneCall) -> set[str]:
        """Return the names of the buffers that a call changes in evaluation if the module trains, and vice versa."""
        try:
            return self.run(call, other_mode=True)[1].changed(call)
        except Exception:  # it has no such mode
            return set(call.tensors)

    def after_other_calls(self, call: LoneCall, changing: set[str], mode: bool = False) -> "list[_Copy]":
        """Return what this is after other calls.

        Args:
            call: the call itself. The others are like it.
            changing: buffers whose values may differ there. Those of trained parameters do.
            mode: whether they are in the other mode.
        """
        draws = torch.Generator().manual_seed(0)
        tensors = {
            name: _changed(tensor, draws) if name in changing or tensor.requires_grad else tensor
            for name, tensor in call.tensors.items()
        }
        stream = generator(call.stream.device, seed=1)
        is_scored = not mode and self.is_scored
        found = []
        for change in (_itself, _other, _least):
            args, kwargs = tree_map(lambda x: change(x, draws), (call.args, call.kwargs))  # noqa: B023 - called at once
            other = LoneCall(tensors, args, kwargs, stream, call.ask)
            try:
                after = self.run(other, mode)[0]
                # between scores with other weights a trial has been trained, and `train()` may clear what was kept
                found.append(after.run(other, other_mode=True)[0] if is_scored else after)
                if is_scored:
                    found.append(self.run(replace(other, tensors=call.tensors))[0])
            except Exception:  # it takes no such inputs, so no trial meets them
                continue
        return found

    def state(self) -> Hashable:
        """Describe what is kept."""
        found: list[Hashable] = []
        for path, name in sorted(self.attributes):
            owner = self.module.get_submodule(path)
            tables = (vars(owner), owner._buffers, owner._parameters, owner._modules)
            values: list[Any] = [table[name] for table in tables if name in table]
            if "_hooks" in name and name in _OF_EVERY_MODULE:  # by a number that counts all hooks of the process
                values = [list(value.values()) for value in values]
            found.append((path, name, tuple(Describer()(value) for value in values)))
        return (*found, *((name, Describer()(tensor)) for name, tensor in sorted(self.kept.items())))


def _copied(module: nn.Module, call: LoneCall) -> nn.Module:
    """Copy a module with what it keeps. The inputs of `call` stay the very same."""
    inside = {id(each) for each in module.modules()}
    memo: dict[int, Any] = {id(x): x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, Tensor)}
    for each in module.modules():
        for _, part in contents({**vars(each), **each._buffers}, beyond=inside):
            if isinstance(part, Tensor) and not part.is_leaf and id(part) not in memo:
                memo[id(part)] = part.detach().clone()
    return copy.deepcopy(module, memo)


def is_saved(module: nn.Module, attribute: Attribute) -> bool:
    """Whether a `state_dict` holds what is at `attribute`."""
    path, name = attribute
    owner = module.get_submodule(path)
    return name in owner._buffers and name not in owner._non_persistent_buffers_set


def _itself(value: Any, draws: torch.Generator) -> Any:
    return value


def _changed(tensor: Tensor, draws: torch.Generator) -> Tensor:
    """Return another value of a parameter or buffer."""
    changed: Tensor = (
        _other(tensor, draws) if tensor.is_floating_point() else ~tensor if tensor.dtype is torch.bool else tensor + 1
    )
    return changed


def _other(value: Any, draws: torch.Generator) -> Any:
    """Return other values of the same type and shape, all of which the same code takes."""
    if not isinstance(value, Tensor) or not value.numel():
        return value
    if value.is_floating_point():
        noise = torch.randn(value.shape, generator=draws, dtype=torch.float64).to(value)
        return (value.detach() * (1 + 0.1 * noise) + 0.01 * noise).requires_grad_(value.requires_grad)
    drawn = torch.randint(value.numel(), value.shape, generator=draws).to(value.device)
    return value.flatten()[drawn]


def _least(value: Any, draws: torch.Generator) -> Any:
    """Return the least of an integer tensor's values, in all positions."""
    is_integer = isinstance(value, Tensor) and not value.is_floating_point() and value.numel()
    return value.min().expand(value.shape).contiguous() if is_integer and value.dtype is not torch.bool else value


def _alike(one: Any, other: Any) -> bool:
    """Whether two parts of results are equal but for rounding. Objects do not count, because no trial gets them."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and (not isinstance(one, PLAIN) or one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    ours, theirs = one.detach().double(), other.detach().double()
    apart = torch.where((ours == theirs) | (ours.isnan() & theirs.isnan()), 0.0, ours - theirs)
    eps = min(torch.finfo(one.dtype).eps, torch.finfo(torch.float32).eps)
    size = theirs.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt() if theirs.numel() else torch.tensor(0.0)
    return not apart.numel() or bool(apart.square().mean().sqrt() <= _ROUNDINGS * eps * size)
