"""The matrix of DeepSpeed's releases: how its table shows what is not equal, and how an error is found."""

import pytest

from tests.matrix import tables
from tests.matrix.cell import reason
from tests.matrix.modes import MODES


def cell(release: str, mode: str, result: str, why: str = "") -> dict[str, str]:
    return {"deepspeed": release, "mode": mode, "result": result, "reason": why}


def test_what_is_not_equal_stands_out_with_its_reason() -> None:
    cells = [
        cell("1.0", "fp32", "equal"),
        cell("2.0", "fp32", "differs", "side"),
        cell("1.0", "fp16", "n/a", "ValueError: no fp16"),
        cell("2.0", "fp16", "n/a", "ValueError: no fp16"),
    ]
    lines = tables.matrix_table({"cells": cells}).splitlines()
    assert lines[0].endswith("| 1.0 | 2.0 |")
    assert "| fp32 | equal | **differs** (1) |" in lines
    assert "| fp16 | n/a (2) | n/a (2) |" in lines
    assert "| bf16 | not run | not run |" in lines
    assert lines[-2:] == ["1. `side`", "2. `ValueError: no fp16`"]
    assert len(lines) == 2 + len(MODES) + 3


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("a\nValueError: first\nb\n[rank1]: torch.Oops.RuntimeError: last one\nc", "torch.Oops.RuntimeError: last one"),
        ("warning\nAssertionError\n", "AssertionError"),
        ("x\nkilled by somebody\n", "killed by somebody"),
    ],
)
def test_the_reason_is_the_last_error(output: str, found: str) -> None:
    assert reason(output) == found
