"""`squeezer doctor --measure`: measures a device that nobody else uses, says what that allows, and keeps it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from squeezer.calibration.limited import ENDS_WITHIN_S, FIGURE_LIMIT_S, ended_when_asked, run_limited
from squeezer.calibration.verdict import Verdict, check_quiet, judge
from squeezer.calibration.verdict_store import keep, state_file

FIGURES = ("slices", "opening", "arrival", "blocking", "words")
LIMIT_S = len(FIGURES) * (FIGURE_LIMIT_S + ENDS_WITHIN_S) + FIGURE_LIMIT_S
"""Each figure has a limit of its own, so this one strikes only if even that fails."""
PRIORITY = "CUDA_MPS_CLIENT_PRIORITY=1"
"""Of a side task, under MPS."""


class MeasureError(Exception):
    """The device could not be measured; the message gives the reason."""


def measure_rows(environment: Mapping[str, str] = os.environ) -> list[dict[str, Any]]:
    """Measure the first device that this environment shows, beside nobody else.

    Raises:
        MeasureError: it cannot be measured.
    """
    if environment.get("CUDA_LAUNCH_BLOCKING") == "1":
        raise MeasureError("CUDA_LAUNCH_BLOCKING is 1: a launch would wait for what is to be launched beside it")
    with tempfile.TemporaryDirectory(prefix="bsq-measure-") as folder:
        file = Path(folder) / "rows.jsonl"
        command = [sys.executable, "-m", "squeezer.calibration", str(file), "--figures", ",".join(FIGURES)]
        try:
            with ended_when_asked():
                run_limited([*command, "--side", PRIORITY], environment, LIMIT_S, grace_s=ENDS_WITHIN_S, quiet=True)
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
        except subprocess.TimeoutExpired:
            raise MeasureError(f"it took longer than {LIMIT_S:g} s") from None
        except ValueError:
            raise MeasureError(f"rows were cut off that were written to {folder}: is the disk full?") from None
    error = next((row["error"] for row in rows if "error" in row), None if rows else "nothing was measured")
    if error:
        raise MeasureError(str(error))
    return rows


def measure(*, mps: bool, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Measure, yield lines about the verdict, and keep it.

    Args:
        mps: whether this environment's processes share their devices by a server.
        environment: of the processes.

    Raises:
        MeasureError: it cannot be measured; nothing is kept.
    """
    rows = measure_rows(environment)
    device = next(row for row in rows if row["figure"] == "device")
    try:
        check_quiet(rows)
        verdict = judge(rows, mps=mps)
    except ValueError as error:
        raise MeasureError(str(error)) from None
    yield f"{device['name']}, {device['uuid']}, driver {device['driver']}, {'MPS' if mps else 'without MPS'}"
    yield from described(verdict)
    if not device["driver"]:
        raise MeasureError("the driver does not say its version, and a verdict holds for one version only")
    file = state_file(environment)
    try:
        keep(device["uuid"], device["driver"], verdict, mps=mps, file=file)
    except OSError as error:
        raise MeasureError(f"the verdict cannot be kept in {file}: {error.strerror}") from None
    yield f"kept in {file}"


def described(verdict: Verdict) -> Iterator[str]:
    """What a verdict says, a line for each figure and what it decides."""
    turns = f"processes take turns of {verdict.turn_ns / 1e6:.1f} ms" if verdict.turn_ns else "processes overlap"
    yield f"slices: {turns}"
    worth_ms = verdict.least_bubble_ns / 1e6
    yield (
        f"opening: {verdict.opening_ns / 1e3:.0f} µs to the side task's first kernel, at the 99th percentile; bubbles "
        f"shorter than {worth_ms:.2f} ms are not worth opening"
    )
    for how, states in verdict.late_us.items():
        late = ", ".join(f"{value:+.0f} µs ({_state(state)})" for state, value in states.items())
        yield f"arrival, a main job that waits by {how}: its next kernel starts {late}"
    yield f"blocking: the queue holds {_units(verdict.queue_depth)}: {verdict.queue_reason}"
    yield f"words: {verdict.words_ns / 1e3:.0f} µs of the device for each bubble, on top of each arrival"
    yield ("sound: " if verdict.sound else "observe only: ") + verdict.reason


def _units(depth: int) -> str:
    return "one unit, and none before its bubble has begun" if depth == 1 else f"{depth} units"


def _state(state: str) -> str:
    return "beside a busy side task" if state == "busy" else f"ended {state} µs before"
