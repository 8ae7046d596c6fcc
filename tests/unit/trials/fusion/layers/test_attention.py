"""Attention and the layers of transformers, with every mask and option."""

import itertools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.fused_and_solo import RecordingGate, ToyStudy, assert_fused_is_solo, members
from tests.support.layer_cases import fresh
from tests.support.slow_cases import others_slow
from trials import FuseError, TrialGroup

pytestmark = pytest.mark.usefixtures("only_rules")

B, L, S, E, H = 3, 4, 5, 6, 2
STEPS = 3

CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)
CROSS = torch.rand(L, S, generator=torch.Generator().manual_seed(1)) < 0.3
CROSS[:, 0] = False
PER_HEAD = (torch.rand(B * H, L, S, generator=torch.Generator().manual_seed(2)) < 0.3).logical_and(torch.arange(S) > 0)
PADDING = torch.arange(S) >= torch.tensor([[5], [3], [4]])


def added(mask: Tensor) -> Tensor:
    """A mask of truth values as numbers to add, some of them finite."""
    numbers = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return numbers.masked_fill(mask, -torch.inf)


class Attention(nn.Module):
    """Self-attention, or attention to another sequence, of which query or keys may be the shared input."""

    def __init__(
        self, n: int, own: tuple[bool, bool], call: dict[str, Any], masks: dict[str, Tensor], **options: Any
    ) -> None:
        super().__init__()
        self.batch_first = options.get("batch_first", False)
        self.ask = nn.Linear(E, E)
        # without bias, which softmax would take out again, so that its gradient is rounding noise
        self.tell = nn.Linear(E, options.get("kdim") or E, bias=False)
        self.also = nn.Linear(E, options.get("vdim") or E)
        self.attention = fresh(nn.MultiheadAttention(E, H, dropout=0.1 * n, **options))
        self.own, self.call = own, call
        self.names = list(masks)
        for name, mask in masks.items():
            self.register_buffer(name, mask.clone())

    def forward(self, x: Tensor) -> Tensor:
        query = x[:, :L] if self.batch_first else x[:L]
        query = self.ask(query) if self.own[0] else query
        key = self.tell(x) if self.own[1] else x
        value = self.also(x) if self.own[1] else key
        masks = {name: getattr(self, name) for name in self.names}
        out, weights = self.attention(query, key, value, **self.call, **masks)
        return out + weights.square().sum() if self.call.get("need_weights", True) else out


MASKS: dict[str, dict[str, Tensor]] = {
    "no mask": {},
    "truth": {"attn_mask": CROSS},
    "numbers": {"attn_mask": added(CROSS)},
    "truth per head": {"attn_mask": PER_HEAD},
    "numbers per head": {"attn_mask": added(PER_HEAD)},
    "padding": {"key_padding_mask": PADDING},
    "padding in numbers": {"key_padding_mask": added(PADDING)},
    "both": {"attn_mask": CROSS, "key_padding_mask": PADDING},
    (ALL_MASKS := "both, per head, in numbers"): {"attn_mask": added(PER_HEAD), "key_padding_mask": added(PADDING)},
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "without bias": {"bias": False, "batch_first": True},
    "extra key": {"add_bias_kv": True, "batch_first": True},
    "zero": {"add_zero_attn": True},
    "extra key and zero": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "other widths": {"kdim": 4, "vdim": 3, "batch_first": True},
    "other widths without bias": {"kdim": 4, "vdim": 3, "bias": False},
}

WEIGHTS: dict[str, dict[str, Any]] = {
    "mean weights": {},
    "weights per head": {"average_attn_weights": False},
    "no weights": {"need_weights": False},
}


def sequences(batch_first: bool, length: int = S, batched: bool = True) -> list[Tensor]:
    shape = ((B, length, E) if batch_first else (length, B, E)) if batched else (length, E)
    stream = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=stream, dtype=torch.float64) for _ in range(2)]


def check(own: tuple[bool, bool], call: dict[str, Any], masks: dict[str, Tensor], **options: Any) -> None:
    inputs = sequences(options.get("batch_first", False))
    assert_fused_is_solo(lambda n: Attention(n, own, call, masks, **options), inputs, steps=STEPS)


@pytest.mark.parametrize(
    ("masks", "weights"),
    others_slow(
        product(MASKS, WEIGHTS), [(masks, ("weights per head", "no weights")[at % 2]) for at, masks in enumerate(MASKS)]
    ),
)
def test_masks_and_weights(masks: str, weights: str) -> None:
    check((True, True), WEIGHTS[weights], MASKS[masks], batch_first=True)


@pytest.mark.parametrize(
    ("options", "weights", "masks"),
    others_slow(
        product(OPTIONS, ["mean weights", "no weights"], ["no mask", ALL_MASKS]),
        [(options, ("mean weights", "no weights")[at % 2], ALL_MASKS) for at, options in enumerate(OPTIONS)],
    ),
)
def test_options_of_the_layer(options: str, weights: str, masks: str) -> None:
    check((True, True), WEIGHTS[weights], MASKS[masks], **OPTIONS[options])


@pytest.mark.parametrize("own", [*itertools.product([True, False], repeat=2)])
@pytest.mark.parametrize("options", ["plain", "extra key and zero"])
def test_shared_and_own_inputs(own: tuple[bool, bool], options: str) -> None:
    check(own, WEIGHTS["no weights"], MASKS["both"], **OPTIONS[options])


class SelfAttention(nn.Module):
    """One tensor as query, key and value, with masks that the code makes or keeps as constants."""

    def __init__(self, n: int, first: bool, call: dict[str, Any], **options: Any) -> None:
        super().__init__()
        self.a, self.attention = nn.Linear(E, E), fresh(nn.MultiheadAttention(E, H, dropout=0.1 * n, **options))
        self.first, self.call = first, call

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first else self.a(x)
        return self.a(self.attention(x, x, x, **self.call)[0])


@pytest.mark.parametrize(
    ("options", "batched", "first"),
    others_slow(
        product(["plain", "batch first", "extra key"], [True, False], [True, False]),
        [("plain", True, False), ("plain", False, True), ("extra key", True, True), ("extra key", False, False)],
    ),
)
def test_self_attention(options: str, batched: bool, first: bool) -> None:
    kept = OPTIONS[options]
    inputs = sequences(kept.get("batch_first", False), L, batched)
    padding = {} if batched else {"key_padding_mask": torch.arange(L) > 2, "average_attn_weights": False}
    for call in ({}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}, {"attn_mask": CAUSAL, **padding}):
        assert_fused_is_solo(lambda n, call=call: SelfAttention(n, first, call, **kept), inputs, steps=STEPS)


def test_causal_hint_without_a_mask() -> None:
    with pytest.raises(RuntimeError, match="is_causal is a hint about attn_mask"):
        assert_fused_is_solo(lambda n: SelfAttention(n, False, {"is_causal": True}), sequences(False))


def test_wrong_call_of_attention_is_named() -> None:
    with pytest.raises(FuseError, match=r"'attention.MultiheadAttention' is called with other inputs.*'masks'"):
        assert_fused_is_solo(lambda n: SelfAttention(n, False, {"masks": None}), sequences(False))


Product = Callable[..., Tensor]

PRODUCTS: dict[str, Callable[[Product, Tensor, Tensor, Tensor, bool], Tensor]] = {
    "plain": lambda f, q, k, v, t: f(q, k, v),
    "causal": lambda f, q, k, v, t: f(q, k, v, is_causal=True),
    "scaled": lambda f, q, k, v, t: f(query=q, key=k, value=v, scale=0.3),
    "dropout": lambda f, q, k, v, t: f(q, k, v, None, 0.3 if t else 0.0),
    "causal dropout": lambda f, q, k, v, t: f(q, k, v, dropout_p=0.3 * t, is_causal=True, scale=0.5),
    "truth": lambda f, q, k, v, t: f(q, k, v, CROSS.logical_not()),
    "numbers and dropout": lambda f, q, k, v, t: f(q, k, v, added(CROSS), 0.2 if t else 0.0),
    "mask per batch": lambda f, q, k, v, t: f(q, k, v, PADDING.logical_not()[:, None, None]),
    "mask per batch and dropout": lambda f, q, k, v, t: f(
        q, k, v, PADDING.logical_not()[:, None, None], 0.2 if t else 0.0
    ),
    "own mask": lambda f, q, k, v, t: f(q, k, v, (q @ k.transpose(-2, -1)).tanh()),
    "three axes": lambda f, q, k, v, t: f(q[:, 0], k[:, 0], v[:, 0], CROSS.logical_not()),
    "three axes and dropout": lambda f, q, k, v, t: f(q[:, 0], k[:, 0], v[:, 0], dropout_p=0.3 * t),
    "two axes": lambda f, q, k, v, t: f(q[0, 0], k[0, 0], v[0, 0]).unsqueeze(0),
    "grouped queries": lambda f, q, k, v, t: f(q, k[:, :1], v[:, :1], enable_gqa=True),
    "grouped queries and dropout": lambda f, q, k, v, t: f(q, k[:, :1], v[:, :1], dropout_p=0.3 * t, enable_gqa=True),
    "nothing to look at": lambda f, q, k, v, t: f(q, k, v, torch.zeros(L, S, dtype=torch.bool), 0.2 if t else 0.0),
}

OWN = [(True, True, True), (True, False, True), (False, True, False), (False, False, False)]
"""Whether queries, keys and values are a trial's own, or shared by all."""


class Heads(nn.Module):
    def __init__(self, call: Callable[..., Tensor], own: tuple[bool, bool, bool]) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(E, E), nn.Linear(E, E), nn.Linear(E, E)
        self.call, self.own, self.out = call, own, nn.Linear(E // H, 2)

    def forward(self, x: Tensor) -> Tensor:
        linears = (self.q, self.k, self.v)
        q, k, v = (linear(x) if own else x for linear, own in zip(linears, self.own, strict=True))
        q, k, v = (y.unflatten(-1, (H, E // H)).transpose(1, 2) for y in (q[:, :L], k, v))
        return self.out(self.call(functional.scaled_dot_product_attention, q, k, v, self.training))


@pytest.mark.parametrize(
    ("name", "own"),
    others_slow(
        product(PRODUCTS, OWN),
        [*product(["plain"], OWN), *((name, OWN[1 + at % 2]) for at, name in enumerate(PRODUCTS) if at)],
    ),
)
def test_scaled_dot_product_attention(name: str, own: tuple[bool, bool, bool]) -> None:
    assert_fused_is_solo(lambda n: Heads(PRODUCTS[name], own), sequences(True), steps=STEPS)


def encoder_layer(n: int, **options: Any) -> nn.TransformerEncoderLayer:
    eps = 1e-5 * (n + 1)
    return nn.TransformerEncoderLayer(E, H, 7, dropout=0.1 * n, layer_norm_eps=eps, **options)


LAYER_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm first": {"norm_first": True, "batch_first": True},
    "gelu": {"activation": "gelu", "batch_first": True},
    "own activation": {"activation": nn.Tanh(), "bias": False},
}


@pytest.mark.parametrize("options", LAYER_OPTIONS)
def test_encoder_layer(options: str) -> None:
    kept = LAYER_OPTIONS[options]
    inputs = sequences(kept.get("batch_first", False), L)
    assert_fused_is_solo(lambda n: fresh(encoder_layer(n, **kept)), inputs, steps=STEPS)


class Masked(nn.Module):
    """A stack of encoders with all masks."""

    def __init__(self, n: int, **options: Any) -> None:
        super().__init__()
        layer = encoder_layer(n, batch_first=True, **options)
        self.stack = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(E), enable_nested_tensor=False)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(S))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        y = self.stack(x, mask=self.causal, is_causal=True)
        padding = self.stack(x, src_key_padding_mask=PADDING)
        return y + torch.where(PADDING.unsqueeze(-1), 0.0, padding) + self.stack(y, self.causal)


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder(norm_first: bool) -> None:
    assert_fused_is_solo(lambda n: fresh(Masked(n, norm_first=norm_first)), sequences(True), steps=STEPS)


class Padded(nn.Module):
    """An encoder that sets padded positions to zero in evaluation, and in training where it is frozen."""

    def __init__(self, n: int, padding: Tensor, frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(E, E)
        self.stack = nn.TransformerEncoder(encoder_layer(n, batch_first=True), 2, norm=nn.LayerNorm(E))
        self.register_buffer("padding", padding.clone())
        self.frozen = frozen
        if frozen:
            self.stack.requires_grad_(False)

    def train(self, mode: bool = True) -> "Padded":
        super().train(mode)
        self.stack.train(mode and not self.frozen)
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.frozen:
            return self.first(self.stack(x, src_key_padding_mask=self.padding))
        return self.stack(self.first(x), src_key_padding_mask=self.padding)


PADDINGS = {"at the end": PADDING, "as numbers": PADDING.double() * -1e9, "at the start": PADDING.flip(1)}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("padding", "frozen"),
    others_slow(
        itertools.product(PADDINGS, [False, True]),
        [("at the end", True), ("as numbers", False), ("at the start", True)],
    ),
)
def test_what_an_encoder_gives_at_padded_positions(padding: str, frozen: bool) -> None:
    assert_fused_is_solo(lambda n: fresh(Padded(n, PADDINGS[padding], frozen)), sequences(True), steps=STEPS)


class Decoding(nn.Module):
    def __init__(self, n: int, stacked: bool, **options: Any) -> None:
        super().__init__()
        self.memory = nn.Linear(E, E)
        layer = nn.TransformerDecoderLayer(E, H, 7, dropout=0.1 * n, batch_first=True, **options)
        self.decoder = nn.TransformerDecoder(layer, 2, nn.LayerNorm(E)) if stacked else layer
        self.register_buffer("causal", CAUSAL.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(
            x[:, :L], self.memory(x), tgt_mask=self.causal, tgt_is_causal=True, memory_key_padding_mask=PADDING
        )


@pytest.mark.parametrize("stacked", others_slow([True, False], [True]))
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}, {"bias": False}])
def test_decoder(options: dict[str, Any], stacked: bool) -> None:
    assert_fused_is_solo(lambda n: fresh(Decoding(n, stacked, **options)), sequences(True), steps=STEPS)


def test_whole_transformer() -> None:
    class Model(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.whole = nn.Transformer(E, H, 1, 1, 7, dropout=0.1 * n, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.whole(x, x[:, :L], tgt_mask=CAUSAL)

    assert_fused_is_solo(lambda n: fresh(Model(n)), sequences(True), steps=STEPS)


def test_a_transformer_layer_has_a_unit_per_layer_in_it() -> None:
    study = ToyStudy(lambda n: encoder_layer(n, batch_first=True).double())
    gate = RecordingGate()
    group = TrialGroup(study, members(study, range(2)), gate)
    group.train_step(sequences(True)[0], torch.zeros(B))
    forward = ["self_attn.MultiheadAttention", "dropout1.Dropout", "norm1.LayerNorm", "linear1.Linear"]
    forward += ["dropout.Dropout", "linear2.Linear", "dropout2.Dropout", "norm2.LayerNorm"]
    assert [name for name in gate.entered if name.endswith(" forward")] == [f"{name} forward" for name in forward]
    backward = [name for name in gate.entered if name.endswith(" backward")]
    assert backward == ["loss backward", *[f"{name} backward" for name in reversed(forward)]]
