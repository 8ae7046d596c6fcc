"""Benchmarks as users start them, in their smallest part; what they measure: `tests/unit/benchmarks/`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.study import ARMS
from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COMMANDS = {
    "hooks_overhead": "ghost_4_1_4",
    "real_jobs": "denoise_cost",
    "ghost_twins": "denoise",
    "bubble_utilization": "long_arms",
    "shortest_bubble": "cooperative",
    "fusion": "mlp_32",
    "adapters": "peft_bert, shared",
    "compiled": "mlp_32 K=16",
    "study": None,
    "transfer": "end_to_end",
    "latency": None,
}
"""Benchmark -> the scenario that takes least."""


@pytest.mark.parametrize("name", COMMANDS)
def test_its_quick_run_writes_raw_runs_and_a_summary(name: str, tmp_path: Path) -> None:
    results, only = tmp_path / "results.json", COMMANDS[name]
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(results)]
    command += [] if only is None else ["--only", only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(results.read_text())
    assert written["name"] == name and written["quick"] and written["runs"] and written["summary"]
    assert only is None or {run["scenario"] for run in written["runs"]} == {only}
    assert name != "study" or {run["scenario"] for run in written["runs"]} == ARMS.keys()


def test_a_ghost_stage_prints_its_waits() -> None:
    command = [sys.executable, "-m", "benchmarks.ghost", "--steps", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "bubble ratio: " in done.stdout, done.stdout + done.stderr


def test_one_run_of_the_soak_is_fine(tmp_path: Path) -> None:
    results = tmp_path / "soak.jsonl"
    command = [sys.executable, "-m", "benchmarks.soak", "--run", "0", "--steps", "60", "--json", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(results.read_text().splitlines()) == 2
