"""Shared by all benchmarks: the command line, the machine's description, the JSON, and intervals of ratios.

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
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean, median, stdev, variance
from typing import Any

from ds_hooks.shared.page.file import DIRECTORY_VARIABLE
from squeezer.policy.paired import FAR, NEVER_FAR
from squeezer.reports.metrics import t_quantile_975

ROOT = Path(__file__).parents[1]
_DEVIATION_OF_MAD = 1.4826


def parse(name: str, about: str) -> argparse.Namespace:
    """Parse `--quick`, `--json FILE` and `--only SCENARIO`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    parser.add_argument("--quick", action="store_true", help="a rough answer in about three minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw runs and the summary there")
    parser.add_argument("--only", metavar="SCENARIO", help="measure this one, and keep the others that FILE holds")
    return parser.parse_args()


def kept_runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """With `--only`, the other scenarios' runs in the JSON file."""
    if not options.only or not options.json or not options.json.exists():
        return []
    runs: list[dict[str, Any]] = json.loads(options.json.read_text(encoding="utf-8"))["runs"]
    return [run for run in runs if run["scenario"] != options.only]


def machine() -> dict[str, Any]:
    """Describe the machine of the measurement."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "deepspeed": _version("deepspeed"),
        "gpu": _gpu(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu() -> str | None:
    """The first device and its driver, as its own tool names them."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return None


def commit() -> str:
    """The checked-out commit, with a mark if files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


def write(
    name: str, options: argparse.Namespace, runs: Sequence[Any], summary: dict[str, Any], path: Path | None = None
) -> None:
    """Write the JSON file (by default the one that was asked for), each row of numbers on one line."""
    path = path or options.json
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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def finish(name: str, options: argparse.Namespace, runs: Sequence[Any], summary: dict[str, Any]) -> None:
    """Print the summary, and write the JSON file if one was asked for."""
    print(json.dumps(summary, indent=2))
    if options.json:
        write(name, options, runs, summary)


def winsorized(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Logarithms of step times, in which those far from the median of their group count as less far.

    What is far is judged by the deviations in all groups, and by the constants of a report's estimator.
    """
    levels = [median(group) for group in groups]
    away = [abs(log - level) for group, level in zip(groups, levels, strict=True) for log in group]
    far = max(NEVER_FAR, FAR * _DEVIATION_OF_MAD * median(away))
    return [
        [min(max(log, level - far), level + far) for log in group] for group, level in zip(groups, levels, strict=True)
    ]


Pairs = Sequence[tuple[float, float]]


def ratio_with_ci95(pairs: Pairs) -> tuple[float, list[float]]:
    """(mean of a ÷ b, less 1, and its 95% t-interval) over independent pairs, by their log ratios.

    The interval of a single pair is not a number.
    """
    ratios = [math.log(a / b) for a, b in pairs]
    middle = fmean(ratios)
    if len(ratios) == 1:
        return math.expm1(middle), [math.nan, math.nan]
    half = t_quantile_975(len(ratios) - 1) * math.sqrt(variance(ratios) / len(ratios))
    return math.expm1(middle), [math.expm1(middle - half), math.expm1(middle + half)]


def mean_and_ci95(values: Sequence[float]) -> tuple[float, list[float] | None]:
    """The mean and its 95% interval; None for a single value."""
    mean = fmean(values)
    if len(values) < 2:
        return mean, None
    half = t_quantile_975(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean, [mean - half, mean + half]


@contextmanager
def run_directories() -> Iterator[tuple[Path, Path]]:
    """Make (a directory for results, a private one for pages and sockets), and remove both in the end."""
    with tempfile.TemporaryDirectory(prefix="bsq-", dir="/tmp") as base:
        run, pages = Path(base) / "run", Path(base) / "pages"
        pages.mkdir(mode=0o700)
        yield run, pages


def environment(pages: Path) -> dict[str, str]:
    """The environment of a measured job's processes: one thread each, on the CPU, our packages on the path."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    named = {"DS_ACCELERATOR": "cpu", DIRECTORY_VARIABLE: str(pages), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return {**os.environ, **named}
