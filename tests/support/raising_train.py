"""Trains a small pipeline whose steps, evaluations and checkpoints fail now and then; it catches that, and goes on.

Ranks fail at places that leave no message of theirs on the way, as a script must see to that goes on with the same
engine. Every layer looks whether a bubble is open while it computes, and so does the script after each failure.
`--losses FILE` gets the losses of rank 0, `--found FILE` says, by rank, how often a bubble was open.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from ds_hooks.shared.page.file import Page, page_path, runtime_dir
from ds_hooks.shared.page.layout import Field

WIDTH, BATCH, MICRO_BATCHES = 256, 64, 4
UNITS, PATIENCE_S = 100, 100.0
PATIENT_STEPS, FAILURES, STEPS_BETWEEN = 22, 8, 3
FAILS_AT = {0: 1, 1: 0}
"""By rank, the batch at which both may fail: the second rank has received what the first has sent."""


class Script:
    """The engine, and what goes wrong."""

    def __init__(self, page: Page | None) -> None:
        self.rank = torch.distributed.get_rank()
        self.page = page
        self.error: BaseException | None = None
        self.fails_in = ""
        self.looks = self.looks_in_bubbles = 0
        script = self

        class Layer(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                script.look()
                return super().forward(x)

        torch.manual_seed(self.rank)
        model = PipelineModule([Layer(WIDTH, WIDTH) for _ in range(8)], num_stages=2, loss_fn=self.loss)
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
            "steps_per_print": 10**9,
        }
        self.engine = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=config)[0]
        self.engine.optimizer.register_step_pre_hook(lambda *_: self.may_fail("optimizer"))

    def look(self) -> None:
        self.looks += 1
        self.looks_in_bubbles += self.page is not None and self.page.is_open()

    def arm(self, error: BaseException, place: str) -> None:
        self.error, self.fails_in = error, place

    def may_fail(self, place: str) -> None:
        if place == self.fails_in and self.error is not None:
            error, self.error = self.error, None
            raise error

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.may_fail("loss")
        return nn.functional.mse_loss(outputs, targets)

    def batches(self, seed: int, fails_at: int = -1) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        number = 0
        while True:
            if number == fails_at:
                self.may_fail("batches")
            x = torch.randn(BATCH, WIDTH, generator=generator)
            yield x, x.flip(1)
            number += 1

    def fail(self, error: BaseException, place: str, call: Callable[[], Any]) -> None:
        self.arm(error, place)
        try:
            call()
        except BaseException as found:
            assert not isinstance(found, AssertionError), found
        else:
            raise AssertionError(f"{place} has not failed")
        assert self.error is None, f"{place} was not reached"
        self.look()
        self.engine.optimizer.zero_grad()
        self.engine.module.train()
        for timer in self.engine.timers.timers.values():
            timer.started_ = False  # else DeepSpeed refuses the next step
        torch.distributed.barrier()

    def train(self, seed: int) -> str:
        return float(self.engine.train_batch(self.batches(seed))).hex()


def train_until_squeezed(script: Script, page: Page) -> None:
    """Train both ranks until both side tasks have computed again, however busy the machine is."""
    until, deadline_s = page.words[Field.UNITS_RUN] + UNITS, time.monotonic() + PATIENCE_S
    is_done = torch.zeros(1)
    while not is_done:
        script.train(0)
        is_done[0] = page.words[Field.UNITS_RUN] >= until or time.monotonic() > deadline_s
        torch.distributed.all_reduce(is_done, torch.distributed.ReduceOp.MIN)
    assert page.words[Field.UNITS_RUN] >= until, "the side task has had its bubbles"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--losses", type=Path)
    parser.add_argument("--found", type=Path)
    parser.add_argument("--exits", action="store_true", help="end in the middle of a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    page = Page.open(page_path(runtime_dir(), torch.distributed.get_rank())) if options.found else None
    deadline_s = time.monotonic() + PATIENCE_S
    while page is not None and not page.words[Field.SIDE_PID] and time.monotonic() < deadline_s:
        time.sleep(0.05)  # beside a job its side task would start in bubbles only
    script = Script(page)
    engine, rank = script.engine, script.rank
    losses = [script.train(seed) for seed in range(PATIENT_STEPS)]

    def step() -> None:
        engine.train_batch(script.batches(0, FAILS_AT[rank]))

    def evaluate() -> None:
        engine.eval_batch(script.batches(0, FAILS_AT[rank]))

    def save() -> None:
        script.error = None
        engine.save_checkpoint(None)

    for error, place, call in (
        (KeyError("a batch"), "batches", step),
        (RuntimeError("out of memory"), "batches" if rank == 0 else "loss", step),
        (KeyboardInterrupt(), "batches", step),
        (SystemExit(3), "batches", step),
        (RuntimeError("out of memory"), "optimizer", lambda: script.train(0)),
        (KeyError("a batch"), "batches", evaluate),
        (KeyboardInterrupt(), "batches", evaluate),
        (OSError(), "save", save),
    ):
        script.fail(error, place, call)
        losses += [script.train(seed) for seed in range(STEPS_BETWEEN)]
    if options.losses and rank == 0:
        options.losses.write_text("\n".join(losses))
    if page is not None:
        train_until_squeezed(script, page)
        found = {"looks": script.looks, "in_bubbles": script.looks_in_bubbles}
        options.found.with_suffix(f".{rank}").write_text(json.dumps(found))
        script.page = None
        page.close()
    torch.distributed.barrier()
    if options.exits:
        script.arm(SystemExit(0), "batches")
        step()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
