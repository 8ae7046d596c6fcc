"""Lets the trials wait for another worker that a run's side tasks have left."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_hooks.shared.study_queue import Submissions
from squeezer.config import Config
from squeezer.daemon.side_processes.environment import side_environment
from squeezer.daemon.side_processes.spawner import releasing_command, worker_name

RELEASES_WITHIN_S = 60.0
"""For all studies together. Some worker may hold a storage's lock for ever, as one that somebody has stopped."""


def release_trials(run: Path, config: Config) -> None:
    """Release what is left of all studies that this run's side tasks may have trained, by daemons that were killed.

    `STORAGE_VARIABLE` in the environment names the storage.

    Args:
        run: the run's directory.
        config: the run's configuration.

    Raises:
        RuntimeError: a storage could not be written, or not soon enough for a job that has ended.
    """
    ours, names = worker_name(run), []
    if config.side is not None and config.side.queue is None:
        names = [config.side.study_name]
    elif config.side is not None and config.side.queue is not None:
        submissions = Submissions(config.side.queue)
        all_used = ((each.name, submissions.used(each)) for each in submissions.submissions())
        names = [name for name, used in all_used if any(worker.startswith(ours) for worker in used)]
    environment, end_s = side_environment(os.environ), time.monotonic() + RELEASES_WITHIN_S
    commands = {name: releasing_command(name, config.studies(run), ours) for name in names}
    failed = [name for name, each in commands.items() if not _succeeds(each, environment, end_s)]
    if failed:
        raise RuntimeError(f"trials of {', '.join(failed)} wait until their workers' leases end")


def _succeeds(command: Sequence[str], environment: Mapping[str, str], end_s: float) -> bool:
    """Whether `command` ends with status 0 in time; else it is killed."""
    try:
        left_s = max(0.0, end_s - time.monotonic())
        return subprocess.run(command, env=environment, check=False, timeout=left_s).returncode == 0
    except subprocess.TimeoutExpired:
        return False
