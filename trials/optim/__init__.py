"""Makes one optimizer from the optimizers of K trials.

`registry` lists the update rules, one file per family (`sgd`, `adam`, ...), imported below. They compute with vectors
over trials (`vector`, `block`), some by one kernel on a device (`multi_tensor`). Optimizers without a rule run as K
originals (`originals`).
"""

from collections.abc import Mapping, Sequence

import torch

from trials.fusion.rows import Rows
from trials.fusion.ways import Way
from trials.optim import adam as _adam  # noqa: F401 - each of these fills the table
from trials.optim import adaptive as _adaptive  # noqa: F401
from trials.optim import muon as _muon  # noqa: F401
from trials.optim import sgd as _sgd  # noqa: F401
from trials.optim.facts import Names, holder_of, optimizer_facts, rule_of
from trials.optim.fused import FusedOptimizer
from trials.optim.gradients import Gradients
from trials.optim.originals import Originals
from trials.optim.vector import VectorOptimizer
from trials.shrinking.rules import Multipliers

__all__ = ["FusedOptimizer", "Gradients", "fuse_optimizers", "holder_of", "optimizer_facts"]


def fuse_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    rows: Rows,
    names_K: Sequence[Names],
    holders: Sequence[torch.optim.Optimizer] | None = None,
    widest: int = 1,
    way: Way = "rules",
    scales: Mapping[str, Multipliers] | None = None,
) -> FusedOptimizer:
    """Fuse optimizers that agree in `optimizer_facts`: by vectors, or else K originals on views of the rows.

    Args:
        optimizers: one per trial, over the parameters of its own model; their state is copied.
        rows: the parameters of all trials.
        names_K: per trial, the id of each parameter of its model -> its name (`canonical_names`).
        holders: what `holder_of` has made of each, to hold the hyperparameters; by default `optimizers` themselves, so
            that schedulers made for these still work.
        widest: the largest K to expect, for the size of units.
        way: how the trials are trained; vectors are for "rules" alone.
        scales: what each parameter's settings are multiplied by, if the models are surrogates.
    """
    if way != "rules" or rule_of(optimizers[0]) is None:
        return Originals(optimizers, names_K, rows, holders, scales)
    return VectorOptimizer(optimizers, names_K, rows, holders, widest, scales)
