"""CPU time of the search worker per trial, by storage, search and size of the study; and what a database sustains.

    python -m benchmarks.search_cost [--quick] [--json FILE] [--only SCENARIO]

Trials are simulated: their scores come at once. A scenario is a search and a storage, such as `default_journal`, or
`sustained`. CPU time comes out of the bubbles, so training loses it. PostgreSQL is skipped where there is no server.
"""

import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import optuna

from benchmarks.search_cost.ceiling import ceiling
from benchmarks.search_cost.per_trial import costs_after
from benchmarks.search_cost.simulated import ASHA, DEFAULT, RANDOM
from benchmarks.search_cost.statements import sustained
from benchmarks.shared import postgres
from benchmarks.shared.results import finish, kept_runs, parse

STORAGES = ("journal", "sqlite", "postgresql")
SIZES = (10, 1000, 10_000)
TRIALS, QUICK_TRIALS = 60, 12
WORKERS = (1, 4, 16)
SECONDS, QUICK_SECONDS = 20.0, 5.0
SUSTAINED = "sustained"
WANTED_PER_S = 500
"""Statements of SQL: about those of 1000 workers of 16 trials with rungs of 10 minutes."""


def main() -> int:
    """Measure, print, write."""
    options = parse("search_cost", "CPU time of the search worker, by storage")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    scenarios = [f"{search}_{storage}" for search in (DEFAULT, RANDOM, ASHA) for storage in STORAGES]
    runs = kept_runs(options)
    missing = postgres.missing()
    if missing is not None:
        print(f"nothing is measured with PostgreSQL: {missing}", file=sys.stderr)
    with nullcontext() if missing is not None else postgres.running() as server:
        for scenario in (*scenarios, SUSTAINED):
            if options.only in (None, scenario) and (server or scenario not in (SUSTAINED, *_of("postgresql"))):
                for run in _runs(scenario, server, options.quick):
                    print({key: value for key, value in run.items() if key != "trials"}, flush=True)
                    runs.append(run)
    finish("search_cost", options, runs, _summary(runs))
    return 0


def _of(storage: str) -> list[str]:
    return [f"{search}_{storage}" for search in (DEFAULT, RANDOM, ASHA)]


def _runs(scenario: str, server: postgres.Server | None, is_quick: bool) -> Iterator[dict[str, Any]]:
    if scenario == SUSTAINED:
        for workers in WORKERS:
            for are_whole in (True, False):
                with _study("postgresql", server) as (storage, directory):
                    seconds = QUICK_SECONDS if is_quick else SECONDS
                    found = sustained(storage, directory, workers, seconds, are_whole=are_whole)
                if not are_whole:
                    found |= _of_ceiling(found, server, seconds)
                holds = found["statements_per_s"] >= WANTED_PER_S
                yield {"scenario": scenario, "are_whole": are_whole, f"holds_{WANTED_PER_S}_per_s": holds, **found}
        return
    search, _, kind = scenario.partition("_")
    with _study(kind, server) as (storage, directory):
        for size in SIZES:
            trials = costs_after(search, storage, directory, size, QUICK_TRIALS if is_quick else TRIALS)
            yield {"scenario": scenario, "size": size, **_medians(trials), "trials": trials}


def _of_ceiling(found: dict[str, Any], server: postgres.Server | None, seconds: float) -> dict[str, Any]:
    """What the server takes of the same statements where no program of ours sends them, and our share of that."""
    if server is None or server.pgbench is None:
        return {}
    with _study("postgresql", server) as (storage, directory):
        most = ceiling(server.pgbench, storage, directory, found["workers"], seconds)["statements_per_s"]
    return {"ceiling_per_s": most, "share_of_ceiling": round(found["statements_per_s"] / most, 2)}


@contextmanager
def _study(kind: str, server: postgres.Server | None) -> Iterator[tuple[str, Path]]:
    """The storage of an empty study, and its directory."""
    with tempfile.TemporaryDirectory(prefix="bsq-") as folder:
        directory = Path(folder) / "study"
        if kind == "postgresql":
            assert server is not None
            with server.database() as name:
                yield server.url(name), directory
        else:
            yield f"{folder}/study.journal" if kind == "journal" else f"sqlite:///{folder}/study.db", directory


def _medians(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"n": len(trials)}
    for key in ("cpu_ms", "elapsed_ms", "statements"):
        found[key], found[f"{key}_ci95"] = median_with_ci95([trial[key] for trial in trials])
    return found


def median_with_ci95(values: Sequence[float]) -> tuple[float, list[float]]:
    """(median, its 95% interval between two of the values), whatever their distribution: by the binomial's normal."""
    ranked, n = sorted(values), len(values)
    half = 1.96 * math.sqrt(n)
    low, high = max(0, math.floor((n - half) / 2)), min(n - 1, math.ceil((n + half) / 2))
    return (ranked[(n - 1) // 2] + ranked[n // 2]) / 2, [ranked[low], ranked[high]]


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for run in runs:
        if run["scenario"] == SUSTAINED:
            what = "sustained" if run["are_whole"] else "claims"
            for key in ("statements_per_s", "of_claims_per_s", "trials_per_s"):
                summary[f"{what}_by_{run['workers']}_{key}"] = run[key]
            if "share_of_ceiling" in run:
                summary[f"claims_by_{run['workers']}_share_of_ceiling"] = run["share_of_ceiling"]
        else:
            for key in ("cpu_ms", "elapsed_ms", "statements"):
                summary[f"{run['scenario']}_{run['size']}_{key}"] = run[key]
                summary[f"{run['scenario']}_{run['size']}_{key}_ci95"] = run[f"{key}_ci95"]
    return summary


if __name__ == "__main__":
    sys.exit(main())
