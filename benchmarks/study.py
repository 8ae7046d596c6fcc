"""How long a whole study takes to find a good configuration: in bubbles, on a core of its own, and by Optuna alone.

    python -m benchmarks.study [--quick] [--json FILE] [--only ARM]

One study of 200 trials (`benchmarks.utilization.searched_digits`), several times per arm with other seeds, in random
order:

- *bubbles*: in the bubbles of `examples/pretrain.py` in two stages, started by `ds_squeeze`;
- *ghosts*: in the bubbles of a ghost stage, the second of four, with four micro-batches;
- *dedicated*: `trials run` on one core;
- *optuna_pruned*: Optuna with its median pruner, one plain PyTorch trial after another, on one core;
- *optuna*: the same without a pruner.

*Time to the target*: from the study's beginning to the first completed trial with at least the target's score, which is
the best score of all runs less one standard deviation over seeds of that configuration. Where trials run in bubbles the
main job's slowdown stands beside it: its devices work for the job meanwhile.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, stdev
from typing import Any

import optuna
import torch
from optuna.trial import FrozenTrial, TrialState

from benchmarks.common import ROOT, environment, finish, kept_runs, parse, run_directories
from benchmarks.processes import last_core, start
from benchmarks.utilization.searched_digits import SEED_VARIABLE
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage
from trials.study import Study, load_study

STUDY = ROOT / "benchmarks" / "utilization" / "searched_digits.py"
REPEATS, QUICK_REPEATS = 5, 1
SEEDS_OF_BEST = 8
NAME = "searched"

CONFIG = """
[guard]
slowdown_budget = 0.1
[side]
study = "{study}"
study_name = "{name}"
study_directory = "{directory}"
[run]
directory = "{run}"
calibrate_s = 0.0
"""


def main() -> int:
    """Measure, print, write."""
    options = parse("study", "the time that a whole study takes, by where it trains")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    runs = kept_runs(options)
    wanted = [(arm, seed) for seed in range(QUICK_REPEATS if options.quick else REPEATS) for arm in ARMS]
    random.Random(0).shuffle(wanted)
    for arm, seed in wanted:
        if options.only in (None, arm):
            os.environ[SEED_VARIABLE] = str(seed)
            runs.append({"scenario": arm, "seed": seed, **ARMS[arm]()})
            brief = {key: value for key, value in runs[-1].items() if key != "trials"}
            print(brief, flush=True)
    finish("study", options, runs, _summary(runs))
    return 0


def _real() -> dict[str, Any]:
    """Beside the demo's job, on two cores."""
    with run_directories() as (run, pages):
        config = _config(run)
        command = [sys.executable, "-m", "launch.ds_squeeze", "--squeezer", config, "--num_accelerators", "2"]
        command += [str(ROOT / "examples" / "pretrain.py"), "--steps", "100000"]
        with ExitStack() as ends:
            job = start(command, environment(pages), ends)
            _until_done(run, job)
            job.terminate()
            job.wait(120)
        return _measured(run)


def _ghost() -> dict[str, Any]:
    """Beside a ghost stage, the second of four, with four micro-batches, on one core."""
    core = last_core()
    with run_directories() as (run, pages):
        config, env = _config(run), environment(pages)
        run.mkdir()
        command = [
            sys.executable,
            "-m",
            "benchmarks.ghost.job",
            "--stages",
            "4",
            "--stage",
            "1",
            "--micro-batches",
            "4",
        ]
        with ExitStack() as ends:
            job = start([*command, "--steps", "100000", "--core", core, "--wait-for-side"], env, ends)
            daemon = [sys.executable, "-m", "squeezer", "daemon", "--config", config, "--job-pid", str(job.pid)]
            squeezer = start(["taskset", "-c", core, *daemon], env, ends)
            _until_done(run, job, squeezer)
            job.terminate()
            squeezer.wait(120)
        return _measured(run)


def _config(run: Path) -> str:
    path = run.parent / "squeezer.toml"
    path.write_text(CONFIG.format(study=STUDY, name=NAME, directory=run.parent / "studies", run=run), encoding="utf-8")
    return str(path)


def _until_done(run: Path, *processes: "subprocess.Popen[bytes]") -> None:
    while not _is_done(run.parent / "studies"):
        ended = [process.returncode for process in processes if process.poll() is not None]
        if ended:
            raise RuntimeError(f"a process ended with status {ended[0]} before the study did")
        time.sleep(1.0)


def _measured(run: Path) -> dict[str, Any]:
    """What became of the study, and what it cost the main job."""
    command = [sys.executable, "-m", "squeezer", "report", str(run), "--json"]
    report = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    main_job = {name: report["main"][name] for name in ("steps", "slowdown", "slowdown_ci95", "step_ms_alone")}
    main_job |= {"idle": report["bubbles"]["ratio"], "fill": report["side"]["fill"]}
    return {"main": main_job, **_fused(run.parent / "studies")}


def _dedicated() -> dict[str, Any]:
    """Without a main job, on one core."""
    with run_directories() as (run, pages):
        studies = run.parent / "studies"
        command = [sys.executable, "-m", "trials", "run", str(STUDY), "--study-name", NAME, "--directory", str(studies)]
        command = ["taskset", "-c", last_core(), *command]
        subprocess.run(command, cwd=ROOT, env=environment(pages), check=True, capture_output=True)
        return _fused(studies)


def _is_done(studies: Path) -> bool:
    trials = _trials(studies)
    return len(trials) == _study().trials and all(trial.state.is_finished() for trial in trials)


def _trials(studies: Path) -> list[FrozenTrial]:
    journal = studies / "study.journal"
    if not journal.exists():
        return []
    try:
        found: list[FrozenTrial] = optuna.load_study(study_name=NAME, storage=open_storage(str(journal))).trials
    except KeyError:
        return []
    return found


def _fused(studies: Path) -> dict[str, Any]:
    """What became of a fused study: each trial, and the epochs that were kept and lost."""
    claims = Claims(connect("", studies / NAME), NAME, "")
    spans = claims.spans()
    claims.close()
    kept, lost = (sum(span.to_epoch - span.from_epoch for span in spans if span.kept is want) for want in (True, False))
    return {"epochs_kept": kept, "epochs_lost": lost, "trials": _rows(_trials(studies))}


def _rows(trials: Sequence[FrozenTrial]) -> list[list[Any]]:
    """Of each trial that has ended: seconds since the study began, score if it has completed, hyperparameters."""
    began = min(trial.datetime_start for trial in trials if trial.datetime_start is not None)
    rows: list[list[Any]] = []
    for trial in trials:
        if trial.datetime_complete is not None:
            score = trial.value if trial.state is TrialState.COMPLETE else None
            rows.append([round((trial.datetime_complete - began).total_seconds(), 3), score, trial.params])
    return sorted(rows, key=lambda row: row[0])


def _optuna(pruner: Callable[[], optuna.pruners.BasePruner]) -> dict[str, Any]:
    """One trial after another, as Optuna's tutorial writes it."""
    study = _study()
    trained = 0

    def objective(trial: optuna.Trial) -> float:
        nonlocal trained
        score = 0.0
        for epoch, score in _epochs(study, study.suggest(trial), study.seed({}, trial.number)):
            trained += 1
            if epoch in study.rungs:
                trial.report(score, epoch)
                if trial.should_prune():
                    raise optuna.TrialPruned
        return score

    found = optuna.create_study(direction=study.direction, sampler=study.sampler(), pruner=pruner())
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {int(last_core())})
    found.optimize(objective, study.trials)
    os.sched_setaffinity(0, cores)
    return {"epochs_kept": trained, "epochs_lost": 0, "trials": _rows(found.trials)}


def _epochs(study: Study, params: dict[str, Any], seed: int) -> Iterator[tuple[int, float]]:
    """Train one model; yield each epoch, counted from 1, with its score at rungs and at the end."""
    torch.manual_seed(seed)
    model = study.model(params)
    optimizer: Any = study.optimizer(params, model)
    score = 0.0
    for epoch in range(1, study.epochs + 1):
        model.train()
        for inputs, targets in study.batches(epoch - 1):
            optimizer.zero_grad()
            study.loss(model(inputs), targets).backward()
            optimizer.step()
        if epoch in study.rungs or epoch == study.epochs:
            model.eval()
            with torch.no_grad():
                ((inputs, targets),) = study.validation()
                score = study.score(model(inputs), targets).item()
        yield epoch, score


def _study() -> Study:
    return load_study(STUDY)


ARMS: dict[str, Callable[[], dict[str, Any]]] = {
    "bubbles": _real,
    "ghosts": _ghost,
    "dedicated": _dedicated,
    "optuna": lambda: _optuna(optuna.pruners.NopPruner),
    "optuna_pruned": lambda: _optuna(lambda: optuna.pruners.MedianPruner(n_startup_trials=5)),
}


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The target, and by arm: time to it (median, and each run's), trials per hour, epochs kept and lost."""
    score, params = max(
        ((score, params) for run in runs for _, score, params in run["trials"] if score is not None),
        key=lambda found: found[0],
    )
    study = _study()
    again = [list(_epochs(study, params, 10_000 + seed))[-1][1] for seed in range(SEEDS_OF_BEST)]
    target = score - stdev(again)
    summary: dict[str, Any] = {"best": score, "seed_sd": stdev(again), "target": target}
    for arm in ARMS:
        ours = [run for run in runs if run["scenario"] == arm]
        if not ours:
            continue
        times = [_time_to(run["trials"], target) for run in ours]
        summary[f"{arm}_n"] = len(ours)
        summary[f"{arm}_to_target_s"] = [None if each is None else round(each, 1) for each in times]
        reached = [each for each in times if each is not None]
        summary[f"{arm}_to_target_s_median"] = median(reached) if len(reached) > len(times) / 2 else None
        summary[f"{arm}_trials_per_hour"] = median(len(run["trials"]) / run["trials"][-1][0] * 3600 for run in ours)
        summary[f"{arm}_epochs_kept"] = median(run["epochs_kept"] for run in ours)
        summary[f"{arm}_epochs_lost"] = median(run["epochs_lost"] for run in ours)
        if "main" in ours[0]:
            summary[f"{arm}_slowdown"] = [run["main"]["slowdown"] for run in ours]
            summary[f"{arm}_slowdown_ci95"] = [run["main"]["slowdown_ci95"] for run in ours]
    return summary


def _time_to(trials: Sequence[Sequence[Any]], target: float) -> float | None:
    return next((seconds for seconds, score, _ in trials if score is not None and score >= target), None)


if __name__ == "__main__":
    raise SystemExit(main())
