"""From runs to the summary."""

from collections.abc import Iterable, Sequence
from math import inf, log2
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.shared.intervals import ratio_with_ci95

Runs = Sequence[dict[str, Any]]


def summary(runs: Runs) -> dict[str, Any]:
    """The figures of those experiments that have run; the others are None."""
    by = {name: [run for run in runs if run["scenario"] == name] for name in {run["scenario"] for run in runs}}
    drifts = [run for name, own in by.items() if name.startswith("drift") for run in own]
    mlps = [run for run in drifts if run["model"] == "mlp"]
    found: dict[str, Any] = {
        "oracle_error": max((run["error"] for run in by.get("oracles", [])), default=None),
        "coordinate_slope_worst": worst_slope(by.get("coordinates", []), "shrunk"),
        "coordinate_slope_plain": worst_slope(by.get("coordinates", []), "plain"),
        "drift_octaves_16": drift(mlps, "shrunk", 16),
        "drift_octaves_64": drift(mlps, "shrunk", 64),
        "drift_octaves_plain_64": drift(mlps, "plain", 64),
        "drift_octaves_most": max((each for r in (4, 16, 64) if (each := drift(mlps, "shrunk", r))), default=None),
        "drift_octaves_8_others": drift([run for run in drifts if run["model"] != "mlp"], "shrunk", 8),
    }
    found.update(ranks(by.get("ranking", [])))
    found.update(speedup(by.get("end_to_end", [])))
    return found


def worst_slope(runs: Runs, way: str) -> float | None:
    """The largest slope, of any layer, of the logarithm of how far activations move against that of the width."""
    slopes = []
    for model, kind in {(run["model"], run["optimizer"]) for run in runs}:
        own = [run for run in runs if (run["model"], run["optimizer"], run["way"]) == (model, kind, way)]
        for layer in own[0]["layers"] if own else ():
            points = [(log2(run["width"]), fmean(run["layers"][layer])) for run in own]
            if all(0 < moved < inf for _, moved in points):
                slopes.append(float(np.polyfit([x for x, _ in points], [log2(y) for _, y in points], 1)[0]))
    return max((abs(slope) for slope in slopes), default=None)


def mean_losses(run: dict[str, Any]) -> dict[float, float]:
    """Rate -> the logarithm to base 2 of the training loss, mean over seeds; infinite if one diverged."""
    by_rate: dict[float, list[float]] = {rate: [] for rate in sorted(set(run["rates"]))}
    for rate, loss in zip(run["rates"], run["training_losses"], strict=True):
        by_rate[rate].append(log2(loss) if loss < inf else inf)
    return {rate: fmean(losses) for rate, losses in by_rate.items()}


def best_rate(run: dict[str, Any]) -> float:
    """The logarithm to base 2 of the rate with the least training loss, by a parabola through it and its neighbours."""
    by_rate = mean_losses(run)
    rates, means = list(by_rate), list(by_rate.values())
    best = min(range(len(rates)), key=lambda i: means[i])
    middle, step = log2(rates[best]), log2(rates[1] / rates[0])
    if not 0 < best < len(rates) - 1:
        return middle
    left, here, right = means[best - 1 : best + 2]
    if right == inf or left == inf:
        return middle
    return middle + step * (left - right) / (2 * (left - 2 * here + right)) if left - 2 * here + right > 0 else middle


def drift(runs: Runs, way: str, ratio: int) -> float | None:
    """By how many octaves at most the best rate moves from the target to ÷ `ratio`."""
    found = []
    for model, kind in {(run["model"], run["optimizer"]) for run in runs}:
        own = {run["width"]: run for run in runs if (run["model"], run["optimizer"], run["way"]) == (model, kind, way)}
        top = max(own, default=0)
        found += [abs(best_rate(own[top]) - best_rate(own[w])) for w in own if w * ratio == top]
    return max(found, default=None)


def ranks(runs: Runs) -> dict[str, Any]:
    """Rank correlations, their ceiling, and the worst regret at ÷ 8 in standard deviations of a seed."""
    means = {run["who"]: _means(run["held_out_losses"], run["seeds"]) for run in runs}
    made: dict[str, Any] = {f"spearman_{scale}": None for scale in (2, 4, 8)}
    made |= {"spearman_ceiling": None, "regret_sd": None}
    if "target" not in means:
        return made
    target = means["target"]
    for who in ("2", "4", "8"):
        made[f"spearman_{who}"] = float(spearmanr(_ranked(target), _ranked(means[who])).statistic)
    made["spearman_ceiling"] = float(spearmanr(_ranked(target), _ranked(means["target again"])).statistic)
    run = next(run for run in runs if run["who"] == "target")
    best, chosen = min(range(len(target)), key=target.__getitem__), min(range(len(target)), key=means["8"].__getitem__)
    own = run["held_out_losses"][best * run["seeds"] : (best + 1) * run["seeds"]]
    if len(own) > 1:
        made["regret_sd"] = (target[chosen] - target[best]) / stdev(own)
    return made


def speedup(runs: Runs) -> dict[str, Any]:
    """The time of Optuna ÷ ours, until a target has ended that is as good as the best known.

    As good is: its held-out loss is at most the mean over seeds of the best known configuration, and one standard
    deviation. Where Optuna's budget gives no such target, its last trial's end counts, which is too early.
    """
    made: dict[str, Any] = {
        f"end_to_end_{name}": None for name in ("speedup", "speedup_low", "speedup_unpruned", "speedup_unpruned_low")
    }
    if not runs:
        return made
    good, timed = goal(runs), [run for run in runs if run["who"] != "judge"]
    by = {(run["who"], run["repeat"]): run["trace"] for run in timed}
    repeats = sorted({run["repeat"] for run in timed})
    ours = [_reached(by["ours", repeat], good) for repeat in repeats]
    made["end_to_end_reached"] = sum(1 for each in ours if each < inf) / len(ours)
    for name, pruner in (("speedup", "median"), ("speedup_unpruned", "none")):
        theirs = [by[f"optuna, {pruner}", repeat] for repeat in repeats]
        made[f"end_to_end_{pruner}_reached"] = sum(1 for each in theirs if _reached(each, good) < inf) / len(ours)
        if len(ours) > 1 and max(ours) < inf:
            pairs = [(min(_reached(each, good), _end(each)), own) for each, own in zip(theirs, ours, strict=True)]
            ratio, (low, _) = ratio_with_ci95(pairs)
            made |= {f"end_to_end_{name}": 1 + ratio, f"end_to_end_{name}_low": 1 + low}
    return made


def goal(runs: Runs) -> float:
    """The held-out loss at which a target is as good as the best known configuration."""
    (judged,) = (run["losses"] for run in runs if run["who"] == "judge")
    best: list[float] = min(judged, key=fmean)
    return fmean(best) + stdev(best)


def _reached(trace: Iterable[Sequence[Any]], good: float) -> float:
    return min((float(seconds) for seconds, loss, _ in trace if loss <= good), default=inf)


def _end(trace: Iterable[Sequence[Any]]) -> float:
    return max(float(seconds) for seconds, _, _ in trace)


def _means(losses: Sequence[float], seeds: int) -> list[float]:
    return [fmean(losses[i : i + seeds]) for i in range(0, len(losses), seeds)]


def _ranked(losses: Sequence[float]) -> list[float]:
    return [loss if loss < inf else 1e9 for loss in losses]
