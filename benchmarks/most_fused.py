"""Whether the number of fused trials that a study chooses by measurement is never slower than one after another.

    python -m benchmarks.most_fused [--quick] [--json FILE] [--only MODEL]

For the models of `benchmarks.fusion`, and for larger ones, K is chosen as for ``fused = "auto"``. Then steps of K fused
trials and of one trial in plain PyTorch alternate in random order, and the speed is compared with that of K trials one
after another; also at 16, which was the default, for models whose steps are short enough.
"""

import random
import sys
import time
from collections.abc import Callable
from math import exp, log
from statistics import fmean
from typing import Any

import torch
from torch import nn

from benchmarks.shared.fused_models import BATCH, MODELS, Alone, Classes, Together, gpt, lstm, mlp, resnet18
from benchmarks.shared.intervals import ratio_with_ci95
from benchmarks.shared.results import finish, kept_runs, parse
from trials.training.rehearsal import how_many

NAME = "most_fused"
BLOCKS, QUICK_BLOCKS = 24, 8
BLOCK_S = 0.05
FORMER_K, FORMER_K_STEP_S = 16, 2.0
QUICK = ("mlp_32", "mlp_2048", "gpt_64")

LARGER: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp_2048": (lambda: mlp(2048), lambda: torch.randn(BATCH, 64)),
    "gpt_384": (lambda: gpt(384, 16), lambda: torch.randint(64, (BATCH, 16))),
    "resnet18_32": (lambda: resnet18(32), lambda: torch.randn(BATCH, 3, 32, 32)),
    "resnet18_64": (lambda: resnet18(64), lambda: torch.randn(BATCH, 3, 32, 32)),
    "lstm_512": (lambda: lstm(512), lambda: torch.randn(BATCH, 16, 8)),
}
"""ResNet-18 has its full width at 64."""


def main() -> None:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    torch.set_num_threads(1)
    MODELS.update(LARGER)
    runs = kept_runs(options)
    for name in MODELS:
        if options.only in (None, name) and (name in QUICK or not options.quick):
            runs.append(_measure(name, QUICK_BLOCKS if options.quick else BLOCKS))
    finish(NAME, options, runs, _summary(runs))


def _measure(name: str, blocks: int) -> dict[str, Any]:
    study = Classes(name)
    study.fused = "auto"
    began_s = time.process_time()
    found = how_many(study)
    run: dict[str, Any] = {"scenario": name, "chosen": found.trials, "chosen_s": time.process_time() - began_s}
    alone = Alone(study)
    step_s = _time(alone.step, 2)
    sizes = {"chosen": found.trials, "former": FORMER_K}
    for label, size in sizes.items():
        if label == "former" and (step_s * size > FORMER_K_STEP_S or size == found.trials):
            continue
        pairs = _alternate(alone.step, Together(study, size).step, size, blocks)
        speedup, ci95 = ratio_with_ci95(pairs)
        run[f"{label}_speedup"] = 1 + speedup
        run[f"{label}_speedup_ci95"] = [1 + bound for bound in ci95]
        run[f"{label}_pairs_s"] = [[round(each, 7) for each in pair] for pair in pairs]
        shown = f"{1 + speedup:.2f}x one after another [{1 + ci95[0]:.2f}, {1 + ci95[1]:.2f}]"
        print(f"{name} K={size} ({label}): {shown}", file=sys.stderr, flush=True)
    return run


def _alternate(
    alone: Callable[[], None], fused: Callable[[], None], size: int, blocks: int
) -> list[tuple[float, float]]:
    """(K steps of one trial, one step of K fused ones), in seconds of processor time, in random order in each pair."""
    draws = random.Random(0)
    for step in (alone, fused, fused):
        step()
    counts = {step: max(1, int(BLOCK_S / _time(step, 1))) for step in (alone, fused)}
    pairs = []
    for _ in range(blocks):
        order = draws.sample([alone, fused], 2)
        took_s = {step: _time(step, counts[step]) for step in order}
        pairs.append((took_s[alone] * size, took_s[fused]))
    return pairs


def _time(step: Callable[[], None], count: int) -> float:
    began_s = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - began_s) / count


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    if not runs:
        return {}
    former = [run["former_speedup"] for run in runs if "former_speedup" in run]
    return {
        "least_speedup": min(run["chosen_speedup"] for run in runs),
        "least_speedup_low": min(run["chosen_speedup_ci95"][0] for run in runs),
        "geometric_mean": exp(fmean(log(run["chosen_speedup"]) for run in runs)),
        "former_least_speedup": min(former, default=None),
        "longest_choice_s": max(run["chosen_s"] for run in runs),
    }


if __name__ == "__main__":
    main()
