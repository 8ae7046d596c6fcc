"""The part `fusion` of `gpu_suite`: speedup of fused ResNet-18 at an eighth of its width, as Hydro measured it.

It compares the samples per second of K fused narrow trials with those of one trial of full width, on images of
CIFAR-10's shape in batches of 256; and with the same K trials one after another.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu.parts import Bench
from benchmarks.shared.fused_models import Classes, Together, resnet18
from trials import build_member

FULL_WIDTH, NARROW_WIDTH = 64, 8
BATCH = {"cuda": 256, "cpu": 4}
KS = {"cuda": (1, 10, 50, 100, 220), "cpu": (1, 2)}
ROUNDS = 5
BLOCK_S = 0.3


class OnDevice(Classes):
    """ResNet-18 of any width, on any device."""

    def __init__(self, device: str, batch: int, width: int) -> None:
        super().__init__("resnet18_8")
        self._device, self._width = device, width
        inputs = torch.randn(batch, 3, 32, 32, device=device)
        self.batch = inputs, torch.randint(10, (batch,), device=device)

    def model(self, params: dict[str, Any]) -> nn.Module:
        """On the device."""
        return resnet18(self._width).to(self._device)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, as in all benchmarks of fusion."""
        return functional.cross_entropy(outputs, targets)


def fusion(bench: Bench) -> dict[str, Any]:
    """Trial steps per second of K fused trials, against one of full width and against one after another."""
    device, batch = bench.device, BATCH[bench.device]
    torch.set_num_threads(1)
    full = _alone(OnDevice(device, batch, FULL_WIDTH))
    narrow = _alone(OnDevice(device, batch, NARROW_WIDTH))
    by_k = []
    for size in KS[device][:2] if bench.quick else KS[device]:
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        together = Together(OnDevice(device, batch, NARROW_WIDTH), size)
        steps = (full, narrow, together.step)
        times_s = [[_step_s(step, device, bench.quick) for step in steps] for _ in range(2 if bench.quick else ROUNDS)]
        full_s, narrow_s, fused_s = (median(column) for column in zip(*times_s, strict=True))
        point = {"k": size, "over_full_width": size * full_s / fused_s, "over_one_by_one": size * narrow_s / fused_s}
        if device == "cuda":
            point["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        by_k.append({**point, "times_s": times_s})
    return {"model": "resnet18", "batch": batch, "by_k": by_k}


def _alone(study: OnDevice) -> Callable[[], None]:
    """A step of one trial in plain PyTorch."""
    member = build_member(study, 0, {"lr": 1e-3})
    optimizer = study.optimizer(member.params, member.model)
    inputs_B, targets_B = study.batch

    def step() -> None:
        optimizer.zero_grad()
        study.loss(member.model(inputs_B), targets_B).backward()
        optimizer.step()

    return step


def _step_s(step: Callable[[], None], device: str, quick: bool) -> float:
    """Seconds per step, over a block of steps that the device has finished."""
    wait = torch.cuda.synchronize if device == "cuda" else int
    step()
    wait()
    steps, start_s = 0, time.perf_counter()
    while steps < 2 or time.perf_counter() < start_s + (0.0 if quick else BLOCK_S):
        step()
        wait()
        steps += 1
    return (time.perf_counter() - start_s) / steps
