"""Runs a ghost stage as main job beside a daemon, on one core; with windows, beside all that they need."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared.processes import environment, last_core, start
from benchmarks.windows.baselines import Baselines
from benchmarks.windows.figures import RankLog
from benchmarks.windows.modes import AWAKE, Windows
from benchmarks.windows.spinners import spinners
from squeezer.records.reader import load_run

WINDOWED_CONFIG = """
[squeeze]
preemptive = "stop"  # the windows decide (benchmarks/windows/daemon.py)
[side]
study = "{study}"
[run]
directory = "{run}"
keep_mb = 4096
calibrate_s = 0.0  # the baselines measure the dedicated rate
[guard]
enabled = false
"""
"""The configuration of every run in windows. It switches off whatever could end squeezing in mid-run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ghost:
    """A ghost stage as main job; `rows` is its micro-batch size, chosen so that a step takes well below a second."""

    stages: int
    stage: int
    micro_batches: int
    rows: int
    dualpipev: bool = False

    def arguments(self) -> list[str]:
        """Options for `benchmarks.ghost.job`."""
        shape = ["--stages", self.stages, "--stage", self.stage, "--micro-batches", self.micro_batches]
        words = [*shape, "--micro-batch-size", self.rows, *["--dualpipev"] * self.dualpipev]
        return [str(word) for word in words]


def write_config(text: str, run: Path, study: Path, **more: object) -> Path:
    """Write a configuration beside the run's directory, with both and `more` in it."""
    path = run.parent / "squeezer.toml"
    path.write_text(text.format(study=study, run=run, **more), encoding="utf-8")
    return path


def train(
    arguments: Sequence[str], config: Path, env: Mapping[str, str], daemon: Sequence[str] = ("squeezer",)
) -> None:
    """Run a ghost stage and its daemon to their ends.

    Args:
        arguments: of `benchmarks.ghost.job`.
        config: the daemon's.
        env: the environment of both.
        daemon: the module that is the daemon, and what its command line begins with.
    """
    core = last_core()
    with ExitStack() as ends:
        job = start([sys.executable, "-m", "benchmarks.ghost.job", *arguments, "--core", core], env, ends)
        command = [sys.executable, "-m", *daemon, "daemon", "--config", str(config), "--job-pid", str(job.pid)]
        squeezer = start(["taskset", "-c", core, *command], env, ends)
        if job.wait() != 0:
            raise RuntimeError(f"the ghost job ended with status {job.returncode}")
        squeezer.wait(120)


def train_in_windows(
    ghost: Ghost,
    windows: Windows,
    run: Path,
    pages: Path,
    *,
    study: Path,
    seconds: float,
    cycles: int,
    least_weight: Path | None = None,
) -> list[RankLog]:
    """Run a ghost stage in windows.

    Args:
        ghost: the stage.
        windows: of the run.
        run: the directory of its records, which does not exist yet.
        pages: that of its pages.
        study: what side task and baselines train.
        seconds: how long it takes at least.
        cycles: how many there are at least.
        least_weight: see `Baselines`.
    """
    env = {**environment(pages), **windows.environment()}
    config = write_config(WINDOWED_CONFIG, run, study)
    run.mkdir()
    with ExitStack() as ends:
        if AWAKE in windows.modes:
            ends.enter_context(spinners(pages, 1, windows))
        baselines = Baselines(
            pages=pages, ranks=1, windows=windows, env=env, study=study, logs=run, least_weight=least_weight
        )
        ends.callback(baselines.close)
        baselines.start()
        arguments = [*ghost.arguments(), "--seconds", str(seconds), "--least-cycles", str(cycles)]
        arguments += ["--wait-for-side", "--wait-for", *map(str, baselines.ready_files)]
        train(arguments, config, env, daemon=("benchmarks.windows.daemon", "squeezer"))
        return rank_logs(run, baselines)


def rank_logs(run: Path, baselines: Baselines) -> list[RankLog]:
    """The data of each rank, after the job."""
    rates = baselines.finish()
    return [
        RankLog(run=rank, baselines={name: baselines.steps(i, name) for name in baselines.names}, work_per_s=rates[i])
        for i, rank in enumerate(load_run(run))
    ]
