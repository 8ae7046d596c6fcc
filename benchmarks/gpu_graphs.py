"""How much faster fused trials train on a GPU where a step's forward, loss and backward are one CUDA graph.

    python -m benchmarks.gpu_graphs [--json FILE] [--quick]

Trains the same trials of each study twice from the same state, with graphs and without, and prints the time of a step,
the device's time of a graph, and whether all weights are equal afterwards, bit by bit. Needs no main job.
"""

import argparse
import faulthandler
import time
from pathlib import Path
from typing import Any

import optuna
import torch

from benchmarks.shared.paths import ROOT
from benchmarks.shared.results import finish, kept_runs, parse, write
from trials.gate.base import OpenGate
from trials.side_task.devices import make_side_device
from trials.study import Study, load_study
from trials.training.group import TrialGroup
from trials.training.member import Member, build_member, group_key

NAME = "gpu_graphs"
STUDIES = {"digits": 16, "characters": 8}
"""Example -> how many trials are fused. In other examples, code of their own keeps steps ordinary."""
MEMORY_FRACTION = 0.3
LIMIT_S = 300.0
"""Of a study."""
WARM_UP_STEPS, STEPS, BATCHES = 40, 200, 8


def main() -> None:
    """Measure, print, write."""
    options: argparse.Namespace = parse(NAME, __doc__ or "")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    runs = kept_runs(options)
    for name, trials in STUDIES.items():
        if options.only in (None, name):
            # a thread of C ends the process even where the driver holds Python
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            runs.append(_measure(name, trials, STEPS // 8 if options.quick else STEPS))
            faulthandler.cancel_dump_traceback_later()
            if options.json:
                write(NAME, options, runs, _summary(runs))
    finish(NAME, options, runs, _summary(runs))


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    figures = ("ratio", "graph_ms", "same_bits")
    return {f"{run['scenario']}_{key}": run[key] for run in runs for key in figures}


def _measure(name: str, trials: int, steps: int) -> dict[str, Any]:
    run: dict[str, Any] = {"scenario": name, "trials": trials}
    weights = []
    for graphs in (True, False):
        group = _group(ROOT / "examples" / f"{name}.py", trials, graphs)
        batches = [batch for _, batch in zip(range(BATCHES), group.batches(0), strict=False)]
        _train(group, batches, WARM_UP_STEPS)
        begin_s = time.perf_counter()
        _train(group, batches, steps)
        run["step_ms_by_graph" if graphs else "step_ms"] = 1e3 * (time.perf_counter() - begin_s) / steps
        if graphs:
            run["graph_ms"] = max(group.graphs_ns(), default=0.0) / 1e6
        weights.append([group.extract(row)[0] for row in range(group.size)])
    run["ratio"] = run["step_ms_by_graph"] / run["step_ms"]
    run["same_bits"] = all(
        torch.equal(one[key], other[key]) for one, other in zip(*weights, strict=True) for key in one
    )
    return run


def _group(path: Path, trials: int, graphs: bool) -> TrialGroup:
    """So many random trials of one structure."""
    study: Study = load_study(path)
    study.cuda_graphs = graphs
    make_side_device("cuda", MEMORY_FRACTION).adopt(study)
    draws = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    alike: dict[Any, list[Member]] = {}
    while max(map(len, alike.values()), default=0) < trials:
        member = build_member(study, sum(map(len, alike.values())), study.suggest(draws.ask()))
        alike.setdefault(group_key(member), []).append(member)
    return TrialGroup(study, max(alike.values(), key=len), OpenGate())


def _train(group: TrialGroup, batches: list[Any], steps: int) -> None:
    for step in range(steps):
        group.train_step(*batches[step % len(batches)])
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
