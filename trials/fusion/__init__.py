"""Makes one model from K models of one structure.

`registry` lists the rules for layers, one file per family in `layers/`. `rows` holds the tensors of all trials. The
forward is a list of steps (`trace`, `program`), or the user's own code as a whole (`forward`, `mapped`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trials.fusion.compared.structure import Structure, leaves, rule_for, stack, structure
from trials.fusion.forward import Forward
from trials.fusion.graph.trace import FORWARD
from trials.fusion.layers import activations as _activations  # noqa: F401 - each of these fills the table
from trials.fusion.layers import attention as _attention  # noqa: F401
from trials.fusion.layers import conv as _conv  # noqa: F401
from trials.fusion.layers import distance as _distance  # noqa: F401
from trials.fusion.layers import drop_path as _drop_path  # noqa: F401
from trials.fusion.layers import dropout as _dropout  # noqa: F401
from trials.fusion.layers import embedding as _embedding  # noqa: F401
from trials.fusion.layers import linear as _linear  # noqa: F401
from trials.fusion.layers import lora as _lora  # noqa: F401
from trials.fusion.layers import noise as _noise  # noqa: F401
from trials.fusion.layers import norm as _norm  # noqa: F401
from trials.fusion.layers import per_example as _per_example  # noqa: F401
from trials.fusion.layers import pool as _pool  # noqa: F401
from trials.fusion.layers import recurrent as _recurrent  # noqa: F401
from trials.fusion.layers import shape as _shape  # noqa: F401
from trials.fusion.layers import transformer as _transformer  # noqa: F401
from trials.fusion.registry import FuseError, Layer, rule
from trials.fusion.rows import Rows
from trials.fusion.units import Units
from trials.fusion.ways import Way

__all__ = ["FuseError", "Fused", "Layer", "Rows", "Structure", "assemble", "rule", "structure"]


@dataclass(frozen=True, slots=True)
class Fused:
    """K models as one.

    Attributes:
        rows: all their tensors.
        layers: path -> fused layer, or why there is none.
        phases: the methods that a training step calls, by default `forward` alone.
        eval: their forward in evaluation mode.
    """

    rows: Rows
    layers: dict[str, Layer | Exception]
    phases: dict[str, Forward]
    eval: Forward

    @property
    def train(self) -> Forward:
        """Their forward in training mode, if that is the only phase."""
        return self.phases[FORWARD]

    def bind(self) -> None:
        """Let layers and forwards take the tensors of `rows`. Call it after each change of them."""
        for layer in self.layers.values():
            if isinstance(layer, Layer):
                layer.bind(self.rows)
        for phase in self.phases.values():
            phase.bind(self.rows)
        self.eval.bind(self.rows)


def assemble(
    models: Sequence[nn.Module],
    structures: Sequence[Structure],
    generators: list[torch.Generator],
    units: Units,
    way: Way = "rules",
    once: Collection[str] = (),
) -> Fused:
    """Fuse models of one structure.

    Args:
        models: one per trial; their tensors are copied.
        structures: theirs, with equal facts.
        generators: a random stream per trial.
        units: where the forward's units are numbered.
        way: how they are trained; `structures` have no graphs unless by rules.
        once: the names of frozen parameters that are equal in all models, to be held once.

    Raises:
        FuseError: two models share a tensor, or one cannot be copied.
    """
    model, common = models[0], structures[0]
    rows = stack(models, structures, generators, once)
    rows.again, rows.settle = units.again, units.settle
    layers: dict[str, Layer | Exception] = {
        path: rule_for(model.get_submodule(path), path) for path in leaves(common.graphs)
    }
    phases = {
        name: Forward(model, graph, layers, common.train_modes, units, common.untraced, common.watch, name, way)
        for name, graph in common.phases.items()
    }
    evaluate = Forward(model, common.eval, layers, common.eval_modes, units, common.untraced, common.watch, way=way)
    fused = Fused(rows, layers, phases, evaluate)
    fused.bind()
    rows.rebind = fused.bind
    return fused
