"""Trains a small model with DeepSpeed's DualPipeV engine, if this release has one; an ordinary training script."""

import argparse
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from torch import nn

WIDTH = 64
MICRO_BATCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--losses", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    torch.manual_seed(torch.distributed.get_rank())
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    model = DualPipeVModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 1e-3}},
        "steps_per_print": 1000,
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(1)

    def batches():  # type: ignore[no-untyped-def]
        while True:
            x = torch.randn(8, WIDTH, generator=generator)
            yield x, x.flip(1)

    data = batches()
    losses = [float(engine.train_batch(data)).hex() for _ in range(24)]
    if options.losses and torch.distributed.get_rank() == 0:
        options.losses.write_text("\n".join(losses))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
