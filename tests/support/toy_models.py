"""Small models that several tests train: DCGAN's pair, and two that cannot be traced."""

import torch
from torch import Tensor, nn
from torch.nn import functional


def dcgan_generator() -> nn.Module:
    """DCGAN's generator: six numbers of noise to 16 x 16 pixels."""
    return nn.Sequential(
        *(nn.ConvTranspose2d(6, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(True)),
        *(nn.ConvTranspose2d(8, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(True)),
        *(nn.ConvTranspose2d(4, 1, 4, 2, 1, bias=False), nn.Tanh()),
    )


def dcgan_discriminator() -> nn.Module:
    """DCGAN's discriminator: 16 x 16 pixels to one logit."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)),
        *(nn.Conv2d(4, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2, inplace=True)),
        *(nn.Conv2d(8, 1, 4, bias=False), nn.Flatten(0)),
    )


class DataDependent(nn.Module):
    """A layer that `vmap` cannot do: it looks at its data, and draws."""

    __module__ = "torch.nn.elsewhere"  # so that a graph stops at it

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.dropout(x @ self.weight, 0.2, self.training)
        self.seen = self.seen + 1
        return y * (2 if y.sum().item() > 0 else 1)


class Branching(nn.Module):
    """Branches on the batch's size, and, if asked to, reads a value of its data as a Python number."""

    def __init__(self, to_number: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh()
        self.to_number = to_number

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(self.a(x) if len(x) > 1 else x)
        return self.b(y) * (y.sum().item() if self.to_number else 1)
