"""Whole models, fused and alone: forward, backward and several steps with other hyperparameters per trial."""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trials
from tests.support.fused_and_solo import assert_fused_is_solo, close
from tests.support.torchvision_import import make_importable
from tests.support.toy_models import dcgan_discriminator, dcgan_generator
from trials import FuseError


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 5, padding=2), nn.Conv2d(4, 8, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(8 * 4 * 4, 24), nn.Linear(24, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.tanh(self.fc2(torch.relu(self.fc1(torch.flatten(x, 1)))))
        return self.fc3(x)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet18(nn.Module):
    """The CIFAR shape of it: no first pooling, four stages of two blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.layers = nn.Sequential(
            *[
                BasicBlock(widths[stage + block], widths[stage + 1], 2 if stage and not block else 1)
                for stage in range(4)
                for block in range(2)
            ]
        )
        self.fc = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(functional.relu(self.bn(self.conv(x))))
        return self.fc(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class PointNet(nn.Module):
    """Points ``x_B3N``: a learnt transform, features per point, the maximum over points."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.local = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU())
        self.turn = nn.Linear(8, 9)
        self.features = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 16, 1))
        self.head = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.1 * n), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        turn = self.turn(torch.max(self.local(x), 2)[0]).view(-1, 3, 3) + torch.eye(3, dtype=torch.float64)
        x = torch.bmm(x.transpose(2, 1), turn).transpose(2, 1)
        x = torch.max(self.features(x), 2, keepdim=True)[0].view(-1, 16)
        return functional.log_softmax(self.head(x), dim=-1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        qkv = self.qkv(self.norm1(x_BTD)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(13, 8), nn.Embedding(6, 8)
        self.blocks = nn.Sequential(Block(8, 2), Block(8, 2))
        self.norm, self.logits = nn.LayerNorm(8), nn.Linear(8, 13, bias=False)
        self.logits.weight = self.tokens.weight

    def forward(self, x_BT: Tensor) -> Tensor:
        x = self.tokens(x_BT) + self.places(torch.arange(x_BT.shape[1], device=x_BT.device))
        return self.logits(self.norm(self.blocks(x)))


class Recurrent(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 6, 2, dropout=0.1)
        self.drop, self.out = nn.Dropout(0.1 * n), nn.Linear(6, 9)

    def forward(self, x_TB: Tensor) -> Tensor:
        y, (h, _) = self.lstm(self.embed(x_TB))
        return self.out(self.drop(y)) + h[-1].mean()


def gpt2(drop: float) -> Callable[[int], nn.Module]:
    """Hugging Face's, from a config; its outputs hold logits and a cache."""
    make_importable()
    from transformers import GPT2Config, GPT2LMHeadModel

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes: dict[str, Any] = {"vocab_size": 13, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
            rates: dict[str, Any] = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": drop}
            self.model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **rates))

        def forward(self, x_BT: Tensor) -> Tensor:
            return self.model(x_BT).logits

    return lambda n: Logits()


def mlp(n: int) -> nn.Module:
    widths = (7, 16, 16, 4)
    layers = [[nn.Linear(a, b), nn.ReLU(), nn.Dropout(0.1 * n)] for a, b in pairwise(widths)]
    return nn.Sequential(*[layer for group in layers for layer in group][:-2])


def tokens(shape: Sequence[int], vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, tuple(shape), generator=torch.Generator().manual_seed(5))


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[], Tensor]]] = {
    "MLP": (mlp, lambda: numbers(9, 7)),
    "LeNet": (lambda n: LeNet(), lambda: numbers(3, 1, 24, 24)),
    "ResNet-18": (lambda n: ResNet18(2), lambda: numbers(4, 3, 32, 32)),
    "DCGAN generator": (lambda n: dcgan_generator(), lambda: numbers(3, 6, 1, 1)),
    "DCGAN discriminator": (lambda n: dcgan_discriminator(), lambda: numbers(3, 1, 16, 16)),
    "PointNet": (PointNet, lambda: numbers(4, 3, 12)),
    "GPT": (lambda n: GPT(), lambda: tokens((3, 6), 13)),
    "LSTM": (Recurrent, lambda: tokens((3, 5), 9)),
    "GPT-2": (lambda n: gpt2(0.0)(n), lambda: tokens((3, 6), 13)),
    "GPT-2 with dropout in attention": (lambda n: gpt2(0.1)(n), lambda: tokens((3, 6), 13)),
}


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    make, batch = MODELS[name]
    x = batch()
    assert_fused_is_solo(make, [x, x.flip(0)], steps=2)


@pytest.mark.parametrize("name", ["MLP", "ResNet-18", "GPT", "LSTM", "GPT-2"])
def test_float32(name: str) -> None:
    make, batch = MODELS[name]
    models = [make(n).eval() for n in range(3)]
    for number, model in enumerate(models):
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1 + 0.1 * number)
    fused = trials.fuse(models)
    alone = torch.stack([model(batch()) for model in models])
    torch.testing.assert_close(fused(batch()), alone, rtol=1e-4, atol=1e-4 * alone.abs().max().item())


def test_adversaries_train_together() -> None:
    """K pairs of networks by a user's own loop, fused and alone: the one's output is the other's input."""
    pairs = [(dcgan_generator().double(), dcgan_discriminator().double()) for _ in range(3)]
    alone = copy.deepcopy(pairs)
    makers, judges = trials.fuse([pair[0] for pair in pairs]), trials.fuse([pair[1] for pair in pairs])
    noise, real = numbers(4, 6, 1, 1).double(), numbers(4, 1, 16, 16).double()

    def losses(maker: nn.Module, judge: nn.Module, x: object, wrap: Callable[[Tensor], object], axes: int) -> Tensor:
        made = maker(noise)
        wrong = functional.softplus(judge(wrap(made))).flatten(axes).mean(axes)
        return wrong + functional.softplus(-judge(x)).flatten(axes).mean(axes)

    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (makers, judges)]
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses(makers, judges, real, trials.PerTrial, 1).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for row, (maker, judge) in enumerate(alone):
        own = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (maker, judge)]
        for _ in range(5):
            for optimizer in own:
                optimizer.zero_grad()
            losses(maker, judge, real, lambda x: x, 0).backward()
            for optimizer in own:
                optimizer.step()
        for whole, solo in ((makers, maker), (judges, judge)):
            for name, value in whole.extract(row).state_dict().items():
                close(value, solo.state_dict()[name], f"row {row} {name}")


def test_fused_module() -> None:
    models = [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2 * n)) for n in range(3)]
    before = [copy.deepcopy(model.state_dict()) for model in models]
    fused = trials.fuse(models)
    x_KB = numbers(3, 5, 4)
    assert fused(x_KB[0]).shape == (3, 5, 6) and fused.training and fused.rows.size == 3
    assert [name for name, _ in fused.named_parameters()] == [
        f"trials.{name}" for name in dict(models[0].named_parameters())
    ]
    fused.eval()
    for row, model in enumerate(models):
        assert all(torch.equal(value, before[row][name]) for name, value in model.state_dict().items())
        own: Any = fused.extract(row)
        assert not own.training and own[2].p == model[2].p
        torch.testing.assert_close(fused(trials.PerTrial(x_KB))[row], own(x_KB[row]))
        torch.testing.assert_close(fused(x_KB[0])[row], own(x_KB[0]))
    fused.double()
    assert fused(x_KB[0].double()).dtype == fused.extract(1).get_buffer("1.running_mean").dtype == torch.float64
    with pytest.raises(FuseError, match=r"PerTrial input of shape \[2, 5, 4\]; allowed: 3 trials first"):
        fused(trials.PerTrial(x_KB[:2]))


def test_extracted_modules_stay_tied() -> None:
    own: Any = trials.fuse([GPT(), GPT()]).extract(1)
    assert own.logits.weight is own.tokens.weight


def test_generators_replay_a_solo_run() -> None:
    models = [nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)) for _ in range(2)]
    streams = [torch.Generator().manual_seed(seed) for seed in (7, 8)]
    fused = trials.fuse(models, streams)
    x = numbers(5, 4)
    y_KB = fused(x)
    for row, (seed, model) in enumerate(zip((7, 8), models, strict=True)):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            torch.testing.assert_close(y_KB[row], model(x))
