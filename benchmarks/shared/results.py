"""A benchmark's options, and the JSON that it writes.

The JSON holds `name`, `commit`, `machine`, `runs` (raw figures of every window and run) and `summary` (flat).
"""

import argparse
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.shared.paths import ROOT


def parse(name: str, about: str) -> argparse.Namespace:
    """Parse `--quick`, `--json FILE` and `--only SCENARIO`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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


def stopped_runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs in the JSON file that the same command has made before it was stopped; with `--only`, see `kept_runs`.

    They count if the commit, the machine and `--quick` are the same.
    """
    if options.only or not options.json or not options.json.exists():
        return kept_runs(options)
    held = json.loads(options.json.read_text(encoding="utf-8"))
    # FILE itself makes a difference from the commit, if it is tracked
    theirs, ours = (each.removesuffix("-dirty") for each in (held["commit"], commit()))
    is_same = (theirs, held["machine"], held["quick"]) == (ours, machine(), options.quick)
    return list(held["runs"]) if is_same else []


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


@cache
def _gpu() -> str | None:
    """The first device and its driver, as their tool names them. Asked once: it may hang where a device does."""
    with suppress(OSError, subprocess.SubprocessError):
        command = nvidia_smi("name,driver_version")
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return None


def nvidia_smi(fields: str, *options: str) -> list[str]:
    """The command by which NVIDIA's own tool says something of the first device that this process may use."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    return ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={first}", *options]


def commit() -> str:
    """The checked-out commit, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError):
        described = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return described.stdout.strip() or "unknown"
    return "unknown"


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
    replace_text(path, text + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole: where that fails, or is interrupted, what was there before stays.

    Raises:
        OSError: it cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def finish(name: str, options: argparse.Namespace, runs: Sequence[Any], summary: dict[str, Any]) -> None:
    """Print the summary, and write the JSON file if one was asked for."""
    print(json.dumps(summary, indent=2))
    if options.json:
        write(name, options, runs, summary)
