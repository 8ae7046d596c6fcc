"""Attention: K becomes part of the batch, and each trial drops weights by its own random stream.

Shapes: K trials, B examples, H heads, L queries, S keys, D numbers per head, V per value, E per position.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials.fusion.layers import linear
from trials.fusion.layers.dropout import Masks
from trials.fusion.own_code.streams import lent
from trials.fusion.registry import JointLayer, call_rule, lift, refuse, rule
from trials.fusion.rows import Rows


def attend(q_K: Tensor, k_K: Tensor, v_K: Tensor, mask: Tensor | None, masks: Masks | None, **options: Any) -> Tensor:
    """`functional.scaled_dot_product_attention` of K trials.

    Args:
        q_K: ``[K, ..., L, D]``, and so `k_K` and `v_K`.
        k_K: ``[K, ..., S, D]``.
        v_K: ``[K, ..., S, V]``.
        mask: None, or a tensor with as many axes as `q_K` that broadcasts to ``[K, ..., L, S]``: numbers to add to the
            scores, or True where to look.
        masks: drops weights; None: no dropout.
        options: `is_causal`, `scale`, `enable_gqa`, as PyTorch takes them.
    """
    if masks is not None and masks.any:
        if q_K.device.type == "cuda":
            return _one_by_one(q_K, k_K, v_K, mask, masks, **options)
        return _dropped(q_K, k_K, v_K, mask, masks, **options)
    if q_K.ndim != 5 or not q_K.shape[:2] == k_K.shape[:2] == v_K.shape[:2]:
        return functional.scaled_dot_product_attention(q_K, k_K, v_K, mask, **options)
    lead = q_K.shape[:2]  # the fast kernels take four axes
    if mask is not None:
        mask = mask[0] if mask.shape[:2] == (1, 1) else mask.expand(*lead, *mask.shape[2:]).flatten(0, 1)
    q_N, k_N, v_N = (x.flatten(0, 1) for x in (q_K, k_K, v_K))
    return functional.scaled_dot_product_attention(q_N, k_N, v_N, mask, **options).unflatten(0, lead)


def _one_by_one(q_K: Tensor, k_K: Tensor, v_K: Tensor, mask: Tensor | None, masks: Masks, **options: Any) -> Tensor:
    """Attend with dropout on a CUDA device, whose kernels draw in an order that no formula of ours repeats."""
    found = []
    for row, (rate, generator) in enumerate(zip(masks.rates_K, masks.generators, strict=True)):
        own = None if mask is None else mask[row if len(mask) > 1 else 0]
        with lent(generator):
            attended = functional.scaled_dot_product_attention(q_K[row], k_K[row], v_K[row], own, rate, **options)
        found.append(attended)
    return torch.stack(found)


def _dropped(
    q_K: Tensor,
    k_K: Tensor,
    v_K: Tensor,
    mask: Tensor | None,
    masks: Masks,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend with dropout by the formula that PyTorch documents, because its kernels have only one random stream."""
    if enable_gqa:
        k_K = k_K.repeat_interleave(q_K.shape[-3] // k_K.shape[-3], -3)
        v_K = v_K.repeat_interleave(q_K.shape[-3] // v_K.shape[-3], -3)
    scores = (q_K * (q_K.shape[-1] ** -0.5 if scale is None else scale)) @ k_K.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    # unlike softmax, zero where nothing may be looked at
    weights = torch.softmax(scores, -1) if mask is None else torch._safe_softmax(scores, -1)
    return masks.drop(weights) @ v_K


def _like_sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """The signature of `functional.scaled_dot_product_attention`, which Python cannot read from it."""


@call_rule(functional.scaled_dot_product_attention, like=_like_sdpa)
def _sdpa(values: Sequence[Any], per_trial: Sequence[bool], generators: list[torch.Generator]) -> tuple[Tensor, bool]:
    """Like `attend`. A mask of fewer axes broadcasts within each trial."""
    query, key, value, mask, dropout, causal, scale, gqa = values
    options = {"is_causal": causal, "scale": scale, **({"enable_gqa": True} if gqa else {})}
    size = len(generators)
    if not any(per_trial) and not dropout:
        return functional.scaled_dot_product_attention(query, key, value, mask, **options), False
    q_K, k_K, v_K = (lift(x, own, size) for x, own in zip((query, key, value), per_trial, strict=False))
    if mask is not None:
        shape = mask.shape[1:] if per_trial[3] else mask.shape
        mask = mask.reshape(size if per_trial[3] else 1, *[1] * (q_K.ndim - 1 - len(shape)), *shape)
    return attend(q_K, k_K, v_K, mask, Masks([dropout] * size, generators), **options), True


@rule(nn.MultiheadAttention)
class FusedMultiheadAttention(JointLayer):
    """`nn.MultiheadAttention` of K trials, step by step as in `functional.multi_head_attention_forward`."""

    varying = ("dropout",)

    def __init__(self, module: nn.MultiheadAttention, path: str) -> None:
        """See `Layer`. Its own code takes the weights of `out_proj`, and does not call it."""
        super().__init__(module, path)
        if not {"weight", "bias"} <= module.out_proj._parameters.keys():
            raise refuse(path, module, "out_proj", type(module.out_proj).__name__, "allowed: a layer with its weight")
        self.heads, self.batch_first, self.zero_attention = module.num_heads, module.batch_first, module.add_zero_attn

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.size = rows.size
        self.masks = Masks(rows.vector(self.path, "dropout"), rows.generators, rows.again)
        self.again = rows.again
        self.in_bias_KO = rows.get(self.path, "in_proj_bias")
        self.weight_KOI = rows.get(self.path, "in_proj_weight")
        self.weights_KOI = [rows.get(self.path, f"{name}_proj_weight") for name in "qkv"]
        self.out_weight_KOI = rows.require(self.path, "out_proj.weight")
        self.out_bias_KO = rows.get(self.path, "out_proj.bias")
        self.extra_k, self.extra_v = rows.get(self.path, "bias_k"), rows.get(self.path, "bias_v")

    def run_joint(
        self, values: Sequence[Any], per_trial: Sequence[bool], training: bool
    ) -> tuple[tuple[Tensor, Tensor | None], bool]:
        """Query, key and value, each ``[B, L, E]``, ``[L, B, E]`` or ``[L, E]`` per trial, masks and options."""
        query, key, value, padding, need_weights, mask, average, causal = values
        batched = query.ndim - per_trial[0] == 3
        if causal and mask is None:
            raise RuntimeError(f"module '{self.label}': is_causal is a hint about attn_mask; allowed: together with it")
        causal = causal and padding is None and not need_weights
        mask_K = None if causal else self._mask(mask, per_trial[5], padding, per_trial[3], query.dtype)
        q_K, k_K, v_K = self._project((query, key, value), per_trial, batched)
        masks = self.masks if training else None
        weights_K = None
        if need_weights:
            scores = (q_K * q_K.shape[-1] ** -0.5) @ k_K.transpose(-2, -1)
            weights_K = torch.softmax(scores if mask_K is None else scores + mask_K, -1)
            if masks is not None and masks.any:
                weights_K = masks.drop(weights_K)
            y_K = weights_K @ v_K
            weights_K = weights_K.mean(2) if average else weights_K
            weights_K = weights_K if batched else weights_K.squeeze(1)
        else:
            y_K = attend(q_K, k_K, v_K, mask_K, masks, is_causal=causal)
        # [K, L, B, E] in memory, as in the trial alone: a dropout that follows draws in this order
        y_K = linear.own(y_K.permute(0, 3, 1, 2, 4).flatten(3), self.out_weight_KOI, self.out_bias_KO, self.again)
        if not batched:
            y_K = y_K.squeeze(2)
        elif self.batch_first:
            y_K = y_K.transpose(1, 2)
        return (y_K, weights_K), True

    def _project(self, inputs: Sequence[Tensor], per_trial: Sequence[bool], batched: bool) -> list[Tensor]:
        """Query, key and value of all trials, ``[K, B, H, L, D]``."""
        query, key, value = inputs
        biases = [None] * 3 if self.in_bias_KO is None else self.in_bias_KO.chunk(3, 1)
        if self.weight_KOI is None:
            weights = self.weights_KOI
        elif query is key and key is value:
            projected = self._linear(query, per_trial[0], batched, self.weight_KOI, self.in_bias_KO).chunk(3, -1)
            return self._split(*projected)
        else:
            weights = list(self.weight_KOI.chunk(3, 1))
        return self._split(
            *(
                self._linear(x, own, batched, weight, bias)
                for x, own, weight, bias in zip(inputs, per_trial, weights, biases, strict=False)
            )
        )

    def _linear(self, x: Tensor, own: bool, batched: bool, weight_KOI: Tensor | None, bias_KO: Tensor | None) -> Tensor:
        """To ``[K, B, L, E]``."""
        assert weight_KOI is not None  # the module has either the packed weight or three
        if not batched:
            x = x.unsqueeze(int(own))
        elif not self.batch_first:
            x = x.transpose(int(own), int(own) + 1)
        return (linear.own if own else linear.shared)(x, weight_KOI, bias_KO, self.again)

    def _split(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Into heads; keys and values get the extra positions that the module may have."""
        if self.extra_k is not None and self.extra_v is not None:
            lead = (*key.shape[:2], 1, -1)
            key = torch.cat([key, self.extra_k.expand(lead)], 2)
            value = torch.cat([value, self.extra_v.expand(lead)], 2)
        q_K, k_K, v_K = (x.unflatten(-1, (self.heads, -1)).transpose(2, 3) for x in (query, key, value))
        if self.zero_attention:
            k_K, v_K = (functional.pad(x, (0, 0, 0, 1)) for x in (k_K, v_K))
        return [q_K, k_K, v_K]

    def _mask(
        self, mask: Tensor | None, mask_own: bool, padding: Tensor | None, padding_own: bool, dtype: torch.dtype
    ) -> Tensor | None:
        """What both masks add to the scores, broadcasting to ``[K, B, H, L, S]``."""
        parts = []
        if mask is not None:  # [L, S], or [B·H, L, S]
            part = _additive(mask, mask_own, dtype)
            parts.append(part[:, None, None] if part.ndim == 3 else part.unflatten(1, (-1, self.heads)))
        if padding is not None:  # [B, S], or [S] without a batch
            part = _additive(padding, padding_own, dtype)
            part = part if part.ndim == 3 else part.unsqueeze(1)
            parts.append(part[:, :, None, None])
        if not parts:
            return None
        extra = int(self.extra_k is not None) + int(self.zero_attention)
        return functional.pad(sum(parts[1:], parts[0]), (0, extra))


def _additive(mask: Tensor, own: bool, dtype: torch.dtype) -> Tensor:
    """Return a mask with a leading axis of K or 1. In an attention layer's mask, True is where not to look."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
    return mask if own else mask.unsqueeze(0)
