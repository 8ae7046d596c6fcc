"""What measures a GPU on a machine that has torch and little else: packages that are not there cannot be imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.slow_cases import others_slow

pytestmark = pytest.mark.integration

NOT_THERE = ("deepspeed", "zmq", "optuna", "pydantic", "numpy", "scipy", "psutil", "pynvml", "triton")

FINDS_LESS = """
import sys
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in NOT_THERE else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""
"""Of every Python that starts with it."""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which these packages are missing."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"NOT_THERE = {NOT_THERE}\n{FINDS_LESS}")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def run(bare: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], env=bare, capture_output=True, text=True, timeout=300)


def test_the_figures_that_decide_need_no_package_but_the_driver(bare: dict[str, str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    done = run(bare, "-c", "import squeezer.calibration.figures, squeezer.calibration.side_process")
    assert done.returncode == 0, done.stderr
    run(bare, "-m", "squeezer.calibration", str(rows), "--figures", "slices", "--quick")
    (row,) = [row for row in map(json.loads, rows.read_text().splitlines()) if row["figure"] == "slices"][:1]
    assert "error" not in row or row["error"].startswith("DriverError: no CUDA driver"), row


PARTS = [("words", True), ("context", True), ("ghost", False)]


@pytest.mark.parametrize(("part", "is_there"), others_slow(PARTS, [PARTS[0], PARTS[2]]))
def test_the_suite_measures_what_it_can_and_says_what_the_rest_lacks(
    part: str, is_there: bool, bare: dict[str, str], tmp_path: Path
) -> None:
    suite = "-m", "benchmarks.gpu_suite", "--device", "cpu", "--quick", "--json", str(tmp_path)
    run(bare, *suite, "--ways", "gate", "--receives", "waiting", "--only", part)
    written = json.loads((tmp_path / "gpu_suite.json").read_text())
    errors = {found["error"] for found in written["runs"] if "error" in found}
    assert errors == (set() if is_there else {"ModuleNotFoundError: not installed here: deepspeed, zmq"})
    assert written["runs"] and written["machine"]["torch"]
