"""Layers of `torch.nn` that are made of other layers: their `forward`, without the branches that cannot be traced.

Those branches choose a faster kernel for inference, or detect that a mask is causal. Neither changes a result,
except that a padded position, which no code should read, may become zero there.
"""

from torch import Tensor, nn

from trials.fusion.registry import forward_of


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
    return src if self.norm is None else self.norm(src)


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
