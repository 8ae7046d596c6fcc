"""One cell of the matrix: a way of training on the release of DeepSpeed that this Python imports.

python -m tests.matrix.cell MODE FILE       # writes its result, as JSON
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from squeezer.records.layout import units_path
from tests.matrix import ranks
from tests.matrix.modes import MODES, Mode
from tests.support.jobs import Ended, short_directory
from tests.support.paths import ROOT

SCRIPT = str(ROOT / "tests" / "matrix" / "train.py")
CONFIG = f"""
[squeeze]
alone_share = 0.0
min_bubble_ms = 0.1
[guard]
enabled = false
[side]
study = "{ROOT}/examples/digits.py"
[run]
directory = "run"
calibrate_s = 0.0
"""
_ERROR = re.compile(r"^(?:\[rank\d\]:? ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)
_LONGEST_REASON = 200
_TAIL = 4000

EQUAL, NOT_AVAILABLE, DIFFERS, FAILED = "equal", "n/a", "differs", "failed"


def judge(name: str, folder: Path) -> dict[str, Any]:
    """Train in the way `name` alone, with hooks, and with side tasks; returns the result."""
    mode = MODES[name]
    began_s = time.monotonic()
    result = _compare(name, mode, folder)
    return {**result, "mode": name, "deepspeed": _release(), "seconds": round(time.monotonic() - began_s)}


def reason(output: str) -> str:
    """Why a job failed: the last error that it printed."""
    found = _ERROR.findall(output)
    return (found[-1] if found else output.strip().rpartition("\n")[2])[:_LONGEST_REASON]


def _compare(name: str, mode: Mode, folder: Path) -> dict[str, Any]:
    (folder / "squeezer.toml").write_text(CONFIG)

    def train(way: str, started: Sequence[str], *options: str) -> Ended:
        own = folder / way
        own.mkdir()
        script = [SCRIPT, "--mode", name, "--losses", str(own / "losses"), *options]
        with short_directory() as pages:
            return ranks.train(started, script, mode.ranks, own, pages)

    alone = train("alone", ranks.ALONE)
    if alone.status:
        return {"result": NOT_AVAILABLE, "reason": reason(alone.output)}
    for way, ended in (("hooks", train("hooks", ranks.HOOKS)), ("side", train("side", ranks.SIDE, "--patient"))):
        if ended.status:
            return {"result": FAILED, "reason": f"{way}: {reason(ended.output)}", "output": ended.output[-_TAIL:]}
        if ended.losses != alone.losses:
            if train("again", ranks.ALONE).losses != alone.losses:
                return {"result": NOT_AVAILABLE, "reason": "two runs of DeepSpeed alone differ"}
            return {"result": DIFFERS, "reason": way, "losses": [alone.losses, ended.losses]}
        if "switched off" in ended.output:
            why = f"{way}: the hooks switched themselves off"
            return {"result": FAILED, "reason": why, "output": ended.output[-_TAIL:]}
    units = [units_path(folder / "side" / "run", rank) for rank in range(mode.ranks)]
    squeezed = sum(path.exists() and path.stat().st_size > 0 for path in units)
    if squeezed < mode.ranks:
        return {"result": FAILED, "reason": f"side tasks ran on {squeezed} of {mode.ranks} ranks"}
    return {"result": EQUAL, "losses_compared": len(alone.losses), "squeezed_ranks": squeezed}


def _release() -> str:
    import deepspeed

    return str(deepspeed.__version__)


def main() -> int:
    """Write the result."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix.cell")
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bsq-", dir="/tmp") as folder:
        result = judge(options.mode, Path(folder))
    options.file.write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
