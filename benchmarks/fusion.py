"""Speedup and memory of K fused trials: against the same K one after another, and against K processes.

Every model in two sizes, with AdamW and one thread per process. Fused and solo steps alternate in one process, so that
both meet the same machine. The K processes run for a fixed time on all cores together. Memory is a process's peak
resident set, torch included, at the K that the planner would choose.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.common import ROOT, finish, kept_runs, parse, ratio_with_ci95
from trials import Study, TrialGroup, build_member
from trials.gate.base import OpenGate

NAME = "fusion"
KS = (1, 2, 4, 8, 16, 32, 64, 128)
QUICK_KS = (1, 16)
QUICK_MODELS = ("mlp_32", "lenet_4", "gpt_16", "resnet18_4", "lstm_16")
SECONDS, QUICK_SECONDS = 1.0, 0.4
"""The least time for each K."""

BATCH = 32


class _LeNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(width, 2 * width, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        )
        self.head = nn.Sequential(nn.Linear(50 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 10))

    def forward(self, x: Tensor) -> Tensor:
        """``x_B1HW``, 28 × 28."""
        return self.head(self.features(x))


class _Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            *(nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)),
        )
        self.shortcut = nn.Sequential() if inputs == width else nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.main(x) + self.shortcut(x))


def resnet18(width: int) -> nn.Module:
    """ResNet-18 for images of 32 × 32; the full width is 64."""
    widths = (width, width, 2 * width, 4 * width, 8 * width)
    blocks = [_Block(widths[s + b], widths[s + 1], 1 + (s > 0 and not b)) for s in range(4) for b in range(2)]
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


class _GPTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(b, t, 2, d // 2).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class _GPT(nn.Module):
    """Classifies by the last token, so that one loss serves all models here."""

    def __init__(self, width: int, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(_GPTBlock(width), _GPTBlock(width), nn.LayerNorm(width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.blocks(self.tokens(x) + places).mean(1))


def gpt(width: int, length: int) -> nn.Module:
    """A GPT for up to `length` tokens of 64 kinds."""
    return _GPT(width, length)


class _LSTM(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        return self.head(y[:, -1])


def lstm(width: int) -> nn.Module:
    """One LSTM for sequences of 8 features."""
    return _LSTM(width)


def mlp(width: int) -> nn.Module:
    """Five layers for 64 features."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp_32": (lambda: mlp(32), lambda: torch.randn(BATCH, 64)),
    "mlp_128": (lambda: mlp(128), lambda: torch.randn(BATCH, 64)),
    "lenet_4": (lambda: _LeNet(4), lambda: torch.randn(BATCH, 1, 28, 28)),
    "lenet_8": (lambda: _LeNet(8), lambda: torch.randn(BATCH, 1, 28, 28)),
    "gpt_16": (lambda: _GPT(16), lambda: torch.randint(64, (BATCH, 16))),
    "gpt_64": (lambda: _GPT(64), lambda: torch.randint(64, (BATCH, 16))),
    "resnet18_4": (lambda: resnet18(4), lambda: torch.randn(BATCH, 3, 32, 32)),
    "resnet18_8": (lambda: resnet18(8), lambda: torch.randn(BATCH, 3, 32, 32)),
    "lstm_16": (lambda: _LSTM(16), lambda: torch.randn(BATCH, 16, 8)),
    "lstm_64": (lambda: _LSTM(64), lambda: torch.randn(BATCH, 16, 8)),
}
"""Name and width -> how to make the model, and a batch for it."""


class Classes(Study):
    """Every model here classifies, with AdamW."""

    trials, epochs = max(KS), 1

    def __init__(self, name: str) -> None:
        self._make, batch = MODELS[name]
        torch.manual_seed(0)
        self.batch = batch(), torch.randint(10, (BATCH,))

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Draw a learning rate."""
        return {"lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True)}

    def model(self, params: dict[str, Any]) -> nn.Module:
        """Make the model of this study."""
        return self._make()

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=params["lr"])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return functional.cross_entropy(outputs, targets)

    def batches(self, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        """The one batch, over and over."""
        return [self.batch]

    def validation(self) -> Iterable[tuple[Tensor, Tensor]]:
        """The same batch."""
        return [self.batch]

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Accuracy."""
        return (outputs.argmax(-1) == targets).float().mean()


class Alone:
    """One trial in plain PyTorch."""

    def __init__(self, study: Classes) -> None:
        member = build_member(study, 0, {"lr": 1e-3})
        self._study, self._model = study, member.model
        self._optimizer = study.optimizer(member.params, member.model)

    def step(self) -> None:
        """Train on the batch."""
        inputs_B, targets_B = self._study.batch
        self._optimizer.zero_grad()
        self._study.loss(self._model(inputs_B), targets_B).backward()
        self._optimizer.step()


class Together:
    """K trials fused."""

    def __init__(self, study: Classes, size: int) -> None:
        members = [build_member(study, row, {"lr": 1e-3 / (1 + row)}) for row in range(size)]
        self._batch, self.group = study.batch, TrialGroup(study, members, OpenGate())

    def step(self) -> None:
        """Train on the batch."""
        self.group.train_step(*self._batch)


def main() -> None:
    """Measure, print, write."""
    if sys.argv[1:2] == ["worker"]:
        _work()
        return
    options = parse(NAME, __doc__ or "")
    torch.set_num_threads(1)
    names = [name for name in MODELS if not options.quick or name in QUICK_MODELS]
    runs = kept_runs(options)
    for name in names:
        if options.only in (None, name):
            runs.append(_measure(name, QUICK_KS, QUICK_SECONDS) if options.quick else _measure(name, KS, SECONDS))
    finish(NAME, options, runs, _summary(runs))


def _measure(name: str, sizes: Iterable[int], seconds: float) -> dict[str, Any]:
    study = Classes(name)
    alone = Alone(study)
    by_k = []
    for size in sizes:
        pairs = alternate(alone.step, Together(study, size).step, size, seconds)
        speedup, ci95 = ratio_with_ci95(pairs)
        processes_per_s, _ = _processes(name, size, seconds)
        fused_per_s = size / median(fused for _, fused in pairs)
        by_k.append(
            {
                "k": size,
                "speedup": 1 + speedup,
                "speedup_ci95": [1 + bound for bound in ci95],
                "trial_steps_per_s": fused_per_s,
                "speedup_over_processes": fused_per_s / processes_per_s,
                "pairs_s": [[round(x, 7) for x in pair] for pair in pairs],
            }
        )
        print(
            f"{name} K={size}: {1 + speedup:.2f}x one after another [{1 + ci95[0]:.2f}, {1 + ci95[1]:.2f}], "
            f"{by_k[-1]['speedup_over_processes']:.2f}x K processes",
            file=sys.stderr,
            flush=True,
        )
    size = planned_point(by_k)["k"]
    _, (fused_mib,) = _workers(name, 1, size, seconds / 2)
    _, processes_mib = _processes(name, size, seconds)
    print(f"{name}: K={size} is planned, {fused_mib:.0f} of {processes_mib:.0f} MiB", file=sys.stderr, flush=True)
    planned = {"planned_k": size, "fused_mib": fused_mib, "processes_mib": processes_mib}
    return {"scenario": name, "seconds": seconds, **planned, "by_k": by_k}


def alternate(
    alone: Callable[[], None], fused: Callable[[], None], size: int, seconds: float
) -> list[tuple[float, float]]:
    """(K solo steps, one fused step) in seconds, from blocks of steps in turn; at least six pairs."""
    for step in (alone, fused, fused):
        step()
    solo_steps, fused_steps = _count(alone, 0.02), _count(fused, 0.02)
    pairs: list[tuple[float, float]] = []
    end_s = time.monotonic() + seconds
    while len(pairs) < 6 or (time.monotonic() < end_s and len(pairs) < 60):
        one, other = (_time(alone, solo_steps) * size, _time(fused, fused_steps))
        pairs.append((one, other))
    return pairs


def _count(step: Callable[[], None], seconds: float) -> int:
    """The number of steps that fill `seconds`."""
    return max(1, int(seconds / _time(step, 1)))


def _time(step: Callable[[], None], count: int) -> float:
    start_s = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start_s) / count


def _processes(name: str, size: int, seconds: float) -> tuple[float, float]:
    """Trial steps per second and MiB of `size` processes at once.

    At most two processes run per core, since more would only share it; memory is scaled to `size`.
    """
    count = min(size, 2 * len(os.sched_getaffinity(0)))
    rate, mib = _some_processes(name, count, seconds)
    return rate, mib * size / count


@cache
def _some_processes(name: str, count: int, seconds: float) -> tuple[float, float]:
    rates, mib = _workers(name, count, 0, seconds / 2)
    return sum(rates), sum(mib)


def _workers(name: str, count: int, size: int, seconds: float) -> tuple[list[float], list[float]]:
    """Train in `count` processes at the same time, and collect trial steps per second and peak MiB."""
    command = [sys.executable, "-m", "benchmarks.fusion", "worker", name, str(size), str(seconds)]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    for process in running:
        assert process.stdout is not None  # asked for above
        process.stdout.readline()  # ready
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    found = [json.loads(process.communicate()[0]) for process in running]
    return [one["steps_per_s"] for one in found], [one["mib"] for one in found]


def _work() -> None:
    """Run as `worker NAME K SECONDS`, with K = 0 for plain PyTorch: print a line when ready, then the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fusion worker")
    parser.add_argument("name")
    parser.add_argument("size", type=int)
    parser.add_argument("seconds", type=float)
    options = parser.parse_args(sys.argv[2:])
    torch.set_num_threads(1)
    study = Classes(options.name)
    trainer = Together(study, options.size) if options.size else Alone(study)
    trainer.step()
    print("ready", flush=True)
    sys.stdin.readline()
    steps, start_s = 0, time.monotonic()
    while steps < 2 or time.monotonic() < start_s + options.seconds:
        trainer.step()
        steps += 1
    rate = steps * max(1, options.size) / (time.monotonic() - start_s)
    print(json.dumps({"steps_per_s": rate, "mib": _peak_mib()}), flush=True)


def _peak_mib() -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The K that the planner would choose for each model, and the figures there.

    Every other pair of blocks decides the K, and `speedup` comes from the rest. Otherwise the luckiest of several equal
    K would be chosen for its luck. The choice compares ratios within pairs, because rates drift with the machine from
    one K to the next.

    `memory_ratio` is one process with K fused trials ÷ K processes, at the planned K: the worst over the smaller size
    of each model. A planned K of 1 means that fusing does not pay, and counts as about 1.
    """
    planned = {run["scenario"]: {**run, **planned_point(run["by_k"])} for run in runs}
    single = [point for run in runs for point in run["by_k"] if point["k"] == 1]
    small = {name.rpartition("_")[0]: planned[name] for name in reversed(MODELS) if name in planned}
    return {
        "best_speedup": max(point["speedup"] for run in runs for point in run["by_k"]),
        "worst_speedup_at_planned_k": min(point["speedup"] for point in planned.values()),
        "k1_overhead": max(1 / point["speedup"] - 1 for point in single),
        "memory_ratio": max(point["fused_mib"] / point["processes_mib"] for point in small.values()),
        "by_model": {
            run["scenario"]: {
                "planned_k": planned[run["scenario"]]["k"],
                **{
                    key: planned[run["scenario"]][key]
                    for key in ("speedup", "speedup_ci95", "speedup_over_processes", "fused_mib", "processes_mib")
                },
                "speedup_by_k": {str(point["k"]): point["speedup"] for point in run["by_k"]},
            }
            for run in runs
        },
    }


def planned_point(by_k: list[dict[str, Any]]) -> dict[str, Any]:
    """The best K by every other pair, with the speedup of the remaining pairs."""
    chosen = max(by_k, key=lambda point: ratio_with_ci95(point["pairs_s"][::2])[0])
    speedup, ci95 = ratio_with_ci95(chosen["pairs_s"][1::2])
    return {**chosen, "speedup": 1 + speedup, "speedup_ci95": [1 + bound for bound in ci95]}


if __name__ == "__main__":
    main()
