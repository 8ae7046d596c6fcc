"""Models that tests shrink."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class OwnAttention(nn.Module):
    """Attention in code of its own, as in nanoGPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_head = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mask: Tensor
        self.register_buffer("mask", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        examples, length, width = x.size()
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (t.view(examples, length, self.n_head, width // self.n_head).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = functional.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(examples, length, width))


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, width: int, heads: int, attention: type[nn.Module] = OwnAttention) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A small language model."""

    def __init__(self, width: int = 32, heads: int = 8, depth: int = 1, tie: str = "") -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, width), nn.Embedding(32, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.tie = tie
        if tie == "module":
            self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if self.tie == "function":
            return functional.linear(x, self.wte.weight)
        return self.head(x)


class Encoder(nn.Module):
    """PyTorch's own Transformer layer, with bare position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(11, 32), nn.Parameter(torch.randn(1, 16, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(32, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers(self.embed(tokens) + self.position[:, : tokens.shape[1]])
        return self.head(x.mean(1))


class Bare(nn.Module):
    """Weights in no layer, multiplied in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(5, 32))
        self.offset = nn.Parameter(torch.zeros(32))
        self.second = nn.Parameter(torch.randn(32, 32) / 6)
        self.third = nn.Parameter(torch.randn(32, 3, 8) / 6)
        self.last = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.first + self.offset)
        y = torch.tanh(y @ self.second.T)
        y = torch.tanh(torch.einsum("bi,ihd->bhd", y, self.third))
        return torch.einsum("bhd,hd->b", y, self.last)


class Gated(nn.Module):
    """Halves, joins, and sums of branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 64), nn.Linear(48, 32)
        self.other, self.skip = nn.Linear(5, 16), nn.Linear(5, 32, bias=False)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.first(x).chunk(2, dim=-1)
        y = torch.cat([value * torch.sigmoid(gate), torch.tanh(self.other(x))], dim=-1)
        return self.head(torch.tanh(self.second(y)) + self.skip(x))


class Recurrent(nn.Module):
    """The last state of a recurrent layer."""

    def __init__(self, kind: Callable[..., nn.Module], **more: Any) -> None:
        super().__init__()
        self.rnn = kind(5, 32, num_layers=2, batch_first=True, **more)
        self.head = nn.Linear(more.get("proj_size", 32) * (2 if more.get("bidirectional") else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Cells(nn.Module):
    """A recurrent cell in a loop, from a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(5, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        assert state is not None
        return self.head(state[0])


def cnn() -> nn.Module:
    """Convolutions of each kind, with a flattened end."""
    return nn.Sequential(
        *(nn.Conv2d(2, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Conv2d(32, 64, 1), nn.GroupNorm(8, 64), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.ConvTranspose2d(64, 32, 2, stride=2), nn.PReLU(32), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 9, 3)),
    )


class FixedView(nn.Module):
    """A view with a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 32, 3)
        self.head = nn.Linear(512, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(torch.relu(self.conv1(x)))
        return self.head(y.view(-1, 512))


class HuggingFaceGPT2(nn.Module):
    """GPT-2 of Hugging Face's Transformers, from a configuration: heads of 4, and a head tied to the embedding."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=11, n_positions=32, n_embd=32, n_head=8, n_layer=depth)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        self.gpt = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.gpt(tokens).logits
        return logits
