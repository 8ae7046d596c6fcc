"""K ordinary modules as one `nn.Module`, for a user's own training loop."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from trials.fusion import assemble
from trials.fusion.compared.structure import difference, structure
from trials.fusion.errors import FuseError
from trials.fusion.own_code.lending import hooks_aside
from trials.fusion.rows import Rows, generator, moved
from trials.fusion.units import Units
from trials.gate.base import OpenGate
from trials.optim import FusedOptimizer, optimizer_facts
from trials.optim import fuse_optimizers as over_rows


@dataclass(frozen=True, slots=True)
class PerTrial:
    """An input with a batch for each trial.

    Attributes:
        x_KB: ``[K, B, ...]``: K trials, B examples for each.
    """

    x_KB: Tensor


class FusedModule(nn.Module):
    """K modules of one structure in one module.

    Its parameters and buffers are those of the modules, with a leading axis K and the same names behind ``trials.``.
    Sum the loss over the trials, do not average it: then each trial gets its own gradient.
    """

    def __init__(self, models: Sequence[nn.Module], generators: Sequence[torch.Generator] | None = None) -> None:
        """See `fuse`."""
        super().__init__()
        if not models:
            raise FuseError("no models to fuse; allowed: at least one")
        structures = [structure(model) for model in models]
        for number, own in enumerate(structures):
            found = difference(structures[0].facts, own.facts)
            if found is not None:
                owner, name, one, other = found
                raise FuseError(
                    f"model {number} cannot be fused with model 0: {owner}: {name} is {other!r}, there {one!r}; "
                    "allowed: the same for all models; fuse models that differ separately"
                )
        if generators is not None and len(generators) != len(models):
            raise FuseError(f"{len(generators)} generators for {len(models)} models; allowed: one for each")
        self._device = next((tensor.device for tensor in models[0].parameters()), torch.device("cpu"))
        if generators is None:
            generators = [generator(self._device, int(seed)) for seed in torch.randint(2**62, (len(models),))]
        self._template = (copy.deepcopy(models[0]),)  # in a tuple, because it is no part of this module
        self._names_K = [WeakIdKeyDictionary({p: name for name, p in m.named_parameters()}) for m in models]
        self._optimizers: WeakSet[FusedOptimizer] = WeakSet()
        self._fused = assemble(models, structures, list(generators), Units(OpenGate()))
        self._modules["trials"] = nn.Module()
        self._register()
        self.train(models[0].training)

    @property
    def rows(self) -> Rows:
        """All tensors of the trials. Trial k is row k."""
        return self._fused.rows

    def forward(self, x: Tensor | PerTrial) -> Any:
        """All models at once.

        Args:
            x: one batch ``x_B...`` for all trials, or a `PerTrial`.

        Returns:
            The models' output, every tensor in it with a leading axis K.

        Raises:
            FuseError: the input has another number of trials.
        """
        forward = self._fused.train if self.training else self._fused.eval
        for parameter in self.rows.parameters.values():
            hooks_aside(parameter)
        if not isinstance(x, PerTrial):
            output = forward.run(x, self._device)
        elif x.x_KB.shape[:1] == (self.rows.size,):
            output = forward.run(x.x_KB, self._device, per_trial=True)
        else:
            raise FuseError(f"PerTrial input of shape {list(x.x_KB.shape)}; allowed: {self.rows.size} trials first")
        if self._optimizers:
            self.rows.reached.start_at(output)
        else:
            self.rows.reached.forget()
        return output

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `nn.Module`."""
        super().zero_grad(set_to_none)
        if set_to_none:
            self.rows.forget_gradients()

    def extract(self, row: int) -> nn.Module:
        """Trial `row` as an ordinary module, with copies of its tensors."""
        module = copy.deepcopy(self._template[0])
        stacked = {**self.rows.parameters, **self.rows.buffers}
        own_row = {name: tensor.detach()[row].clone() for name, tensor in stacked.items()}
        own_row.update({name: own_row[first] for name, first in self.rows.aliases.items()})
        for name, value in own_row.items():
            path, _, own = name.rpartition(".")
            owner = module.get_submodule(path)
            current = getattr(owner, own)
            if isinstance(current, nn.Parameter):
                current.data = value  # and so in every module that is tied to it
            elif own in owner._buffers:
                current.data = value
            else:
                setattr(owner, own, value)
        for path, table in self.rows.vectors.items():
            for name, values in table.items():
                setattr(module.get_submodule(path), name, values[row])
        return module.train(self.training)

    def ways(self) -> list[tuple[str, str]]:
        """Each layer's name, and how its forward is computed in the present mode; known after a first call."""
        return list((self._fused.train if self.training else self._fused.eval).ways())

    def _register(self) -> None:
        """Make the rows' tensors this module's own, so that `parameters`, `state_dict` and `to` find them."""
        for name, parameter in self.rows.parameters.items():
            _owner(self._modules["trials"], name)._parameters[name.rpartition(".")[2]] = parameter
        for name, buffer in self.rows.buffers.items():
            _owner(self._modules["trials"], name)._buffers[name.rpartition(".")[2]] = buffer

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FusedModule":
        super()._apply(fn, recurse)
        rows, root = self.rows, self._modules["trials"]
        for name in rows.parameters:
            parameter = _owner(root, name)._parameters[name.rpartition(".")[2]]
            assert parameter is not None  # registered above
            rows.parameters[name] = parameter
        for name in rows.buffers:
            buffer = _owner(root, name)._buffers[name.rpartition(".")[2]]
            assert buffer is not None
            rows.buffers[name] = buffer
        self._device = next((tensor.device for tensor in rows.parameters.values()), self._device)
        rows.generators = [own if own.device == self._device else moved(own, self._device) for own in rows.generators]
        self._fused.bind()
        for optimizer in self._optimizers:
            optimizer.moved()
        return self


def fuse(models: Sequence[nn.Module], generators: Sequence[torch.Generator] | None = None) -> FusedModule:
    """Make one module from K modules of one structure. The models themselves do not change.

    Args:
        models: one per trial; their tensors are copied.
        generators: a random stream per trial (dropout); None: they are seeded from the global random numbers.

    Returns:
        A module that takes a batch ``x_B...`` for all trials, or a `PerTrial`, and returns outputs ``y_KB...``.

    Raises:
        FuseError: they cannot be fused. The message names the module, the difference and what is allowed.
    """
    return FusedModule(models, generators)


def fuse_optimizers(optimizers: Sequence[torch.optim.Optimizer], fused: FusedModule) -> FusedOptimizer:
    """Make one optimizer for `fused` from K ordinary ones, each over the parameters of one of the fused models.

    The optimizers' state is copied. Each step reads hyperparameters from their `param_groups`, so a scheduler of one of
    them still works.

    Args:
        optimizers: one per trial, in the order of the models.
        fused: the fused models.

    Returns:
        An optimizer with `zero_grad` and `step`; its `extract(k)` is the `state_dict` of trial k's own.

    Raises:
        FuseError: they cannot be fused. The message names the optimizer, the difference and what is allowed.
    """
    if len(optimizers) != fused.rows.size:
        raise FuseError(f"{len(optimizers)} optimizers for {fused.rows.size} models; allowed: one for each")
    names_K = [{id(parameter): name for parameter, name in table.items()} for table in fused._names_K]
    facts_K = [optimizer_facts(names, optimizer) for names, optimizer in zip(names_K, optimizers, strict=True)]
    for number, facts in enumerate(facts_K):
        found = difference(facts_K[0], facts)
        if found is not None:
            owner, name, one, other = found
            raise FuseError(
                f"optimizer {number} cannot be fused with optimizer 0: {owner}: {name} is {other!r}, there {one!r}; "
                "allowed: the same for all"
            )
    for optimizer in optimizers:
        vars(optimizer)["_opt_called"] = True  # else its scheduler would warn that it steps too early
    made = over_rows(optimizers, fused.rows, names_K)
    fused._optimizers.add(made)
    return made


def _owner(root: nn.Module | None, name: str) -> nn.Module:
    """Return the module below `root` that holds the tensor called `name`; make it if there is none."""
    assert root is not None  # made with the fused module
    for part in name.split(".")[:-1]:
        root = root._modules.setdefault(part, nn.Module())
        assert root is not None  # just made
    return root
