"""Speedup by `torch.compile` between two pause points, and the steps until the compilation has paid for itself.

Each layer of a group is compiled on its own, forward and backward, so that the gate is still asked between layers.
Plain and compiled steps alternate in one process with one thread.
"""

import sys
import time
from statistics import median
from typing import Any

import torch
import torch._dynamo.config
import torch._inductor.config

from benchmarks.shared.fused_models import Classes, Together, alternate
from benchmarks.shared.intervals import ratio_with_ci95
from benchmarks.shared.results import finish, kept_runs, parse
from trials.fusion.graph.program import Program
from trials.fusion.graph.steps import LayerStep

NAME = "compiled"
CASES = (("mlp_32", 16), ("mlp_32", 64), ("gpt_16", 16))
QUICK_CASES = (("mlp_32", 16),)


def main() -> None:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    torch.set_num_threads(1)
    torch._inductor.config.force_disable_caches = True  # a study's layers are new
    torch._dynamo.config.recompile_limit = 1000  # layers of one kind share their code
    runs = kept_runs(options)
    for name, size in QUICK_CASES if options.quick else CASES:
        if options.only in (None, f"{name} K={size}"):
            runs.append(_measure(name, size, 2.0 if options.quick else 6.0))
            print(f"{name} K={size}: {runs[-1]['speedup']:.2f}x", file=sys.stderr, flush=True)
    finish(NAME, options, runs, _summary(runs))


def _measure(name: str, size: int, seconds: float) -> dict[str, Any]:
    torch.compiler.reset()
    study = Classes(name)
    plain, compiled = Together(study, size), Together(study, size)
    _compile(compiled)
    start_s = time.monotonic()
    for _ in range(2):  # a layer compiled before the next one's needs were known is compiled again
        compiled.step()
    compile_s = time.monotonic() - start_s
    pairs = alternate(plain.step, compiled.step, 1, seconds)
    speedup, ci95 = ratio_with_ci95(pairs)
    gain_s = median(eager - other for eager, other in pairs)
    return {
        "scenario": f"{name} K={size}",
        "compile_s": compile_s,
        "step_s": median(eager for eager, _ in pairs),
        "speedup": 1 + speedup,
        "speedup_ci95": [1 + bound for bound in ci95],
        "steps_to_pay": compile_s / gain_s if gain_s > 0 else None,
        "pairs_s": [[round(x, 7) for x in pair] for pair in pairs],
    }


def _compile(trainer: Together) -> None:
    """Compile each layer of the training forward, and its backward."""
    way = trainer.group._fused.train._way
    assert isinstance(way, Program)  # the models here can be traced
    for step in way.steps:
        if isinstance(step, LayerStep):
            step.layer.run = torch.compile(step.layer.run, dynamic=False)  # type: ignore[method-assign]


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {run["scenario"]: {key: run[key] for key in ("compile_s", "speedup", "steps_to_pay")} for run in runs}


if __name__ == "__main__":
    main()
