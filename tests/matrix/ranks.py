"""Starts the ranks of a job as DeepSpeed's launcher does, without that: it takes longer to start than a cell trains."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch.rank import CONFIG, RUN
from squeezer.daemon.deepspeed_buffers import remove_buffers
from tests.support.jobs import Ended, environment, free_port
from tests.support.paths import ROOT
from tests.support.sandbox import wait_for

_PATIENCE_S = 900.0
_OTHERS_FOLLOW_S = 5.0
"""Ranks whose peer has failed would wait for it for half an hour."""

ALONE: tuple[str, ...] = ()
HOOKS = ("-m", "ds_hooks")
SIDE = (str(ROOT / "launch" / "rank.py"),)
"""What `ds_squeeze` has DeepSpeed's launcher start: it starts a daemon with a side task, and becomes the training."""


def train(way: Sequence[str], script: Sequence[str], ranks: int, folder: Path, pages: Path) -> Ended:
    """Run a job to its end.

    Args:
        way: one of the above.
        script: the training script and its arguments.
        ranks: how many.
        folder: an empty one, for `losses`, logs and the run's records; `squeezer.toml` lies beside it.
        pages: the private directory of pages and sockets, empty again at the end.
    """
    port = free_port()
    named = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    named |= {CONFIG: str(folder.parent / "squeezer.toml"), RUN: str(folder / "run")}
    processes = []
    for rank in range(ranks):
        own = {**environment(pages), **named, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"log{rank}").open("wb") as log:
            command = [sys.executable, *way, *script]
            processes.append(
                subprocess.Popen(command, env=own, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
    try:
        statuses = _await(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    # folders vanish while they are looked through, which `os.walk` ignores
    wait_for(lambda: not any(files or folders for _, folders, files in os.walk(pages)), "the daemons' end")
    remove_buffers(port)
    failed = [rank for rank, status in enumerate(statuses) if status not in (0, None)]
    order = [*failed, *(rank for rank in range(ranks) if rank not in failed)]
    output = "\n".join((folder / f"log{rank}").read_text(errors="replace") for rank in reversed(order))
    losses = folder / "losses"
    status = next((status for status in statuses if status), 0 if all(s == 0 for s in statuses) else 1)
    return Ended(status, output, losses.read_text().split() if losses.exists() else [])


def _await(processes: "Sequence[subprocess.Popen[bytes]]") -> list[int | None]:
    """The exit statuses; None: it still ran some seconds after another had failed, or for too long."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        statuses = [process.poll() for process in processes]
        if all(status is not None for status in statuses):
            break
        if any(status for status in statuses):
            deadline_s = min(deadline_s, time.monotonic() + _OTHERS_FOLLOW_S)
        time.sleep(0.1)
    return [process.poll() for process in processes]
