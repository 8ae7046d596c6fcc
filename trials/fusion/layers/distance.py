"""Layers without parameters that compare two inputs."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from trials.fusion.layers.shape import inner
from trials.fusion.registry import JointLayer, rule


def align(pair: Sequence[Tensor], per_trial: Sequence[bool]) -> list[Tensor]:
    """Give two inputs the leading axis K, and equally many axes, so that they broadcast as each trial's own do."""
    ndim = max(x.ndim - own for x, own in zip(pair, per_trial, strict=True))
    aligned = []
    for x, own in zip(pair, per_trial, strict=True):
        shape = x.shape[1:] if own else x.shape
        aligned.append(x.reshape(x.shape[0] if own else 1, *[1] * (ndim - len(shape)), *shape))
    return aligned


@rule(nn.CosineSimilarity)
class FusedCosineSimilarity(JointLayer):
    """`nn.CosineSimilarity` of K trials."""

    def __init__(self, module: nn.CosineSimilarity, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.dim, self.eps = module.dim, module.eps

    def run_joint(self, values: Sequence[Tensor], per_trial: Sequence[bool], training: bool) -> tuple[Tensor, bool]:
        """Two tensors that broadcast, to one without the axis `dim`."""
        fused = any(per_trial)
        left, right = align(values, per_trial) if fused else values
        return functional.cosine_similarity(left, right, inner(self.dim) if fused else self.dim, self.eps), fused


@rule(nn.PairwiseDistance)
class FusedPairwiseDistance(JointLayer):
    """`nn.PairwiseDistance` of K trials."""

    def __init__(self, module: nn.PairwiseDistance, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.norm, self.eps, self.keepdim = module.norm, module.eps, module.keepdim

    def run_joint(self, values: Sequence[Tensor], per_trial: Sequence[bool], training: bool) -> tuple[Tensor, bool]:
        """Two tensors that broadcast, to one without the last axis."""
        fused = any(per_trial)
        left, right = align(values, per_trial) if fused else values
        return functional.pairwise_distance(left, right, self.norm, self.eps, self.keepdim), fused
