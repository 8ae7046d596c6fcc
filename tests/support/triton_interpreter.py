"""Triton for tests on the host: its interpreter, and its compiler for a GPU that is not there.

`make test` installs it apart from the environment, since PyTorch and its kin do more where they find it.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.paths import ROOT

_APART = Path(sys.prefix) / "triton"
_INTERPRETED = {"TRITON_INTERPRET": "1"}


def run_with_triton(unshown: str, *command: str, settings: Mapping[str, str] = _INTERPRETED) -> None:
    """Run ``python -m`` `command`, which must end well; by default with the interpreter.

    Args:
        unshown: what nothing shows where there is no Triton.
        command: a module and its arguments.
        settings: of the environment.
    """
    beside = [] if importlib.util.find_spec("triton") else [_APART]  # a GPU build of PyTorch has brought its own
    if not all(path.exists() for path in beside):
        pytest.skip(f"without Triton, which `make test` installs, {unshown} is NOT shown")
    paths = os.pathsep.join(map(str, [ROOT, *beside, *filter(None, [os.environ.get("PYTHONPATH")])]))
    environment = {**os.environ, "PYTHONPATH": paths, **settings}
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not done.returncode, f"{done.stdout[-8000:]}{done.stderr[-4000:]}"
