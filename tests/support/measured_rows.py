"""Rows of the figures that decide, as they were measured on one H200."""

import json
from typing import Any

from tests.support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "gpu"


def rows(name: str, *figures: str) -> list[dict[str, Any]]:
    """Those of a file; of these figures only, if some are named."""
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if not figures or row["figure"] in figures]


def with_mps() -> list[dict[str, Any]]:
    """Of processes that share the device by an MPS server."""
    return rows("calibration_mps") + rows("calibration_mps_first", "blocking")


def in_turns() -> list[dict[str, Any]]:
    """Of processes that take turns."""
    return rows("calibration_first") + rows("calibration", "words")


WITH_MPS, IN_TURNS = with_mps(), in_turns()
