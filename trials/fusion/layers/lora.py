"""Layers of `peft` and `transformers`: low-rank adapters beside a layer, and the layer of GPT-2 that they adapt.

Shapes: K trials, B examples, I inputs, O outputs.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trials.fusion.layers import linear
from trials.fusion.registry import FuseError, Layer, find, leading, lift, refuse, rule_named
from trials.fusion.rows import Rows


@rule_named("transformers.pytorch_utils.Conv1D")
class FusedConv1D(Layer):
    """`transformers`' linear layer with a transposed weight, of K trials."""

    weight_KIO: Tensor
    bias_KO: Tensor

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.weight_KIO = rows.require(self.path, "weight")
        self.bias_KO = rows.require(self.path, "bias")
        self.again = rows.again

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """``x_KB...I`` or ``x_B...I`` to ``y_KB...O``."""
        return linear.multiplied(x, per_trial, self.weight_KIO.mT, self.bias_KO, self.again)


@rule_named("peft.tuners.lora.layer.Linear")
class FusedLora(Layer):
    """`peft`'s ``base(x) + B(A(dropout(x))) * scaling`` of K trials (Hu et al. 2021, section 4.1).

    Scalings and dropout rates may differ between trials. Ranks may not, because they are shapes.
    """

    varying: ClassVar[tuple[str, ...]] = ("scaling", "lora_alpha")

    def __init__(self, module: nn.Module, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        own: Any = module
        adapters = own.active_adapters
        if len(adapters) != 1 or list(own.lora_A) != adapters:
            raise refuse(path, module, "active adapters", adapters, "allowed: the only one that it has")
        (self.adapter,) = adapters
        for name, value in (
            ("merged", own.merged),
            ("disable_adapters", own.disable_adapters),
            ("lora_variant", bool(own.lora_variant)),
        ):
            if value:
                raise refuse(path, module, name, value, "allowed: False")
        names = ("base_layer", *(f"{kind}.{self.adapter}" for kind in ("lora_dropout", "lora_A", "lora_B")))
        self.inner = tuple(f"{path}.{name}" if path else name for name in names)
        parts = [module.get_submodule(name) for name in names]
        if any(part.training != module.training for part in parts):
            raise FuseError(f"module '{path}' ({type(module).__name__}) has layers in another mode than its own")
        self.base, self.drop, self.a, self.b = (
            find(part, own_path)(part, own_path) for part, own_path in zip(parts, self.inner, strict=True)
        )
        self.casts = own.cast_input_dtype_enabled

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        for part in (self.base, self.drop, self.a, self.b):
            part.bind(rows)
        self.kind = rows.require(f"{self.path}.lora_A.{self.adapter}", "weight").dtype
        scalings: list[Any] = rows.vector(self.path, "scaling")
        self.scaling_K = [float(own[self.adapter]) for own in scalings]
        self.is_recordable = self.scaling_K.count(self.scaling_K[0]) == len(self.scaling_K)

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """``x_KB...I`` or ``x_B...I`` to ``y_KB...O``."""
        y, own = self.base.run(x, per_trial, training)
        h, per_trial = self.drop.run(x.to(self.kind) if self.casts else x, per_trial, training)
        h, per_trial = self.a.run(h, per_trial, training)
        h, per_trial = self.b.run(h, per_trial, training)
        size = len(self.scaling_K)
        if self.scaling_K.count(self.scaling_K[0]) == size:
            scaled = h * self.scaling_K[0]
        else:  # in the type in which a product with a Python number is computed
            wide = lift(h, per_trial, size).to(torch.promote_types(h.dtype, torch.float32))
            scaled, per_trial = (wide * leading(self.scaling_K, wide, wide.ndim)).to(h.dtype), True
        return (y + scaled).to(y.dtype), own or per_trial
