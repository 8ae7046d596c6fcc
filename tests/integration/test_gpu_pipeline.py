"""The measurement of a pipeline on two GPUs, on a machine without: a dry run on cores, and what it says is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_pipeline import ARMS, BLOCK_STEPS, NOTHING_MEASURED
from benchmarks.windows.modes import ALONE, COOPERATIVE, LOW_PRIORITY, NAIVE, UNHOOKED
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration

ROUNDS = 2


def pipeline(*options: str, path: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the command; `path`: a directory whose modules hide others."""
    paths = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "benchmarks.gpu_pipeline", *options]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="nothing is missing there")
def test_without_two_gpus_it_names_what_is_missing_and_ends_with_a_status_of_its_own(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = pipeline("--json", str(results))
    assert done.returncode == NOTHING_MEASURED
    assert "nothing was measured" in done.stderr and "two GPUs: PyTorch" in done.stderr
    assert not results.exists()


@pytest.mark.slow
def test_a_dry_run_on_cores_measures_each_arm_as_what_it_is(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = pipeline("--device", "cpu", "--quick", "--rounds", str(ROUNDS), "--json", str(results))
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(results.read_text())
    (run,) = written["runs"]
    for mode in (UNHOOKED, *ARMS.values()):
        places = {(round_, at) for round_, own, at, _ in run["steps_ms"] if own == mode}
        assert places == {(round_, at) for round_ in range(ROUNDS) for at in range(BLOCK_STEPS)}
    assert all(written["summary"][f"{name}_rounds"] == ROUNDS for name in ARMS)
    # of steps without hooks nobody hears; of others, but for the first after them, each rank reports each
    reported = run["reported_steps"]
    assert UNHOOKED not in reported
    assert all(reported[mode] >= ROUNDS * (BLOCK_STEPS - 1) for mode in (ALONE, COOPERATIVE, NAIVE, LOW_PRIORITY))
    assert min(run["ungated_steps"].values()) > 0 and run["side"]["fill"] > 0 and not run["side"]["not_started"]
