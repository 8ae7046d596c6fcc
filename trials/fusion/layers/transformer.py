"""Layers of `torch.nn` that are made of other layers: their `forward`, without the branches that cannot be traced.

Those branches choose a faster kernel for inference, or detect that a mask is causal. Neither changes a result,
except that an encoder sets padded positions to zero there.
"""

import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from trials.fusion.errors import FuseError
from trials.fusion.graph.tracer import recorded
from trials.fusion.registry import forward_of

_OFF_IN_EVALUATION = (_DropoutNd, nn.Identity)
_INSIDE: dict[str, type[nn.Module] | tuple[type[nn.Module], ...]] = {
    **{"self_attn": nn.MultiheadAttention, "norm1": nn.LayerNorm, "norm2": nn.LayerNorm},
    **{"linear1": nn.Linear, "linear2": nn.Linear},
    **dict.fromkeys(("dropout", "dropout1", "dropout2"), _OFF_IN_EVALUATION),
}
_ACTIVATIONS: dict[int, tuple[Any, type[nn.Module]]] = {1: (functional.relu, nn.ReLU), 2: (functional.gelu, nn.GELU)}
_METHODS = {name: getattr(nn.TransformerEncoderLayer, name) for name in ("_sa_block", "_ff_block")}


def refuse_passed_over(model: nn.Module, modes: Mapping[str, bool]) -> None:
    """Refuse encoder layers of which PyTorch's kernel for inference computes something else than their code.

    Under `vmap`, and where an audit watches, PyTorch runs the code.

    Args:
        model: one trial's.
        modes: path -> whether that module is in training mode while the model is evaluated.

    Raises:
        FuseError: there is one.
    """
    for path, layer in model.named_modules():
        if not isinstance(layer, nn.TransformerEncoderLayer) or modes[path] or not _has_kernel(layer):
            continue
        on = {name for name in _INSIDE if modes.get(f"{path}.{name}" if path else name)}
        if name := _passed_over(layer, on):
            raise FuseError(
                f"module '{path}' ({type(layer).__name__}): in evaluation, a kernel of PyTorch's takes the weights "
                f"inside, and does not call '{name}' ({type(getattr(layer, name)).__name__}), so a score would leave "
                "out what that does; allowed: torch.backends.mha.set_fastpath_enabled(False) in the study's file"
            )


def _has_kernel(layer: nn.TransformerEncoderLayer) -> bool:
    """Whether PyTorch may compute a `layer` by one kernel in evaluation. It asks for names only, not for types."""
    attention = getattr(layer, "self_attn", None)
    eps = [getattr(getattr(layer, name, None), "eps", None) for name in ("norm1", "norm2")]
    return bool(
        torch.backends.mha.get_fastpath_enabled()
        and _may_run_pytorchs_forward(layer)
        and getattr(layer, "activation_relu_or_gelu", 0)
        and getattr(attention, "batch_first", False)
        and getattr(attention, "in_proj_bias", None) is not None
        and getattr(attention, "_qkv_same_embed_dim", False)
        and getattr(attention, "num_heads", 1) % 2 == 0
        and eps[0] == eps[1]
    )


def _may_run_pytorchs_forward(layer: nn.TransformerEncoderLayer) -> bool:
    """Whether it has no `forward` of its own, or one that may call PyTorch's."""
    kind = type(layer)
    if "forward" in vars(layer) or kind.forward is nn.TransformerEncoderLayer.forward:
        return True
    above = kind.__mro__[: kind.__mro__.index(nn.TransformerEncoderLayer)]
    own = [inspect.unwrap(each) for base in above for each in vars(base).values() if isinstance(each, FunctionType)]
    return any("forward" in getattr(getattr(each, "__code__", None), "co_names", ()) for each in own)


def _passed_over(layer: nn.TransformerEncoderLayer, on: set[str]) -> str:
    """Return the name of what in a `layer` does something that its kernel leaves out, or nothing.

    Those in `on` are in training mode.
    """
    for name, method in _METHODS.items():
        if name in vars(layer) or getattr(type(layer), name) is not method:
            return name
    for name, allowed in _INSIDE.items():
        own = getattr(layer, name, None)
        if own is None:  # its code has no use for it
            continue
        is_plain = isinstance(own, allowed) and type(own).forward.__module__.startswith("torch.nn.")
        drops = name in on and getattr(own, "p", getattr(own, "dropout", 0.0)) > 0
        if not is_plain or drops or "forward" in vars(own):
            return name
    if layer.self_attn.bias_k is not None or layer.self_attn.add_zero_attn:
        return "self_attn"
    act, (function, kind) = layer.activation, _ACTIVATIONS[layer.activation_relu_or_gelu]
    is_exact = act is function or (type(act) is kind and getattr(act, "approximate", "none") == "none")
    return "" if is_exact else "activation"


@forward_of(nn.TransformerEncoderLayer)
def encoder_layer(
    self: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """`nn.TransformerEncoderLayer`."""
    x = src
    if self.norm_first:
        x = x + self._sa_block(self.norm1(x), src_mask, src_key_padding_mask, is_causal=is_causal)
        return x + self._ff_block(self.norm2(x))
    x = self.norm1(x + self._sa_block(x, src_mask, src_key_padding_mask, is_causal=is_causal))
    return self.norm2(x + self._ff_block(x))


@forward_of(nn.TransformerEncoder)
def encoder(
    self: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """`nn.TransformerEncoder`."""
    for layer in self.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal))
    first = self.layers[0]
    if self.use_nested_tensor and not first.training and src_key_padding_mask is not None and mask is None:
        src = recorded(_zeroed)(src, src_key_padding_mask, self.mask_check, _trains(first))
    return src if self.norm is None else self.norm(src)


def _trains(layer: nn.Module) -> bool:
    """Whether one of the parameters is trained at which `nn.TransformerEncoder` looks."""
    return any(parameter.requires_grad for parameter in layer.parameters())


def _zeroed(x_BTE: Tensor, padding_BT: Tensor, check: bool, trains: bool) -> Tensor:
    """Set padded positions to zero where `nn.TransformerEncoder` computes without them, as nested tensors."""
    is_fast = torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()
    if x_BTE.ndim != 3 or not is_fast or (torch.is_grad_enabled() and (trains or x_BTE.requires_grad)):
        return x_BTE
    padded_BT = padding_BT if padding_BT.dtype is torch.bool else padding_BT != 0
    ends_BT = padded_BT[:, 1:] | ~padded_BT[:, :-1]  # none begins before the end of a sequence
    zero_BT = padded_BT & ends_BT.all() if check else padded_BT
    return x_BTE.masked_fill(zero_BT.unsqueeze(-1), 0.0)


@forward_of(nn.TransformerDecoderLayer)
def decoder_layer(
    self: nn.TransformerDecoderLayer,
    tgt: Tensor,
    memory: Tensor,
    tgt_mask: Tensor | None = None,
    memory_mask: Tensor | None = None,
    tgt_key_padding_mask: Tensor | None = None,
    memory_key_padding_mask: Tensor | None = None,
    tgt_is_causal: bool = False,
    memory_is_causal: bool = False,
) -> Tensor:
    """`nn.TransformerDecoderLayer`."""
    own = (tgt_mask, tgt_key_padding_mask, tgt_is_causal)
    other = (memory, memory_mask, memory_key_padding_mask, memory_is_causal)
    x = tgt
    if self.norm_first:
        x = x + self._sa_block(self.norm1(x), *own)
        x = x + self._mha_block(self.norm2(x), *other)
        return x + self._ff_block(self.norm3(x))
    x = self.norm1(x + self._sa_block(x, *own))
    x = self.norm2(x + self._mha_block(x, *other))
    return self.norm3(x + self._ff_block(x))


@forward_of(nn.TransformerDecoder)
def decoder(
    self: nn.TransformerDecoder,
    tgt: Tensor,
    memory: Tensor,
    tgt_mask: Tensor | None = None,
    memory_mask: Tensor | None = None,
    tgt_key_padding_mask: Tensor | None = None,
    memory_key_padding_mask: Tensor | None = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> Tensor:
    """`nn.TransformerDecoder`."""
    for layer in self.layers:
        tgt = layer(
            tgt,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=bool(tgt_is_causal),
            memory_is_causal=memory_is_causal,
        )
    return tgt if self.norm is None else self.norm(tgt)


@forward_of(nn.Transformer)
def transformer(  # noqa: PLR0913 - as PyTorch's own
    self: nn.Transformer,
    src: Tensor,
    tgt: Tensor,
    src_mask: Tensor | None = None,
    tgt_mask: Tensor | None = None,
    memory_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    tgt_key_padding_mask: Tensor | None = None,
    memory_key_padding_mask: Tensor | None = None,
    src_is_causal: bool | None = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> Tensor:
    """`nn.Transformer`."""
    memory = self.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal)
    return self.decoder(
        tgt,
        memory,
        tgt_mask=tgt_mask,
        memory_mask=memory_mask,
        tgt_key_padding_mask=tgt_key_padding_mask,
        memory_key_padding_mask=memory_key_padding_mask,
        tgt_is_causal=tgt_is_causal,
        memory_is_causal=memory_is_causal,
    )
