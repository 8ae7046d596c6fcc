"""The benchmark of CUDA graphs, on a machine without a GPU: there are no graphs, so both ways are one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_graphs
from tests.support.paths import ROOT
from trials.side_task.devices import CpuSideDevice


def test_both_ways_train_the_same_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_graphs, "make_side_device", lambda kind, fraction: CpuSideDevice())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    run = gpu_graphs._measure("digits", trials=2, steps=3)
    assert run["same_bits"] and run["step_ms"] > 0 and run["step_ms_by_graph"] > 0 and run["graph_ms"] == 0


HANGS = """
import ctypes, sys, time
from benchmarks import gpu_graphs

def measure(name, trials, steps):
    if name == "characters":
        ctypes.PyDLL(None).sleep(1000)
    return {"scenario": name, "ratio": 0.5, "graph_ms": 1.0, "same_bits": True}

gpu_graphs._measure, gpu_graphs.LIMIT_S = measure, 0.5
gpu_graphs.main()
"""


def test_a_study_that_hangs_in_the_driver_ends_and_the_one_before_it_is_on_disk(tmp_path: Path) -> None:
    file = tmp_path / "graphs.json"
    done = subprocess.run(
        [sys.executable, "-c", HANGS, "--json", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and "Timeout" in done.stderr, done.stderr
    assert [run["scenario"] for run in json.loads(file.read_text())["runs"]] == ["digits"]
