"""Layers of `torch.nn` that are made of other layers: their `forward`, without the branches that cannot be traced.

Those branches choose a faster kernel for inference, or detect that a mask is causal. Neither changes a result,
except that an encoder sets padded positions to zero there.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials.fusion.errors import FuseError
from trials.fusion.graph.tracer import recorded
from trials.fusion.registry import forward_of

_INSIDE: dict[str, type[nn.Module]] = {
    **{"self_attn": nn.MultiheadAttention, "norm1": nn.LayerNorm, "norm2": nn.LayerNorm},
    **{"linear1": nn.Linear, "linear2": nn.Linear},
    **dict.fromkeys(("dropout", "dropout1", "dropout2"), nn.Module),
}


def refuse_passed_over(model: nn.Module) -> None:
    """Refuse encoder layers of which PyTorch's kernel for inference computes something else than their code.

    Under `vmap`, and where an audit watches, PyTorch runs the code.

    Raises:
        FuseError: there is one.
    """
    for path, layer in model.named_modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and _has_kernel(layer) and (name := _passed_over(layer)):
            raise FuseError(
                f"module '{path}' ({type(layer).__name__}): in evaluation, a kernel of PyTorch's takes the weights "
                f"inside, and does not call '{name}' ({type(getattr(layer, name)).__name__}), so a score would leave "
                "out what that does; allowed: torch.backends.mha.set_fastpath_enabled(False) in the study's file"
            )


def _has_kernel(layer: nn.TransformerEncoderLayer) -> bool:
    """Whether PyTorch may compute a `layer` by one kernel in evaluation."""
    attention = layer.self_attn
    return bool(
        torch.backends.mha.get_fastpath_enabled()
        and layer.activation_relu_or_gelu
        and isinstance(attention, nn.MultiheadAttention)
        and attention.batch_first
        and attention.in_proj_bias is not None
        and attention._qkv_same_embed_dim
        and attention.num_heads % 2 == 0
        and getattr(layer.norm1, "eps", None) == getattr(layer.norm2, "eps", None)
    )


def _passed_over(layer: nn.TransformerEncoderLayer) -> str:
    """Return the name of what in a `layer` does something that its kernel leaves out, or nothing."""
    for name, kind in _INSIDE.items():
        own = getattr(layer, name)
        is_plain = isinstance(own, kind) and type(own).forward.__module__.startswith("torch.nn.")
        if not is_plain or "forward" in vars(own):
            return name
    if layer.self_attn.bias_k is not None or layer.self_attn.add_zero_attn:
        return "self_attn"
    act = layer.activation
    if layer.activation_relu_or_gelu == 1:
        return "" if act is functional.relu or type(act) is nn.ReLU else "activation"
    is_exact = act is functional.gelu or (type(act) is nn.GELU and act.approximate == "none")
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
