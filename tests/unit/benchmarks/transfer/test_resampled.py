"""Intervals by drawing seeds and configurations again."""

from typing import Any

import pytest

from benchmarks.transfer.figures import drift, rank_correlation, worst_slope
from benchmarks.transfer.resampled import by_configurations, by_seeds, ci95

RATES = [2.0**i for i in range(-6, 1)]


def sweep(width: int, best_by_seed: list[int]) -> dict[str, Any]:
    """Each seed has its least loss at another rate."""
    pairs = [(rate, 2 ** (0.1 * (i - 6 - best) ** 2)) for i, rate in enumerate(RATES) for best in best_by_seed]
    own = {"way": "shrunk", "model": "mlp", "optimizer": "adam", "width": width}
    return {**own, "rates": [rate for rate, _ in pairs], "training_losses": [loss for _, loss in pairs]}


def test_all_widths_and_rates_have_the_same_seeds_in_a_draw() -> None:
    """So what a seed moves at all widths alike is no drift; what it moves at one of them makes the interval wide."""

    def figure(runs: Any) -> float | None:
        return drift(runs, "shrunk", 4)

    alike = [sweep(16, [-5, -3, -1]), sweep(64, [-5, -3, -1])]
    assert ci95(figure, alike, by_seeds) == pytest.approx([0, 0], abs=1e-9)
    unlike = [sweep(16, [-3, -3, -3]), sweep(64, [-5, -3, -1])]
    low, high = ci95(figure, unlike, by_seeds) or []
    assert figure(unlike) == pytest.approx(0, abs=1e-9) and low == pytest.approx(0, abs=1e-9) and high > 1


def test_seeds_of_a_coordinate_check() -> None:
    own = {"way": "shrunk", "model": "mlp", "optimizer": "adam"}
    runs = [{**own, "width": w, "layers": {"0": [w**0.5, w**-0.5]}} for w in (16, 64)]
    low, high = ci95(lambda each: worst_slope(each, "shrunk"), runs, by_seeds) or []
    assert high == pytest.approx(0.5) and low < 0.5


def test_configurations_are_the_same_for_all_models() -> None:
    losses = [float(i) for i in range(12)]
    runs = [{"who": who, "seeds": 2, "held_out_losses": losses} for who in ("target", "8")]
    assert ci95(lambda each: rank_correlation(each, "8"), runs, by_configurations) == pytest.approx([1, 1])
    runs[1]["held_out_losses"] = [*losses[2:], 0.5, 0.6]
    low, high = ci95(lambda each: rank_correlation(each, "8"), runs, by_configurations) or []
    assert low < (rank_correlation(runs, "8") or 0) < high


def test_what_has_no_figure_has_no_interval() -> None:
    assert ci95(lambda _: None, [], by_seeds) is None
