"""The experiments, each a function that returns its runs: what was trained, and what came out."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.transfer.coordinates import coordinates
from benchmarks.transfer.end_to_end import end_to_end
from benchmarks.transfer.oracles import oracles
from benchmarks.transfer.sweeps import Sweep, trained

Runs = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Drift:
    """How the best rate moves with the width.

    Attributes:
        model: its name.
        optimizer: its name.
        widths: the last is the target's.
        middle: the logarithm to base 2 of the middle rate.
        rates: how many, by factors of 2.
        steps: of each trial.
        plain: whether plain PyTorch is trained at these widths too.
    """

    model: str
    optimizer: str
    widths: tuple[int, ...]
    middle: int
    rates: int
    steps: int
    plain: bool = True


DRIFTS = {
    "drift_mlp_sgd": Drift("mlp", "sgd", (16, 64, 256, 1024), -1, 11, 220),
    "drift_mlp_adam": Drift("mlp", "adam", (16, 64, 256, 1024), -8, 11, 220),
    "drift_transformer": Drift("transformer", "adam", (16, 128), -7, 9, 200, plain=False),
    "drift_cnn": Drift("cnn", "adam", (4, 32), -6, 9, 220, plain=False),
}


def drift(experiment: Drift, quick: bool) -> Runs:
    """Train each width at each rate with several seeds."""
    seeds, steps = (1, 60) if quick else (3, experiment.steps)
    half = (5 if quick else experiment.rates) // 2
    rates = [2.0 ** (experiment.middle + i * (2 if quick else 1)) for i in range(-half, half + 1)]
    chosen = [{"lr": rate, "seed": seed} for rate in rates for seed in range(seeds)]
    target, runs = experiment.widths[-1], []
    for width in experiment.widths[:: len(experiment.widths) - 1] if quick else experiment.widths:
        ways = [("shrunk", Sweep(experiment.model, target, target // width, experiment.optimizer, steps))]
        if experiment.plain:
            ways.append(("plain", Sweep(experiment.model, width, None, experiment.optimizer, steps)))
        for way, study in ways:
            losses = trained(study, chosen, together=11)
            runs.append(
                {
                    **{"way": way, "model": experiment.model, "optimizer": experiment.optimizer, "width": width},
                    "rates": [each["lr"] for each in chosen],
                    "seeds": [each["seed"] for each in chosen],
                    "training_losses": [loss for loss, _ in losses],
                    "held_out_losses": [loss for _, loss in losses],
                }
            )
    return runs


def ranking(quick: bool) -> Runs:
    """Train the same random configurations as targets, twice with other seeds, and as surrogates at three scales."""
    configurations, seeds, steps, width = (6, 1, 60, 256) if quick else (24, 3, 220, 512)
    draws = torch.Generator().manual_seed(0)
    chosen = []
    for _ in range(configurations):
        a, b, c = torch.rand(3, generator=draws).tolist()
        chosen.append({"lr": 10 ** (-4.5 + 3 * a), "betas": (0.5 + 0.45 * b, 0.9 + 0.099 * c)})
    runs = []
    for name, by, first in [("target", 1, 0), ("target again", 1, 100), ("2", 2, 0), ("4", 4, 0), ("8", 8, 0)]:
        study = Sweep("mlp", width, by, "adam", steps)
        own = [{**each, "seed": first + seed} for each in chosen for seed in range(seeds)]
        losses = trained(study, own, together=12)
        runs.append(
            {"who": name, "seeds": seeds, "held_out_losses": [loss for _, loss in losses], "configurations": own}
        )
    return runs


def timed(do: Callable[[], Runs]) -> Runs:
    """Add how long an experiment took to its first run."""
    begin_s = time.perf_counter()
    runs = do()
    return [{**run, **({"experiment_s": time.perf_counter() - begin_s} if not i else {})} for i, run in enumerate(runs)]


EXPERIMENTS: Mapping[str, Callable[[bool], Runs]] = {
    "oracles": oracles,
    "coordinates": coordinates,
    **{name: partial(drift, own) for name, own in DRIFTS.items()},
    "ranking": ranking,
    "end_to_end": end_to_end,
}
