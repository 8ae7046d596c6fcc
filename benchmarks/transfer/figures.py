"""From runs to the summary."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import inf, log2
from statistics import fmean, linear_regression, stdev
from typing import Any

from scipy.stats import spearmanr

from benchmarks.shared.intervals import ratio_with_ci95
from benchmarks.transfer.resampled import Runs, by_configurations, by_seeds, ci95

Resampled = Callable[[Runs], Iterator[Runs]]


def summary(runs: Runs) -> dict[str, Any]:
    """The figures of those experiments that have run, with their intervals; the others are None."""
    by = {name: [run for run in runs if run["scenario"] == name] for name in {run["scenario"] for run in runs}}
    drifts = [run for name, own in by.items() if name.startswith("drift") for run in own]
    mlps, others = ([run for run in drifts if (run["model"] == "mlp") is is_mlp] for is_mlp in (True, False))
    moved, ranked = by.get("coordinates", []), by.get("ranking", [])
    found: dict[str, Any] = {"oracle_error": max((run["error"] for run in by.get("oracles", [])), default=None)}
    figures: dict[str, tuple[Callable[[Runs], float | None], Runs, Resampled]] = {
        "coordinate_slope_worst": (partial(worst_slope, way="shrunk"), moved, by_seeds),
        "coordinate_slope_plain": (partial(worst_slope, way="plain"), moved, by_seeds),
        "drift_octaves_16": (partial(drift, way="shrunk", ratio=16), mlps, by_seeds),
        "drift_octaves_64": (partial(drift, way="shrunk", ratio=64), mlps, by_seeds),
        "drift_octaves_plain_64": (partial(drift, way="plain", ratio=64), mlps, by_seeds),
        "drift_octaves_most": (_most_drift, mlps, by_seeds),
        "drift_octaves_8_others": (partial(drift, way="shrunk", ratio=8), others, by_seeds),
        **{f"spearman_{scale}": (partial(rank_correlation, who=scale), ranked, by_configurations) for scale in "248"},
        "spearman_ceiling": (partial(rank_correlation, who="target again"), ranked, by_configurations),
        "regret_sd": (partial(regret, sd=seed_sd(ranked)), ranked, by_configurations),
    }
    for name, (figure, own, resampled) in figures.items():
        found |= {name: figure(own), f"{name}_ci95": ci95(figure, own, resampled)}
    found.update(speedup(by.get("end_to_end", [])))
    return found


def _most_drift(runs: Runs) -> float | None:
    found = [drift(runs, "shrunk", ratio) for ratio in (4, 16, 64)]
    return max((each for each in found if each is not None), default=None)


def worst_slope(runs: Runs, way: str) -> float | None:
    """The largest slope, of any layer, of the logarithm of how far activations move against that of the width."""
    slopes = []
    for model, kind in {(run["model"], run["optimizer"]) for run in runs}:
        own = [run for run in runs if (run["model"], run["optimizer"], run["way"]) == (model, kind, way)]
        for layer in own[0]["layers"] if own else ():
            points = [(log2(run["width"]), fmean(run["layers"][layer])) for run in own]
            if all(0 < moved < inf for _, moved in points):
                slopes.append(linear_regression([x for x, _ in points], [log2(y) for _, y in points]).slope)
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


def rank_correlation(runs: Runs, who: str) -> float | None:
    """Spearman's, of the target's mean held-out losses with those of `who`, over the configurations."""
    means = _means_by(runs)
    if "target" not in means:
        return None
    return float(spearmanr(_ranked(means["target"]), _ranked(means[who])).statistic)


def regret(runs: Runs, sd: float | None) -> float | None:
    """The target's loss at the best configuration of its surrogates at ÷ 8, less its own best, in `sd`."""
    if not sd:
        return None
    target, surrogate = (_means_by(runs)[who] for who in ("target", "8"))
    chosen = min(range(len(target)), key=surrogate.__getitem__)
    return (target[chosen] - min(target)) / sd


def seed_sd(runs: Runs) -> float | None:
    """The standard deviation over seeds of the target's loss at its best configuration; None: of one seed."""
    for run in runs:
        if run["who"] == "target" and run["seeds"] > 1:
            seeds, losses = run["seeds"], run["held_out_losses"]
            means = _means(losses, seeds)
            best = min(range(len(means)), key=means.__getitem__)
            own: list[float] = losses[best * seeds : (best + 1) * seeds]
            return stdev(own)
    return None


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


def _means_by(runs: Runs) -> dict[str, list[float]]:
    return {run["who"]: _means(run["held_out_losses"], run["seeds"]) for run in runs}


def _means(losses: Sequence[float], seeds: int) -> list[float]:
    return [fmean(losses[i : i + seeds]) for i in range(0, len(losses), seeds)]


def _ranked(losses: Sequence[float]) -> list[float]:
    return [loss if loss < inf else 1e9 for loss in losses]
