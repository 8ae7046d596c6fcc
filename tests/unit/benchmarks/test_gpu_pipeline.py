"""The slowdowns of `benchmarks.gpu_pipeline`, from steps whose truth is known, and what a machine may lack."""

import importlib.util
import math
import os
import random
import shutil
from typing import Any

import pytest
import torch

from benchmarks.gpu_pipeline import ARMS, WASH_OUT_STEPS, WINDOWS, lacking, measure_devices, summary

COSTS = {"hooks": 0.001, "squeezed": 0.01, "naive": 0.9, "low_priority": 0.3}


def rows(rounds: int) -> list[list[Any]]:
    """Steps of 100 ms and of `COSTS`; the first ones of each block are far longer."""
    rng = random.Random(0)
    made = []
    for step in range(WINDOWS.first_step(0), WINDOWS.first_step(rounds)):
        at = WINDOWS.locate(step)
        log = next((cost for name, cost in COSTS.items() if ARMS[name] == at.mode), 0.0) + rng.gauss(0, 0.01)
        made.append([at.cycle, at.mode, at.at, 100 * math.exp(log) * (2 if at.at < WASH_OUT_STEPS else 1)])
    return made


def test_each_arm_is_compared_with_the_job_without_hooks_of_its_own_round() -> None:
    found = summary({"steps_ms": rows(60), "ungated_steps": {}, "side": None})
    for name, cost in COSTS.items():
        low, high = found[f"{name}_slowdown_ci95"]
        assert low < math.expm1(cost) < high and high - low < 0.02
        assert found[f"{name}_rounds"] == 60


def test_what_was_measured_before_an_end_still_counts() -> None:
    found = summary({"steps_ms": rows(3)[:-1], "ungated_steps": {}, "side": None})
    assert sorted(found[f"{name}_rounds"] for name in ARMS) in ([2, 2, 2, 2], [2, 3, 3, 3])
    assert summary({"steps_ms": [], "ungated_steps": {}, "side": None})["squeezed_rounds"] == 0


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("has_mps", [False, True])
@pytest.mark.parametrize("has_deepspeed", [False, True])
def test_all_that_is_missing_is_named(
    gpus: int, has_mps: bool, has_deepspeed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(shutil, "which", lambda name: name if has_mps else None)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" and not has_deepspeed else find(name)
    )
    lacks = "\n".join(lacking("cuda"))
    assert ("two GPUs" in lacks, "MPS" in lacks, "DeepSpeed" in lacks) == (gpus < 2, not has_mps, not has_deepspeed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is measured there")
def test_a_device_that_cannot_be_measured_ends_the_run_before_it_begins() -> None:
    with pytest.raises(RuntimeError, match="device 0 cannot be measured: no verdict is kept: NVML cannot say"):
        measure_devices({**os.environ, "CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}, 1)


@pytest.mark.parametrize("cores", [1, 2])
def test_a_dry_run_needs_two_cores_and_no_gpu(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert bool(lacking("cpu")) is (cores < 2)
