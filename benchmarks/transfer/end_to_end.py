"""The time until a good target is trained: surrogates and a few targets, against Optuna in two processes.

What is searched, and why, is in `tuned`. Both ways have two processes of one thread each, Optuna's default sampler, the
same ranges, and a budget that was fixed beforehand: after one repeat on a busy machine, Optuna's was cut from 64 trials
to 48, to save time. Where it then finds no good target, the end of its budget counts, which is in its favour. Processes
have loaded their libraries and data before the clock starts.

- Ours trains surrogates, `FUSED` at once in each process, as studies do unless they say otherwise. Then each process
  takes the best configuration that no target has had yet, for `TARGETS` targets in all.
- Optuna trains targets alone, with its median pruner or without one.

A target is good once a single run of it has a held-out loss of at most the best known configuration's, and one standard
deviation over seeds. The best known is found after all repeats, without a clock: of all targets that were trained in
any way, the `LIKELY` with the lowest losses are trained anew with other seeds.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import torch

from benchmarks.transfer.sweeps import trained
from benchmarks.transfer.tuned import SCALE, WIDTH, Tuned, train_alone
from trials.search.storage.optuna_storage import open_storage

TRIALS, SURROGATES, FUSED, TARGETS = 48, 128, 16, 6
STEPS, REPEATS, LIKELY, SEEDS = 220, 5, 6, 5
PROCESSES, NAME = 2, "plain"

Trace = list[tuple[float, float, dict[str, Any]]]
"""Seconds since the start, the held-out loss of a target that ended then, and its hyperparameters."""


def end_to_end(quick: bool) -> list[dict[str, Any]]:
    """Time each way in turn, and judge at the end what is good."""
    sizes = (4, 32, 2, 44, 1) if quick else (TRIALS, SURROGATES, TARGETS, STEPS, REPEATS)
    trials, surrogates, targets, steps, repeats = sizes
    likely, seeds = (2, 2) if quick else (LIKELY, SEEDS)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    runs: list[dict[str, Any]] = []
    with workers(steps) as ask:
        for repeat in range(repeats):
            found = {"ours": ours(ask, surrogates, targets, repeat)}
            found |= {f"optuna, {pruner}": plain(ask, trials, repeat, pruner) for pruner in ("median", "none")}
            runs += [{"who": who, "repeat": repeat, "trace": trace} for who, trace in found.items()]
        losses = judged(ask, [run["trace"] for run in runs], likely, seeds)
    return [*runs, {"who": "judge", "losses": losses}]


Ask = Callable[[list[Any]], list[Any]]
"""Hand tasks to the processes, in order, and return their answers in the same order, each with when it came."""


def ours(ask: Ask, surrogates: int, targets: int, repeat: int) -> Trace:
    """Search surrogates in rounds of what both processes train at once, then train targets, the best first."""
    study = optuna.create_study(direction="minimize", sampler=optuna.samplers.TPESampler(seed=1000 * repeat))
    space = Tuned(WIDTH, SCALE, 1)
    begin_s = time.time()
    while len(study.trials) < surrogates:
        asked = [study.ask() for _ in range(PROCESSES * FUSED)]
        chosen = [{**space.suggest(trial), "seed": 1000 * repeat + trial.number} for trial in asked]
        made = ask([("surrogates", chosen[i::PROCESSES]) for i in range(PROCESSES)])
        for i, (losses, _) in enumerate(made):
            for trial, loss in zip(asked[i::PROCESSES], losses, strict=True):
                study.tell(trial, loss)
    ranked = sorted(study.trials, key=lambda trial: float(trial.value or 0.0))[:targets]
    ended = ask([("target", {**trial.params, "seed": 1000 * repeat}) for trial in ranked])
    return [(end_s - begin_s, loss, trial.params) for (loss, end_s), trial in zip(ended, ranked, strict=True)]


def plain(ask: Ask, trials: int, repeat: int, pruner: str) -> Trace:
    """Let both processes take trials from one study of Optuna's."""
    with tempfile.TemporaryDirectory(prefix="bsq-") as folder:
        journal = str(Path(folder) / "study.journal")
        study = optuna.create_study(storage=open_storage(journal), study_name=NAME, direction="minimize")
        begin_s = time.time()
        ask([("search", (journal, trials, 1000 * repeat + i, pruner)) for i in range(PROCESSES)])
        return [
            (t.datetime_complete.timestamp() - begin_s, float(t.value or 0.0), t.params)
            for t in study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
            if t.datetime_complete
        ]


def judged(ask: Ask, traces: Iterable[Trace], likely: int, seeds: int) -> list[list[float]]:
    """The held-out losses, by seed, of targets with each of the likely best configurations."""
    best = sorted((each for trace in traces for each in trace), key=lambda each: each[1])[:likely]
    losses = ask([("target", {**params, "seed": 10**6 + seed}) for _, _, params in best for seed in range(seeds)])
    return [[loss for loss, _ in losses[seeds * i : seeds * (i + 1)]] for i in range(len(best))]


@contextmanager
def workers(steps: int) -> Iterator[Ask]:
    """Two processes that are ready to work."""
    context = multiprocessing.get_context("spawn")
    tasks, answers = context.Queue(), context.Queue()
    processes = [context.Process(target=_work, args=(steps, tasks, answers)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    for _ in processes:
        answers.get()

    def ask(given: list[Any]) -> list[Any]:
        for number, task in enumerate(given):
            tasks.put((number, task))
        return [answer for _, answer in sorted((answers.get() for _ in given), key=lambda each: each[0])]

    try:
        yield ask
    finally:
        for _ in processes:
            tasks.put(None)
        for process in processes:
            process.join()


def _work(steps: int, tasks: Any, answers: Any) -> None:
    """Train surrogates together, or a target alone, or search targets with Optuna, as its documents show it."""
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    target, surrogate = Tuned(WIDTH, 1, steps), Tuned(WIDTH, SCALE, steps)
    answers.put(None)
    while (task := tasks.get()) is not None:
        number, (what, given) = task
        made: Any = None
        if what == "surrogates":
            made = [held_out for _, held_out in trained(surrogate, given, together=FUSED)]
        elif what == "target":
            made = train_alone(target, given, given["seed"])
        else:
            _search(target, *given)
        answers.put((number, (made, time.time())))


def _search(target: Tuned, journal: str, trials: int, seed: int, pruner: str) -> None:
    study = optuna.load_study(
        storage=open_storage(journal),
        study_name=NAME,
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.MedianPruner() if pruner == "median" else optuna.pruners.NopPruner(),
    )
    counted = tuple(optuna.trial.TrialState[name] for name in ("COMPLETE", "PRUNED", "RUNNING"))
    study.optimize(
        partial(_objective, target, seed), callbacks=[optuna.study.MaxTrialsCallback(trials, states=counted)]
    )


def _objective(target: Tuned, seed: int, trial: optuna.Trial) -> float:
    def report(loss: float, step: int) -> None:
        trial.report(loss, step)
        if trial.should_prune():
            raise optuna.TrialPruned

    return train_alone(target, target.suggest(trial), seed + trial.number, report)
