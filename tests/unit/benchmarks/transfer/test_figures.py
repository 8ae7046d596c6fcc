"""From runs of the transfer benchmark to its summary and its picture."""

from math import inf, log2
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.transfer.figures import (
    best_rate,
    drift,
    rank_correlation,
    regret,
    seed_sd,
    speedup,
    summary,
    worst_slope,
)
from benchmarks.transfer.picture import main, picture
from tests.support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
SVG = "{http://www.w3.org/2000/svg}"


def sweep(width: int, best: float, way: str = "shrunk") -> dict[str, Any]:
    """Losses that have their least at the rate 2 to the power of `best`."""
    rates = [2.0**i for i in range(-8, 1)]
    losses = [2.718281828 ** (0.1 * (log2(rate) - best) ** 2) for rate in rates]
    own = {"way": way, "model": "mlp", "optimizer": "adam", "width": width, "scenario": "drift_mlp_adam"}
    return {**own, "rates": rates, "training_losses": losses}


def test_the_best_rate_lies_between_those_that_were_tried() -> None:
    assert best_rate(sweep(64, -3.3)) == pytest.approx(-3.3, abs=0.01)
    assert best_rate(sweep(64, 5)) == 0
    diverged = sweep(64, -3.0)
    diverged["training_losses"][6] = inf
    assert best_rate(diverged) == -3


def test_drift_is_that_from_the_target() -> None:
    runs = [sweep(16, -3.0), sweep(64, -4.0), sweep(256, -4.5), sweep(16, -1.0, "plain"), sweep(256, -5.0, "plain")]
    assert drift(runs, "shrunk", 16) == pytest.approx(1.5, abs=0.01)
    assert drift(runs, "shrunk", 4) == pytest.approx(0.5, abs=0.01)
    assert drift(runs, "plain", 16) == pytest.approx(4, abs=0.01)
    assert drift(runs, "shrunk", 3) is None


def test_the_slope_is_the_worst_of_any_layer() -> None:
    own = {"way": "shrunk", "model": "mlp", "optimizer": "adam"}
    runs = [{**own, "width": w, "layers": {"0": [1.0, 1.0], "1": [w**-0.5, w**-0.5]}} for w in (16, 64, 256)]
    assert worst_slope(runs, "shrunk") == pytest.approx(0.5)
    assert worst_slope(runs, "plain") is None


def test_ranks_and_regret() -> None:
    target, again = [1.0, 1.2, 2.0, 2.2, 3.0, 3.2], [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    swapped = [2.0, 2.0, 1.0, 1.0, 3.0, 3.0]
    given = {"target": target, "target again": again, "2": again, "4": again, "8": swapped}
    runs = [{"who": who, "seeds": 2, "held_out_losses": losses} for who, losses in given.items()]
    assert [rank_correlation(runs, who) for who in ("2", "target again", "8")] == pytest.approx([1, 1, 0.5])
    assert seed_sd(runs) == pytest.approx(0.1414, rel=0.01)
    assert regret(runs, 0.1414) == pytest.approx(1.0 / 0.1414, rel=0.01)
    assert rank_correlation([], "2") is regret([], None) is seed_sd([]) is None


def test_the_speedup_is_to_a_target_as_good_as_the_best_known() -> None:
    runs: list[dict[str, Any]] = [{"who": "judge", "losses": [[0.30, 0.29, 0.31], [0.2, 0.5, 0.5]]}]  # 0.30 + 0.01
    for repeat in range(3):
        early: Any = (1.0, 0.35, {})
        runs.append({"who": "ours", "repeat": repeat, "trace": [early, (2.0 + 0.1 * repeat, 0.309, {})]})
        runs.append({"who": "optuna, median", "repeat": repeat, "trace": [early, (8.0 + repeat, 0.25, {})]})
        runs.append({"who": "optuna, none", "repeat": repeat, "trace": [early, (20.0, 0.32, {})]})
    found = speedup(runs)
    assert 3.5 < found["end_to_end_speedup_low"] < found["end_to_end_speedup"] < 5
    assert found["end_to_end_speedup_unpruned"] == pytest.approx(20 / 2.1, rel=0.01), "its budget's end"
    assert (found["end_to_end_median_reached"], found["end_to_end_none_reached"]) == (1, 0)
    runs[1]["trace"] = [(2.0, 0.32, {})]  # not as good
    assert speedup(runs)["end_to_end_speedup"] is None
    assert speedup(runs)["end_to_end_reached"] == pytest.approx(2 / 3)


def test_what_has_not_run_has_no_figure() -> None:
    found = summary([{"scenario": "oracles", "error": 1e-13}])
    assert found.pop("oracle_error") == 1e-13
    assert set(found.values()) == {None}


def test_the_committed_picture_is_that_of_the_results(tmp_path: Path) -> None:
    copy = tmp_path / "transfer.json"
    copy.write_bytes((RESULTS / "transfer.json").read_bytes())
    main([str(copy)])
    assert copy.with_suffix(".svg").read_text() == (RESULTS / "transfer.svg").read_text()


def test_each_width_has_a_line_and_a_dot_at_its_best_rate_in_both_panels() -> None:
    runs = [sweep(width, best, way) for way in ("shrunk", "plain") for width, best in ((16, -3.0), (64, -6.0))]
    runs[0]["training_losses"][-1] = inf  # one that diverged ends the line
    drawn = ElementTree.fromstring(picture(runs))
    lines, dots = drawn.findall(f"{SVG}polyline"), drawn.findall(f"{SVG}circle")
    assert [len(str(line.get("points")).split()) for line in lines] == [8, 9, 9, 9]
    first, second, third, fourth = (float(str(dot.get("cx"))) for dot in dots)
    assert first - second == pytest.approx(third - fourth) and first > second, "a larger rate lies further to the right"
