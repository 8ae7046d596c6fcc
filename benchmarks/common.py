"""What every benchmark shares: its command line, the machine's description, and its JSON.

The JSON holds `name`, `commit`, `machine`, `runs` (raw figures of every window and run) and `summary` (flat).
"""

import argparse
import json
import math
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from ds_hooks.shared.page_file import DIRECTORY_VARIABLE
from squeezer.reports.metrics import t_quantile_975

ROOT = Path(__file__).parents[1]
MINIMUM_VARIANCE = 1e-30
"""Of log ratios; far below what any clock resolves."""


def parse(name: str, about: str) -> argparse.Namespace:
    """`--quick`, `--json FILE` and `--only SCENARIO`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    parser.add_argument("--quick", action="store_true", help="a rough answer in about three minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw runs and the summary there")
    parser.add_argument("--only", metavar="SCENARIO", help="measure this one, and keep the others that FILE holds")
    return parser.parse_args()


def kept_runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """With `--only`, the runs of the other scenarios that the JSON file holds already."""
    if not options.only or not options.json or not options.json.exists():
        return []
    runs: list[dict[str, Any]] = json.loads(options.json.read_text(encoding="utf-8"))["runs"]
    return [run for run in runs if run["scenario"] != options.only]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import deepspeed
    import torch

    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def commit() -> str:
    """The commit that is checked out, marked if files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


def write(name: str, options: argparse.Namespace, runs: Sequence[Any], summary: dict[str, Any]) -> None:
    """Write the JSON that was asked for; rows of numbers stand in one line each."""
    content = {
        "name": name,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "quick": options.quick,
        "machine": machine(),
        "runs": runs,
        "summary": summary,
    }
    text = json.dumps(content, indent=1)
    text = re.sub(r"\[[-+.\de,\s]+\]", lambda numbers: " ".join(numbers[0].split()), text)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(text + "\n", encoding="utf-8")


def finish(name: str, options: argparse.Namespace, runs: Sequence[Any], summary: dict[str, Any]) -> None:
    """Print the summary; write the JSON if asked."""
    print(json.dumps(summary, indent=2))
    if options.json:
        write(name, options, runs, summary)


Pairs = Sequence[tuple[float, float]]


def ratio_with_ci95(pairs: Pairs) -> tuple[float, list[float]]:
    """(mean of a ÷ b, less 1, and its 95% t-interval) over independent pairs, by their log ratios."""
    return pooled_ratio_with_ci95([pairs])


def pooled_ratio_with_ci95(scenarios: Sequence[Pairs]) -> tuple[float, list[float]]:
    """The same over several scenarios, each weighted by its precision (the inverse of its mean's variance).

    One scenario with ten times the noise of another says a hundred times less about what both have in common. A
    scenario with fewer than two pairs has no known precision, and is left out where another has.
    """
    logs = [[math.log(a / b) for a, b in pairs] for pairs in scenarios]
    known = [scenario for scenario in logs if len(scenario) > 1]
    if not known:
        middle = fmean(logs[0])
        return math.expm1(middle), [math.nan, math.nan]
    precisions = [len(scenario) / max(variance(scenario), MINIMUM_VARIANCE) for scenario in known]
    shares = [precision / sum(precisions) for precision in precisions]
    degrees = [len(scenario) - 1 for scenario in known]
    middle = fmean((fmean(scenario) for scenario in known), weights=shares)
    # the precisions are estimates too: Meier 1953, Biometrics 9, 59-73; degrees of freedom as Satterthwaite's
    widened = 1 + 4 * sum(share * (1 - share) / n for share, n in zip(shares, degrees, strict=True))
    effective = 1 / sum(share**2 / n for share, n in zip(shares, degrees, strict=True))
    half = t_quantile_975(max(1, int(effective))) * math.sqrt(widened / sum(precisions))
    return math.expm1(middle), [math.expm1(middle - half), math.expm1(middle + half)]


@contextmanager
def places() -> Iterator[tuple[Path, Path]]:
    """(a directory for results, a private one for pages and sockets); both are removed."""
    with tempfile.TemporaryDirectory(prefix="bsq-", dir="/tmp") as base:
        run, pages = Path(base) / "run", Path(base) / "pages"
        pages.mkdir(mode=0o700)
        yield run, pages


def environment(pages: Path) -> dict[str, str]:
    """The environment of every process of a measured job: one thread, on the CPU, our packages found."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    named = {"DS_ACCELERATOR": "cpu", DIRECTORY_VARIABLE: str(pages), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return {**os.environ, **named}
