"""CPU time of the search worker per new trial and per score, with a journal and with an SQLite database.

    python -m benchmarks.search_cost [--quick] [--json FILE]

A worker of each storage runs the example's study, cohort by cohort in alternating order. Its time comes out of the
bubbles, so training loses it.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna

from benchmarks.common import ROOT, finish, parse, ratio_with_ci95
from trials.search.worker import SearchWorker, WorkerConfig
from trials.study import load_study

STORAGES = {"journal": "{}/study.journal", "sqlite": "sqlite:///{}/study.db"}
COHORTS, QUICK_COHORTS = 12, 3


def main() -> int:
    """Measure, print, write."""
    options = parse("search_cost", "CPU time of the search worker, by storage")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = load_study(ROOT / "examples" / "digits.py")
    cohorts = QUICK_COHORTS if options.quick else COHORTS
    study.trials = cohorts * study.fused
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bsq-") as folder, ThreadPoolExecutor(1) as holder:
        workers = {
            name: SearchWorker(study, _config(storage.format(folder), Path(folder, name)), holder)
            for name, storage in STORAGES.items()
        }
        for cohort in range(cohorts):
            for name in STORAGES if cohort % 2 else reversed(STORAGES):
                runs.append({"scenario": name, "cohort": cohort, **_cohort(workers[name], study.fused)})
                print(runs[-1], flush=True)
    finish("search_cost", options, runs, _summary(runs))
    return 0


def _config(storage: str, directory: Path) -> WorkerConfig:
    return WorkerConfig(storage=storage, study_name="digits", worker="w", directory=directory)


def _cohort(worker: SearchWorker, trials: int) -> dict[str, Any]:
    """CPU ms of each of the search worker's answers, for one cohort of trials from first to last."""
    start_s = time.process_time()
    numbers = [trial["number"] for trial in worker.ask(trials)["trials"]]
    ask_ms = (time.process_time() - start_s) * 1e3 / len(numbers)
    study = worker._user_study
    reports, start_s = 0, time.process_time()
    for epoch in (*study.rungs, study.epochs):
        for number in tuple(numbers):
            reports += 1
            # scores that grow with the epochs; half of the trials are worse than the median, and are pruned
            score = epoch / study.epochs + number * 37 % 96 / 96
            if worker.report(number, epoch, score, epoch == study.epochs) is not None:
                numbers.remove(number)
    report_ms = (time.process_time() - start_s) * 1e3 / reports
    return {"ask_ms": round(ask_ms, 3), "report_ms": round(report_ms, 3), "reports": reports}


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for what in ("ask_ms", "report_ms"):
        by_storage = {name: [run[what] for run in runs if run["scenario"] == name] for name in STORAGES}
        for name, found in by_storage.items():
            summary[f"{name}_{what}"] = round(sum(found) / len(found), 2)
        ratio, ci95 = ratio_with_ci95(list(zip(by_storage["journal"], by_storage["sqlite"], strict=True)))
        summary[f"journal_over_sqlite_{what}"] = round(1 + ratio, 3)
        summary[f"journal_over_sqlite_{what}_ci95"] = [round(1 + bound, 3) for bound in ci95]
    return summary


if __name__ == "__main__":
    sys.exit(main())
