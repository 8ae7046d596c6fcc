"""How far figures of the transfer benchmark stray by the seeds and configurations that were drawn: a bootstrap.

Seeds and configurations of the runs are drawn again, with replacement, and each figure is computed of what was drawn.
With three seeds the intervals are too narrow, as a rule: they show how little three seeds say, not how much.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from statistics import quantiles
from typing import Any

Runs = Sequence[dict[str, Any]]

DRAWS = 400


def ci95(
    figure: Callable[[Runs], float | None], runs: Runs, resampled: Callable[[Runs], Iterator[Runs]]
) -> list[float] | None:
    """The 95% interval of a figure over what is drawn of its runs; None: there is no figure."""
    if figure(runs) is None:
        return None
    found = [each for drawn in resampled(runs) if (each := figure(drawn)) is not None]
    bounds = quantiles(found, n=40, method="inclusive")
    return [bounds[0], bounds[-1]]


def by_seeds(runs: Runs) -> Iterator[Runs]:
    """Draw seeds of sweeps over rates, or of coordinate checks: the same ones for all widths and rates."""
    draws = random.Random(0)
    seeds = max(_seeds(run) for run in runs)
    for _ in range(DRAWS):
        chosen = draws.choices(range(seeds), k=seeds)
        yield [_of_seeds(run, chosen) for run in runs]


def by_configurations(runs: Runs) -> Iterator[Runs]:
    """Draw the configurations of a ranking, the same ones for all models, and of each model the seeds."""
    draws = random.Random(0)
    for _ in range(DRAWS):
        chosen: list[int] = []
        drawn = []
        for run in runs:
            seeds, losses = run["seeds"], run["held_out_losses"]
            count = len(losses) // seeds
            chosen = chosen or draws.choices(range(count), k=count)
            own = draws.choices(range(seeds), k=seeds)
            drawn.append({**run, "held_out_losses": [losses[each * seeds + seed] for each in chosen for seed in own]})
        yield drawn


def _seeds(run: dict[str, Any]) -> int:
    if "layers" in run:
        return len(next(iter(run["layers"].values())))
    return len(run["rates"]) // len(set(run["rates"]))


def _of_seeds(run: dict[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    if "layers" in run:
        return {**run, "layers": {name: [moved[seed] for seed in chosen] for name, moved in run["layers"].items()}}
    by_rate: dict[float, list[float]] = {}
    for rate, loss in zip(run["rates"], run["training_losses"], strict=True):
        by_rate.setdefault(rate, []).append(loss)
    rates = [rate for rate in by_rate for _ in chosen]
    losses = [own[seed] for own in by_rate.values() for seed in chosen]
    return {**run, "rates": rates, "training_losses": losses}
