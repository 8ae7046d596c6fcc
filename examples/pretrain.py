"""Pretrains a small Transformer on Python source with DeepSpeed's pipeline engine: an ordinary training script.

    deepspeed --num_accelerators 2 examples/pretrain.py --steps 100

It knows nothing of Bubble Squeezer. The text is Python's own standard library, so nothing is downloaded. The seed
decides everything: `--losses FILE` writes each step's loss exactly, to compare two runs bit by bit.

Shape letters: B sequences in a batch, T tokens in a sequence, D the width, V the vocabulary.
"""

import argparse
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

VOCABULARY = 256  # bytes
TOKENS = 128  # the length of a sequence
HEADS = 4


class Embedding(nn.Module):
    """Bytes and their places, as vectors: (batch, tokens) to (batch, tokens, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(TOKENS, width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Add each byte's vector and its place's."""
        return self.byte(tokens_BT) + self.place(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Attend, then apply the perceptron, each added to its input."""
        b, t, d = x_BTD.shape
        q, k, v = (
            part.view(b, t, HEADS, d // HEADS).transpose(1, 2) for part in self.qkv(self.norm1(x_BTD)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Head(nn.Module):
    """The next byte's logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, VOCABULARY)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Score the next byte at each place: (batch, tokens, VOCABULARY)."""
        return self.logits(self.norm(x_BTD))


def loss_of(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), target_BT.flatten())


def read_text() -> Tensor:
    """The top-level modules of the standard library, one after another."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batches(batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random (input, target) pairs, each (batch, TOKENS)."""
    text = read_text()
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(TOKENS + 1)
    while True:
        begin = torch.randint(len(text) - TOKENS - 1, (batch, 1), generator=generator)
        chunk = text[begin + window].long()
        yield chunk[:, :-1], chunk[:, 1:]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="default: 300, as the demo's study needs")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--width", type=int, default=224)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", type=Path, help="where rank 0 writes each step's loss as a hexadecimal float")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    return parser.parse_args(arguments)


def make_pipeline(options: argparse.Namespace) -> PipelineModule:
    """All layers, of which a rank builds those of its stage."""
    layers = [
        LayerSpec(Embedding, options.width),
        *(LayerSpec(Block, options.width) for _ in range(options.layers)),
        LayerSpec(Head, options.width),
    ]
    return PipelineModule(layers, num_stages=options.stages, loss_fn=loss_of)


def make_config(options: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch_size,
        "gradient_accumulation_steps": options.micro_batches,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": options.learning_rate}},
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
            if is_first and (step % 50 == 0 or step == options.steps):
                print(f"step {step} loss {loss:.4f}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
