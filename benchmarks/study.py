"""How long a whole study takes to find a good configuration: in bubbles, on a core of its own, and by Optuna alone.

    python -m benchmarks.study [--quick] [--json FILE] [--only ARM]

One study of 200 trials (`benchmarks.studies.searched_digits`), several times with other seeds. For each seed all
arms run, in random order. FILE is written after each run; if it was stopped, the same command at the same commit goes
on.

- *bubbles*: in the bubbles of `examples/pretrain.py` in two stages, started by `ds_squeeze`;
- *ghosts*: in the bubbles of a ghost stage, the second of four, with four micro-batches;
- *dedicated*: `trials run` on one core;
- *optuna_pruned*: Optuna with its median pruner, one plain PyTorch trial after another, on one core;
- *optuna*: the same without a pruner.

*Time to the target*: from the study's beginning to the first completed trial with at least the target's score. That is
the score of the best configuration of all runs, less one standard deviation: both over seeds that no run has had, for
the best of so many scores is a lucky one. *Net* of the main job's slowdown, it is longer by the time that the job's
devices have lost until then, at the mean slowdown of an arm's runs; *at most*, at the upper end of its 95% interval.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import optuna
import torch
from optuna.trial import FrozenTrial, TrialState

from benchmarks.shared.paths import ROOT
from benchmarks.shared.processes import environment, last_core, run_directories, start
from benchmarks.shared.results import commit, finish, kept_runs, parse, write
from benchmarks.studies import SEARCHED_DIGITS
from benchmarks.studies.searched_digits import SEED_VARIABLE, TRIALS_VARIABLE
from squeezer.reports.student_t import t_quantile_975
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage
from trials.study import Study, load_study

REPEATS, QUICK_REPEATS = 5, 1
QUICK_TRIALS = 40
SEEDS_OF_BEST = 8
DEVICES = {"bubbles": 2, "ghosts": 1}
"""Of the main job."""
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
    if options.quick:
        os.environ[TRIALS_VARIABLE] = str(QUICK_TRIALS)
    runs = _runs_before(options)
    done = {(run["scenario"], run["seed"]) for run in runs}
    for seed in range(QUICK_REPEATS if options.quick else REPEATS):
        for arm in random.Random(seed).sample(list(ARMS), len(ARMS)):
            if options.only not in (None, arm) or (arm, seed) in done:
                continue
            os.environ[SEED_VARIABLE] = str(seed)
            runs.append({"scenario": arm, "seed": seed, **ARMS[arm]()})
            brief = {key: value for key, value in runs[-1].items() if key != "trials"}
            print(brief, flush=True)
            if options.json:
                write("study", options, runs, {})
    summary = _summary(runs)
    finish("study", options, runs, summary)
    print(table(summary))
    return 0


def _runs_before(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs in FILE, if the same commit made them; with `--only`, whatever made them."""
    if options.json and options.json.exists():
        kept = json.loads(options.json.read_text(encoding="utf-8"))
        if kept["commit"] == commit() and kept["quick"] == options.quick:
            runs: list[dict[str, Any]] = kept["runs"]
            return runs
    return kept_runs(options)


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
    path.write_text(
        CONFIG.format(study=SEARCHED_DIGITS, name=NAME, directory=run.parent / "studies", run=run), encoding="utf-8"
    )
    return str(path)


def _until_done(run: Path, *processes: "subprocess.Popen[bytes]") -> None:
    study: optuna.Study | None = None  # opened once: to read it anew each time would take the job's cores
    count = _study().trials
    while study is None or not _is_done(study, count):
        study = study or _opened(run.parent / "studies")
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
        command = [
            sys.executable,
            "-m",
            "trials",
            "run",
            str(SEARCHED_DIGITS),
            "--study-name",
            NAME,
            "--directory",
            str(studies),
        ]
        command = ["taskset", "-c", last_core(), *command]
        subprocess.run(command, cwd=ROOT, env=environment(pages), check=True, capture_output=True)
        return _fused(studies)


def _is_done(study: optuna.Study, count: int) -> bool:
    trials = study.get_trials(deepcopy=False)
    return len(trials) == count and all(trial.state.is_finished() for trial in trials)


def _opened(studies: Path) -> optuna.Study | None:
    """None: no worker has created it yet."""
    journal = studies / "study.journal"
    try:
        return optuna.load_study(study_name=NAME, storage=open_storage(str(journal))) if journal.exists() else None
    except KeyError:
        return None


def _fused(studies: Path) -> dict[str, Any]:
    """What became of a fused study: each trial, and the epochs that were kept and lost."""
    found = _opened(studies)
    assert found is not None
    claims = Claims(connect("", studies / NAME), NAME, "")
    spans = claims.spans()
    claims.close()
    kept, lost = (sum(span.to_epoch - span.from_epoch for span in spans if span.kept is want) for want in (True, False))
    return {"epochs_kept": kept, "epochs_lost": lost, "trials": _rows(found.trials)}


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
    return load_study(SEARCHED_DIGITS)


ARMS: dict[str, Callable[[], dict[str, Any]]] = {
    "bubbles": _real,
    "ghosts": _ghost,
    "dedicated": _dedicated,
    "optuna": lambda: _optuna(optuna.pruners.NopPruner),
    "optuna_pruned": lambda: _optuna(lambda: optuna.pruners.MedianPruner(n_startup_trials=5)),
}


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The target, and by arm: time to it (median, and each run's), trials per hour, samples kept and lost."""
    _, params = max(
        ((score, params) for run in runs for _, score, params in run["trials"] if score is not None),
        key=lambda found: found[0],
    )
    study = _study()
    samples = sum(len(targets) for _, targets in study.batches(0))
    again = [list(_epochs(study, params, 10_000 + seed))[-1][1] for seed in range(SEEDS_OF_BEST)]
    target = fmean(again) - stdev(again)
    summary: dict[str, Any] = {"best": fmean(again), "seed_sd": stdev(again), "target": target}
    for arm in ARMS:
        ours = [run for run in runs if run["scenario"] == arm]
        if not ours:
            continue
        times = [_time_to(run["trials"], target) for run in ours]
        summary[f"{arm}_n"] = len(ours)
        summary[f"{arm}_to_target_s"] = [None if each is None else round(each, 1) for each in times]
        reached = sorted(math.inf if each is None else each for each in times)
        middle = median(reached)
        summary[f"{arm}_to_target_s_median"] = middle if middle < math.inf else None
        summary[f"{arm}_trials_per_hour"] = median(len(run["trials"]) / run["trials"][-1][0] * 3600 for run in ours)
        for which in ("kept", "lost"):
            summary[f"{arm}_samples_{which}"] = median(run[f"epochs_{which}"] for run in ours) * samples
        if arm in DEVICES:
            summary |= {f"{arm}_{name}": value for name, value in _cost(arm, ours, middle).items()}
    for arm in DEVICES:
        for other in ARMS.keys() - DEVICES.keys():
            theirs, net = summary.get(f"{other}_to_target_s_median"), summary.get(f"{arm}_net_s_median")
            if theirs is not None and net is not None:
                summary[f"{other}_over_{arm}"] = theirs / net
    return summary


def _cost(arm: str, runs: Sequence[dict[str, Any]], to_target_s: float) -> dict[str, Any]:
    """The main job's slowdown, and the time to the target with what its devices have lost until then."""
    slowdowns = [run["main"]["slowdown"] for run in runs if run["main"]["slowdown"] is not None]
    if not slowdowns:
        return {"slowdown": None, "slowdown_ci95": None, "net_s_median": None, "net_s_at_most": None}
    slowdown, interval = fmean(slowdowns), None
    if len(slowdowns) > 1:
        half = t_quantile_975(len(slowdowns) - 1) * stdev(slowdowns) / math.sqrt(len(slowdowns))
        interval = [slowdown - half, slowdown + half]
    net_s, most_s = (
        to_target_s * (1 + DEVICES[arm] * max(each, 0.0) / (1 + max(each, 0.0)))  # a job is not sped up
        for each in (slowdown, slowdown if interval is None else interval[1])
    )
    return {
        "slowdown": slowdown,
        "slowdown_ci95": interval,
        "net_s_median": net_s if net_s < math.inf else None,
        "net_s_at_most": most_s if interval is not None and most_s < math.inf else None,
    }


def _time_to(trials: Sequence[Sequence[Any]], target: float) -> float | None:
    return next((seconds for seconds, score, _ in trials if score is not None and score >= target), None)


def table(summary: dict[str, Any]) -> str:
    """What each arm took, in Markdown."""
    lines = ["| arm | to the target, s | net of the slowdown, s | slowdown | trials per hour | samples kept | lost |"]
    lines.append("|---" * 7 + "|")
    for arm in ARMS:
        if f"{arm}_n" not in summary:
            continue
        reached = [each for each in summary[f"{arm}_to_target_s"] if each is not None]
        times = f"{_shown(summary[f'{arm}_to_target_s_median'])} ({min(reached)} to {max(reached)})" if reached else "–"
        if len(reached) < summary[f"{arm}_n"]:
            times += f", {len(reached)} of {summary[f'{arm}_n']} runs"
        net = _shown(summary.get(f"{arm}_net_s_median", summary[f"{arm}_to_target_s_median"]))
        most_s, slowdown = summary.get(f"{arm}_net_s_at_most"), summary.get(f"{arm}_slowdown")
        net += "" if most_s is None else f", at most {most_s:.1f}"
        cost = "–" if slowdown is None else f"{slowdown:+.1%}"
        if summary.get(f"{arm}_slowdown_ci95") is not None:
            cost += " ({:+.1%} to {:+.1%})".format(*summary[f"{arm}_slowdown_ci95"])
        samples = (f"{summary[f'{arm}_samples_{which}']:,.0f}" for which in ("kept", "lost"))
        row = (f"`{arm}`", times, net, cost, f"{summary[f'{arm}_trials_per_hour']:,.0f}", *samples)
        lines.append(f"| {' | '.join(row)} |".replace("-", "−"))
    return "\n".join(lines)


def _shown(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.1f}"


if __name__ == "__main__":
    raise SystemExit(main())
