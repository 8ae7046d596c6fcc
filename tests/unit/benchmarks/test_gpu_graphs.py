"""The benchmark of CUDA graphs, on a machine without a GPU: there are no graphs, so both ways are one."""

import pytest
import torch

from benchmarks import gpu_graphs
from trials.side_task.devices import CpuSideDevice


def test_both_ways_train_the_same_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_graphs, "make_side_device", lambda kind, fraction: CpuSideDevice())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    run = gpu_graphs._measure("digits", trials=2, steps=3)
    assert run["same_bits"] and run["step_ms"] > 0 and run["step_ms_by_graph"] > 0 and run["graph_ms"] == 0
