"""Each benchmark's own measurement runs, as small as it goes, and its summary takes what comes out.

Commands as users give them: `tests/integration/test_benchmark_commands.py`.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import adapters, audit, fusion, guard_power, neighbour, pauses, refill, study, wake_up
from benchmarks.search_cost import __main__ as search_cost
from benchmarks.shared import fusion_baselines
from benchmarks.shared.fused_models import Alone, Classes
from benchmarks.shared.fusion_baselines import BASELINES, FUSED
from benchmarks.transfer import end_to_end, experiments, figures
from tests.support.slow_cases import others_slow


@pytest.fixture(autouse=True)
def cores() -> Iterator[None]:
    """All cores, of which benchmarks choose."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def two_cores() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two cores are needed")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A quick run's command line writes there."""
    file = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["benchmark", "--quick", "--json", str(file)])
    return file


def finite(values: dict[str, Any]) -> bool:
    return all(value is not None and value == value for value in values.values())


@pytest.mark.usefixtures("two_cores")
def test_wake_up(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake_up, "BUBBLES_MS", (0.5, 1.0))
    monkeypatch.setattr(wake_up, "COMPUTE_MS", 0.5)
    monkeypatch.setattr(wake_up, "SETS_UP_S", 0.1)
    wake_up.main()
    written = json.loads(results.read_text())
    assert len(written["runs"]) == 2 * len(wake_up.ARMS) and finite(written["summary"])


@pytest.mark.usefixtures("two_cores")
def test_neighbour(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour, "SETS_UP_S", 0.1)
    monkeypatch.setattr(neighbour, "TOKENS", 8)
    neighbour.main()
    assert json.loads(results.read_text())["summary"]["rounds"] == 5


def test_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "BURSTS", 1)
    monkeypatch.setattr(pauses, "TRIALS", 3)
    run = pauses._measure(3)
    assert len(run["rounds_ms"]) == 3 and finite(pauses.summary([run]))


def test_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion_baselines, "PROCESSES_BLOCK_S", 0.01)
    monkeypatch.setattr(fusion, "_peak_mib", lambda name, size: 100.0)
    run = fusion.measure("mlp_32", (1, 2), 0.0)
    assert not run["unable"] and all(set(each) == {FUSED, *BASELINES} for each in run["by_k"][1]["rounds_s"])
    found = fusion.summary([run])
    assert all(found[key] > 0 for key in found if key.startswith("geometric_mean")) and found["vmap_models"] == 1


@pytest.mark.parametrize("name", ["mlp_32", "resnet18_4"])
def test_the_baselines_of_fused_trials_train_the_same(name: str, float64: None) -> None:
    study = Classes(name)
    stacked, alone = fusion_baselines.Stacked(study, 2), Alone(study, fused_optimizer=True)
    alone.step()
    for _ in range(2):
        stacked.step()
        alone.step()
    for parameter, own in alone.model.named_parameters():
        assert torch.allclose(stacked.parameters[parameter][0], own, atol=1e-9), parameter


def test_processes_are_stopped_between_blocks() -> None:
    with fusion_baselines.on_one_core(), ExitStack() as ends:
        processes = fusion_baselines.Processes(Classes("mlp_32"), 2, ends)
        assert processes.rate_per_s(0.2) > 0
        done = processes.done()
        time.sleep(0.1)
        assert processes.done() == done


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.slow), True])
def test_adapters(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "BLOCK_S", 0.0)
    monkeypatch.setattr(adapters, "SIZE", 3)
    run = adapters._measure("own_gpt", "own_gpt", own, 2)
    assert run["ratio"] > 0 and run["memory_ratio"] > 0.9 and finite(adapters._summary([run]))


def test_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "STEPS", 5)
    run = audit._measure("mlp_32", 2, 0.0)
    assert run["mismatches"] == 0 and len(run["pairs_ms"]) == 2 and finite(audit._summary([run]))


@pytest.mark.slow
def test_refill(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"QUICK_TRIALS": 12, "QUICK_PAIRS": 2, "QUICK_STEPS": 2, "EPOCHS": 4, "RUNGS": (1, 2)}.items():
        monkeypatch.setattr(refill, name, value)
    runs: list[dict[str, Any]] = [
        {"scenario": "study", "pairs": refill._study_pairs(True)},
        {"scenario": "mlp_32", "pairs_ms": refill._step_pairs("mlp_32", True)},
    ]
    assert finite(refill._summary(runs))


@pytest.mark.parametrize("scenario", others_slow(["random_sqlite", "asha_journal"], ["asha_journal"]))
def test_search_cost(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_cost, "SIZES", (10,))
    monkeypatch.setattr(search_cost, "QUICK_TRIALS", 3)
    (run,) = search_cost._runs(scenario, None, True)
    assert run["n"] == 3 and finite(search_cost._summary([run]))


def test_guard_power(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_power, "STEPS", 200)
    found = list(guard_power.cells(1, guard_power.TWO_RANKS))
    assert len(found) == len(guard_power.DEVIATIONS) * len(guard_power.SLOWDOWNS)
    assert all(guard_power.row(cell).startswith("two_ranks") for cell in found)


@pytest.mark.slow
def test_study(monkeypatch: pytest.MonkeyPatch) -> None:
    made = study._study()
    made.trials, made.epochs, made.rungs = 6, 3, (1,)
    monkeypatch.setattr(study, "_study", lambda: made)
    monkeypatch.setattr(study, "SEEDS_OF_BEST", 2)
    runs = [{"scenario": arm, "seed": 0, **study.ARMS[arm]()} for arm in ("optuna", "optuna_pruned")]
    assert runs[0]["epochs_kept"] == 18 and len(runs[0]["trials"]) == 6
    assert study._summary(runs)["optuna_n"] == 1


def test_a_study_is_timed_to_a_target_that_luck_does_not_set_and_net_of_the_slowdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = iter([0.7, 0.8, 0.9])
    monkeypatch.setattr(study, "_epochs", lambda *_: [(27, next(again))])
    monkeypatch.setattr(study, "SEEDS_OF_BEST", 3)

    def run(arm: str, slowdown: float, *trials: tuple[float, float | None]) -> dict[str, Any]:
        rows: list[Any] = [[seconds, score, {}] for seconds, score in trials]
        return {
            "scenario": arm,
            "main": {"slowdown": slowdown},
            "epochs_kept": 10,
            "epochs_lost": 1,
            "trials": rows,
        }

    runs = [
        *(run("bubbles", slowdown, (3.0, None), (10.0, 0.71), (36.0, 0.95)) for slowdown in (0.2, 0.3)),
        *(run("ghosts", slowdown, (20.0, 0.6), (36.0, 0.6)) for slowdown in (-0.1, -0.1)),
        run("optuna", 0.0, (20.0, 0.69), (40.0, 0.71), (72.0, 0.9)),
    ]
    found = study._summary(runs)
    assert found["target"] == pytest.approx(0.7), "not the luckiest score, 0.95"
    assert found["bubbles_to_target_s_median"] == 10.0 and found["ghosts_to_target_s_median"] is None
    assert found["bubbles_net_s_median"] == pytest.approx(10 * (1 + 2 * 0.25 / 1.25))
    assert found["bubbles_net_s_at_most"] > found["bubbles_net_s_median"]
    assert found["optuna_over_bubbles"] == pytest.approx(40 / 14) and "optuna_over_ghosts" not in found
    assert found["bubbles_trials_per_hour"] == 300 and found["optuna_trials_per_hour"] == 150
    assert (found["ghosts_samples_kept"], found["ghosts_samples_lost"]) == (14_000, 1_400)
    _, _, bubbles, ghosts, optuna = study.table(found).splitlines()
    assert (
        bubbles.startswith("| `bubbles` | 10.0 (10.0 to 10.0) | 14.0, at most ")
        and "| 300 | 14,000 | 1,400 |" in bubbles
    )
    assert ghosts.startswith("| `ghosts` | –, 0 of 2 runs | – | −10.0% (−10.0% to −10.0%) | 200 |")
    assert optuna.startswith("| `optuna` | 40.0 (40.0 to 40.0) | 40.0 | – | 150 |")


@pytest.mark.parametrize("processes", others_slow([1, 2], [1]))
def test_transfer(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process takes long to load what it needs."""
    monkeypatch.setattr(end_to_end, "PROCESSES", processes)
    monkeypatch.setattr(end_to_end, "FUSED", 4)
    runs = [{"scenario": "oracles", **run} for run in experiments.EXPERIMENTS["oracles"](True)]
    assert figures.summary(runs)
    with end_to_end.workers(2) as ask:
        traces = [end_to_end.ours(ask, 4 * processes, 2, 0), end_to_end.plain(ask, 2, 0, "median")]
        judged = end_to_end.judged(ask, traces, 1, 2)
    for trace in traces:
        assert len(trace) == 2 and all(seconds > 0 and loss > 0 for seconds, loss, _ in trace)
    assert len(judged) == 1 and len(judged[0]) == 2
