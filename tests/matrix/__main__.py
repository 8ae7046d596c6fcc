"""Compares losses bit by bit in all ways of training on four releases of DeepSpeed: `make test-matrix`.

    python -m tests.matrix [--deepspeed RELEASE …] [--mode MODE …]

Each cell trains with DeepSpeed alone, with hooks, and with side tasks. What DeepSpeed alone cannot do here is n/a, and
said so. A run that was cut goes on where it was, on the same commit. Results go to `benchmarks/results/matrix.json`;
`python -m tests.support.document_tables` makes the table in `docs/matrix.md` of them. The exit status is 1 if a cell is
neither equal nor n/a.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.shared.results import commit, machine
from tests.matrix.cell import EQUAL, NOT_AVAILABLE
from tests.matrix.modes import MODES
from tests.support.paths import ROOT

OLDER = ("0.16.9", "0.17.6", "0.18.2")
"""Beside the release that is installed."""
RESULTS = ROOT / "benchmarks" / "results" / "matrix.json"
_ENVIRONMENTS = ROOT / ".venv" / "matrix"
_CELL_S = 1800


def main() -> int:
    """Fill the matrix, and write it after each cell."""
    newest = version("deepspeed")
    releases = (*OLDER, newest)
    options = _parse(releases)
    content = _begun(options.json)
    cells: list[dict[str, Any]] = content["cells"]
    for release, mode in product(options.deepspeed, options.mode):
        if any((cell["deepspeed"], cell["mode"]) == (release, mode) for cell in cells):
            continue
        cell = _run(Path(sys.executable) if release == newest else _environment(release), mode)
        assert cell["deepspeed"] == release, cell
        cells.append(cell)
        cells.sort(key=lambda cell: (releases.index(cell["deepspeed"]), list(MODES).index(cell["mode"])))
        loud = cell["result"] if cell["result"] == EQUAL else f"{cell['result'].upper()}: {cell['reason']}"
        print(f"DeepSpeed {release}, {MODES[mode].title}: {loud} ({cell['seconds']} s)", flush=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if all(cell["result"] in (EQUAL, NOT_AVAILABLE) for cell in cells) else 1


def _parse(releases: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--deepspeed", nargs="+", choices=releases, default=releases, help="default: all")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=tuple(MODES), help="default: all")
    parser.add_argument("--json", type=Path, default=RESULTS, help=f"default: {RESULTS.relative_to(ROOT)}")
    return parser.parse_args()


def _begun(path: Path) -> dict[str, Any]:
    """The results so far of this commit; that they themselves differ from it does not count."""
    content: dict[str, Any] = {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "machine": machine(), "cells": []}
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if earlier["commit"].removesuffix("-dirty") == content["commit"].removesuffix("-dirty"):
            return dict(earlier)
    return content


def _environment(release: str) -> Path:
    """The Python of an environment with this release, which finds all else in the main environment."""
    folder = _ENVIRONMENTS / release
    python = folder / "bin" / "python"
    installed = folder / ".installed"
    if not installed.exists():
        venv.create(folder, clear=True, with_pip=False)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "main.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-build-isolation"]
        command = [*pip, "--no-deps", "--ignore-installed", f"deepspeed=={release}"]
        subprocess.run(command, env={**os.environ, "DS_BUILD_OPS": "0"}, check=True)
        installed.touch()
    return python


def _run(python: Path, mode: str) -> dict[str, Any]:
    tools = [str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    named = {"PATH": os.pathsep.join(tools), "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    if python != Path(sys.executable):  # an operation is compiled for one release
        named["TORCH_EXTENSIONS_DIR"] = str(python.parents[1] / "torch_extensions")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cell.json"
        command = [str(python), "-m", "tests.matrix.cell", mode, str(file)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **named}, timeout=_CELL_S, check=True)
        cell: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return cell


if __name__ == "__main__":
    sys.exit(main())
