"""Trains a small pipeline beside a teacher, and builds its engine anew on the way; an ordinary training script.

With `--warm-up`, two engines are built at the start, and the later one trains first. Each engine trains until the side
tasks of both ranks have computed meanwhile. Every layer looks whether a bubble is open while it computes. `--found
FILE` says, by rank, how often one was, and how many steps each engine made.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from ds_hooks.shared.page.file import Page, page_path, runtime_dir
from ds_hooks.shared.page.layout import Field

WIDTH, BATCH = 256, 64
UNITS = 50
PATIENCE_S = 120.0


class Watched(torch.autograd.Function):
    """Looks at the page, forward and backward."""

    page: Page
    looks = looks_in_bubbles = 0

    @classmethod
    def look(cls) -> None:
        cls.looks += 1
        cls.looks_in_bubbles += cls.page.is_open()

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        Watched.look()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        Watched.look()
        return grad


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Watched.apply(super().forward(Watched.apply(x)))


def build(micro_batches: int) -> deepspeed.PipelineEngine:
    model = PipelineModule([Layer(WIDTH, WIDTH) for _ in range(8)], num_stages=2, loss_fn=nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "steps_per_print": 10**9,
    }
    return deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=config)[0]


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        x = torch.randn(BATCH, WIDTH)
        yield x, x.flip(1)


def train(engine: deepspeed.PipelineEngine, teacher: deepspeed.PipelineEngine) -> int:
    """Train both ranks until both side tasks have computed; returns the number of steps.

    A thread of gloo's that frees a tensor of Python's while the interpreter ends aborts the process (PyTorch 2.13), and
    a barrier holds the tensors of what was reduced just before it. So no barrier of gloo's follows on this.
    """
    words, data = Watched.page.words, batches()
    until, deadline_s = words[Field.UNITS_RUN] + UNITS, time.monotonic() + PATIENCE_S
    steps, is_done = 0, torch.zeros(1)
    while not is_done:
        teacher.eval_batch(data)
        engine.train_batch(data)
        steps += 1
        is_done[0] = words[Field.UNITS_RUN] >= until or time.monotonic() > deadline_s
        torch.distributed.all_reduce(is_done, torch.distributed.ReduceOp.MIN)
    assert words[Field.UNITS_RUN] >= until, "the side task has had its bubbles"
    return steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--found", type=Path)
    parser.add_argument("--warm-up", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    Watched.page = Page.open(page_path(runtime_dir(), rank))
    deadline_s = time.monotonic() + PATIENCE_S
    while not Watched.page.words[Field.SIDE_PID] and time.monotonic() < deadline_s:
        time.sleep(0.05)  # beside a job it would start in bubbles only
    if options.warm_up:
        engine, other = build(8), build(4)
        steps = [train(other, engine), train(engine, other)]
    else:
        teacher = build(4)
        student = build(4)
        steps = [train(student, teacher)]
        student = build(8)
        steps.append(train(student, teacher))
    found = {"looks": Watched.looks, "in_bubbles": Watched.looks_in_bubbles, "steps": steps}
    options.found.with_suffix(f".{rank}").write_text(json.dumps(found))
    Watched.page.close()
    torch.distributed.monitored_barrier()  # `barrier` would leave `is_done` to a thread of gloo's: see `train`
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
