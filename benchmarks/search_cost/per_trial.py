"""What a further trial costs its search worker, by how many the study has already."""

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.search_cost.filled import fill
from benchmarks.search_cost.simulated import FUSED, search_worker, searched, train_one
from benchmarks.search_cost.statements import Statements


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one trial, from the request for it to its end, or to its pause under promotion.

    Attributes:
        cpu_ms: of the search worker's process. Where it shares the side task's core, bubbles pay it.
        elapsed_ms: with what it waits for a database, meanwhile the side task trains.
        reports: how many scores there were.
        statements: of SQL, by the claims and by Optuna.
    """

    cpu_ms: float
    elapsed_ms: float
    reports: int
    statements: int


def costs_after(search: str, storage: str, directory: Path, trials: int, times: int) -> list[dict[str, Any]]:
    """Measure trials one by one in a study that has so many, while the worker holds others.

    Args:
        search: one of `simulated`'s.
        storage: a study's, with fewer trials or none.
        directory: the study's.
        trials: that have ended or paused before.
        times: how many to measure.
    """
    study = searched(search, trials + times + 2 * FUSED)
    with search_worker(study, storage, directory, "w") as worker:
        fill(study, worker._study, storage, directory, trials)
        worker.ask(FUSED - 1)
        with Statements() as statements:
            for _ in range(2):  # connections are opened, and statements compiled
                train_one(study, worker)
            gc.collect()
            return [asdict(_cost(lambda: train_one(study, worker), statements)) for _ in range(times)]


def _cost(train: Callable[[], int], statements: Statements) -> Cost:
    begun, cpu_s, elapsed_s = statements.count, time.process_time(), time.perf_counter()
    reports = train()
    cpu_ms, elapsed_ms = 1e3 * (time.process_time() - cpu_s), 1e3 * (time.perf_counter() - elapsed_s)
    return Cost(round(cpu_ms, 3), round(elapsed_ms, 3), reports, statements.count - begun)
