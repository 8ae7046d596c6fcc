"""Which parts of the GPU suite are measured, and for how long at most."""

import argparse

import pytest

from benchmarks.gpu.ghost_stream import RECEIVES, WAYS
from benchmarks.gpu.one_figure import FIGURES, PARTS
from benchmarks.gpu_suite import figures_of, limit_s

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
