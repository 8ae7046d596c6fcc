"""Trains a convolutional network to remove noise from images with DeepSpeed's pipeline engine: an ordinary script.

    deepspeed --num_accelerators 2 examples/denoise.py --steps 100

It knows nothing of Bubble Squeezer, and is unlike `pretrain.py`: convolutions, a squared error, large activations, few
micro-batches, a first stage with more work than the second, clipped gradients, a schedule of rates, and a validation
now and then. The script draws the images itself: crossed waves, each of its own direction, length and colour. The seed
decides everything: `--losses FILE` writes each step's loss exactly, to compare two runs bit by bit.

Shape letters: B images in a batch, C channels, H × W pixels.
"""

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

PIXELS = 32
COLOURS = 3
NOISE = 0.5
VALIDATE_EVERY = 50
"""Steps."""


class Stem(nn.Module):
    """An image as feature maps: (batch, COLOURS, PIXELS, PIXELS) to (batch, width, PIXELS, PIXELS)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(COLOURS, width, 3, padding=1)

    def forward(self, noisy_BCHW: Tensor) -> Tensor:
        """Convolve."""
        return self.conv(noisy_BCHW)


class Residual(nn.Module):
    """Two convolutions, each behind a norm, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Add what the convolutions make of it."""
        return x_BCHW + self.path(x_BCHW)


class Image(nn.Module):
    """Feature maps as an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv = nn.Conv2d(width, COLOURS, 3, padding=1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Convolve: (batch, COLOURS, PIXELS, PIXELS)."""
        return self.conv(F.silu(self.norm(x_BCHW)))


def batches(batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random (noisy, clean) pairs, each (batch, COLOURS, PIXELS, PIXELS)."""
    generator = torch.Generator().manual_seed(seed)
    axis = torch.arange(PIXELS) / PIXELS
    while True:
        angle, length, phase = (2 * math.pi * torch.rand(3, batch, 2, 1, 1, generator=generator)).unbind()
        along = torch.cos(angle) * axis[:, None] + torch.sin(angle) * axis
        waves = torch.sin((2 + length) * along * math.pi + phase)  # (batch, 2, PIXELS, PIXELS)
        colours = torch.rand(batch, COLOURS, 2, generator=generator)
        clean = torch.einsum("bcw,bwhx->bchx", colours, waves)
        yield clean + NOISE * torch.randn(clean.shape, generator=generator), clean


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=3)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", type=Path, help="where rank 0 writes each step's loss as a hexadecimal float")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    return parser.parse_args(arguments)


def make_pipeline(options: argparse.Namespace) -> PipelineModule:
    """All layers, of which a rank builds those of its stage."""
    layers = [
        LayerSpec(Stem, options.width),
        *(LayerSpec(Residual, options.width) for _ in range(options.layers)),
        LayerSpec(Image, options.width),
    ]
    # equal numbers of layers: the first of two stages has more of the heavy ones
    return PipelineModule(layers, num_stages=options.stages, loss_fn=F.mse_loss, partition_method="uniform")


def make_config(options: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch_size,
        "gradient_accumulation_steps": options.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": options.learning_rate}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": options.steps,
                "warmup_num_steps": min(20, options.steps),
                "warmup_max_lr": options.learning_rate,
            },
        },
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }


def main() -> None:
    """Train."""
    options = parse_arguments()
    if "OMP_NUM_THREADS" not in os.environ:  # a launcher that pins each rank to its cores sets it
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_SIZE", "1"))))
    deepspeed.init_distributed()
    torch.manual_seed(options.seed + torch.distributed.get_rank())  # the stages begin with different weights
    model = make_pipeline(options)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config=make_config(options),
    )
    is_first = torch.distributed.get_rank() == 0
    data = batches(options.micro_batch_size, options.seed)
    losses = options.losses if is_first and options.losses is not None else Path(os.devnull)
    with losses.open("w", encoding="ascii", buffering=1) as written:  # a killed run leaves those that it came to
        for step in range(1, options.steps + 1):
            loss = float(engine.train_batch(data_iter=data))
            written.write(f"{loss.hex()}\n")
            if step % VALIDATE_EVERY and step < options.steps:
                continue
            held_out = float(engine.eval_batch(data_iter=batches(options.micro_batch_size, options.seed - 1)))
            if is_first:
                print(f"step {step} loss {loss:.4f} validation {held_out:.4f}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
