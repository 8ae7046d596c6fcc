"""Which parts of the GPU suite are measured, and for how long at most."""

import argparse
import os
from pathlib import Path

import pytest

from benchmarks.gpu.one_figure import FIGURES, PARTS, RECEIVES, WAYS, meters
from benchmarks.gpu.stage import ran_over_us
from benchmarks.gpu_suite import _promises, figures_of, limit_s
from tests.support.sandbox import wait_for

DECIDE = [name for name in FIGURES if name != "fusion"]


def asked(**named: object) -> argparse.Namespace:
    plain = {"only": None, "device": "cuda", "ways": WAYS, "receives": RECEIVES, "limit_s": None}
    return argparse.Namespace(**{**plain, **named})


def test_speeds_of_fused_training_are_measured_only_if_they_are_named() -> None:
    assert figures_of(asked()) == DECIDE
    assert figures_of(asked(only="fusion")) == ["fusion"]


def test_the_cheapest_and_most_decisive_come_first() -> None:
    assert DECIDE[0] == "words" and DECIDE.index("context_naive") < DECIDE.index("ghost_naive_waiting")


def test_a_part_has_the_figures_that_are_asked_for_and_can_be_measured_here() -> None:
    assert figures_of(asked(only="faults")) == ["sigstop", "sigkill"]
    assert figures_of(asked(only="ghost", ways=["gate"])) == ["ghost_gate_waiting", "ghost_gate_spinning"]
    assert figures_of(asked(only="ghost", ways=["gate", "trials"], receives=["waiting"], device="cpu")) == [
        "ghost_gate_waiting"
    ]


@pytest.mark.parametrize("figure", FIGURES)
def test_each_figure_has_a_limit(figure: str) -> None:
    assert 0 < limit_s(figure, asked()) < float("inf")
    assert limit_s(figure, asked(limit_s=7.0)) == 7


def test_all_figures_are_those_of_a_part() -> None:
    assert sum(len(figures) for figures in PARTS.values()) == len(FIGURES), "none has the name of another"


def test_a_row_that_cannot_be_judged_costs_no_other() -> None:
    empty = {"scenario": "context_changes", "alone_gaps_us": [], "beside_gaps_us": []}
    older = {"scenario": "ghost_gate_waiting", "slowdown": 0.0}
    found = [*_promises([empty, older, {"scenario": "sigkill", "goes_on": True}], timed=True)]
    assert [promise.holds for promise in found] == [False, False, True]
    assert "cannot be judged: ValueError" in found[0].measured and "cannot be judged: KeyError" in found[1].measured


def test_a_kernel_that_begins_in_a_bubble_and_runs_on_is_counted_with_its_time() -> None:
    compute = [(0, 10_000), (30_000, 40_000), (60_000, 70_000)]
    inside, over, outside, last = (12_000, 29_000), (25_000, 32_000), (35_000, 65_000), (75_000, 99_000)
    assert ran_over_us([inside, over, outside, last], compute) == [2.0]
    assert ran_over_us([(-5_000, 1_000)], compute) == [1.0]


def test_clocks_and_power_are_noted_where_the_device_has_a_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with meters(tmp_path / "none") as read:
        pass
    assert read() == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "2026/11/28, 1980, 350.1, 40 # $1"\nexec sleep 1000\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with meters(tmp_path / "some") as read:
        (line,) = wait_for(read, "a line")
    assert line.startswith("2026/11/28, 1980, 350.1, 40") and "power.draw" in line
