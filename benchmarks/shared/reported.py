"""What a run's own report says of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.shared.paths import ROOT

MAIN = ("steps", "slowdown", "slowdown_ci95", "slowdown_pairs", "step_ms_alone", "alone_share")
SIDE = ("yield", "fill", "harvest", "waterfall")


def reported(run: Path) -> dict[str, Any]:
    """Of a run that has ended: `main`'s figures, the share of time that was `idle`, and those of the side task."""
    command = [sys.executable, "-m", "squeezer", "report", str(run), "--json"]
    report = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    return {
        "main": {key: report["main"][key] for key in MAIN},
        "idle": report["bubbles"]["ratio"],
        **{key: report["side"][key] for key in SIDE},
    }
