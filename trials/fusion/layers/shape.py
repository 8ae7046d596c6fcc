"""Layers that only reshape: they do no device work, so the gate is not asked."""

from torch import Tensor, nn

from trials.fusion.registry import Layer, refuse, rule


def inner(dim: int) -> int:
    """Return a trial's axis `dim` as an axis of the tensor with a leading K."""
    return dim + 1 if dim >= 0 else dim


@rule(nn.Identity)
class FusedIdentity(Layer):
    """`nn.Identity`."""

    free = True
    may_share = True

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """Return the input."""
        return x, per_trial


@rule(nn.Flatten)
class FusedFlatten(Layer):
    """`nn.Flatten`: the same axes of each trial."""

    free = True
    may_share = True

    def __init__(self, module: nn.Flatten, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.start, self.end = module.start_dim, module.end_dim

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """Merge the axes from `start_dim` to `end_dim` of each trial."""
        if not per_trial:
            return x.flatten(self.start, self.end), False
        return x.flatten(inner(self.start), inner(self.end)), True


@rule(nn.Unflatten)
class FusedUnflatten(Layer):
    """`nn.Unflatten`: the same axis of each trial."""

    free = True
    may_share = True

    def __init__(self, module: nn.Unflatten, path: str) -> None:
        """See `Layer`.

        Raises:
            FuseError: the axis is given by name.
        """
        super().__init__(module, path)
        if not isinstance(module.dim, int):
            raise refuse(path, module, "dim", module.dim, "allowed: an axis given by number")
        self.dim: int = module.dim
        self.sizes = module.unflattened_size

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """Split the axis `dim` of each trial."""
        return x.unflatten(inner(self.dim) if per_trial else self.dim, self.sizes), per_trial
