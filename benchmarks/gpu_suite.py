"""Checks on a GPU everything that squeezing relies on, in a few minutes and without a package registry.

It prints a table of promises and whether each holds. `--device cpu` runs it on the fake driver, which shows that the
suite works and nothing about a device.

    words     do words of a shared page pass between two processes on one device, and how fast
    context   what a second process costs the main job: idle, waiting at the gate, computing, or coming and going
    ghost     a ghost stage alone, and beside a side task: naive, behind the host's gate, behind the device's
    memory    how much of the device a context takes, and whether an allocator's cap holds
    faults    SIGSTOP with a deep queue; SIGKILL while a stream waits at the gate
    fusion    ResNet-18 of an eighth of its width, fused, against one of full width: only if it is named

Each part has one figure or several. A figure has a process and a limit of its own; it is on disk before the next one
begins.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gpu.device_kernels import FakeKernels
from benchmarks.gpu.one_figure import NEED_A_GPU, PARTS, RECEIVES, ROW, WAYS, ghost_figure
from benchmarks.gpu.parts import mps_server, no_mps_server
from benchmarks.shared.results import machine, write
from squeezer.calibration.limited import ended_when_asked, run_limited
from squeezer.calibration.mps_server import NoServerError

NAME = "gpu_suite"
ONE_FIGURE = "benchmarks.gpu.one_figure"
LIMIT_S, TRIALS_LIMIT_S, FUSION_LIMIT_S = 90.0, 150.0, 600.0
"""Of a figure; of those that build real trials, which may compile kernels; of fusion."""
NO_ERROR, NONE, YES = "no error", "0", "True"
TIMELESS = frozenset({NO_ERROR, NONE, YES})
"""The wanted value of promises without a time."""


class Promise(NamedTuple):
    """One line of the table."""

    what: str
    measured: str
    wanted: str
    holds: bool | None


def main() -> int:
    """Measure, print the table, write. Returns 1 if a promise is broken."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{NAME}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the fake driver")
    parser.add_argument("--quick", action="store_true", help="few windows")
    parser.add_argument("--json", type=Path, metavar="DIR", help="write DIR/gpu_suite.json")
    parser.add_argument(
        "--mps", action="store_true", help="with an MPS server of our own, else with none; writes gpu_suite_mps.json"
    )
    parser.add_argument("--only", metavar="PART", choices=PARTS, help="this part alone; what DIR has of others is kept")
    parser.add_argument("--resume", action="store_true", help="only what DIR lacks, or has no figure for but a reason")
    parser.add_argument(
        "--limit-s", type=float, metavar="S", help=f"of each figure; {LIMIT_S:g} where it needs no more"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="the side tasks of the part ghost")
    parser.add_argument("--receives", nargs="+", choices=RECEIVES, default=RECEIVES, help="and its receives")
    parser.add_argument("--windows", type=int, metavar="N", help="and its pairs of windows")
    options = parser.parse_args()
    machine()  # asks the device's own tool while the device is sound
    figures, runs = figures_of(options), _kept(options)
    if options.resume:
        figures = [name for name in figures if all(run["scenario"] != name or "error" in run for run in runs)]
    runs = [run for run in runs if run["scenario"] not in figures]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bsq-", dir="/dev/shm")))
        try:
            stack.enter_context(mps_server(folder) if options.mps else no_mps_server())
        except NoServerError as error:
            sys.exit(f"nothing was measured: {error}")
        for name in figures:
            print(f"{name} …", file=sys.stderr, flush=True)
            runs.append({"scenario": name, **_measure(name, options, folder / name)})
            if "error" in runs[-1]:
                print(f"{name}: {runs[-1]['error']}", file=sys.stderr)
            _write(options, runs)  # at once: what is measured must not be lost
    promises = list(_promises(runs, timed=options.device == "cuda"))
    _print_table(_device(runs), promises)
    return int(any(promise.holds is False for promise in promises))


def figures_of(options: argparse.Namespace) -> list[str]:
    """The figures to measure: of the part that is named, or all that decide whether a device can be squeezed."""
    parts = [name for name in PARTS if name != "fusion"] if options.only is None else [options.only]
    left_out = {name for name in PARTS["ghost"]} - {
        ghost_figure(way, receive) for way in options.ways for receive in options.receives
    }
    if options.device == "cpu":
        left_out |= NEED_A_GPU
    return [name for part in parts for name in PARTS[part] if name not in left_out]


def limit_s(figure: str, options: argparse.Namespace) -> float:
    """How long a figure may take."""
    if options.limit_s is not None:
        return float(options.limit_s)
    if figure == "fusion":
        return FUSION_LIMIT_S
    return TRIALS_LIMIT_S if figure.startswith("ghost_trials") else LIMIT_S


def _measure(figure: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What came of it: in a process of its own, so that one that hangs ends alone, and its context with it."""
    folder.mkdir()
    command = [sys.executable, "-m", ONE_FIGURE, figure, "--device", options.device, "--folder", str(folder)]
    command += ["--quick"] * options.quick + (["--windows", str(options.windows)] if options.windows else [])
    most_s = limit_s(figure, options)
    try:
        said = f"its process ended with status {run_limited(command, os.environ, most_s)}"
    except subprocess.TimeoutExpired:
        said = f"not done within {most_s:g} s"
    row: dict[str, Any] = {"error": said}
    if (folder / ROW).exists():
        row = json.loads((folder / ROW).read_text(encoding="utf-8"))
    return row


def _file(options: argparse.Namespace) -> Path:
    folder: Path = options.json
    return folder / f"{NAME}{'_mps' if options.mps else ''}.json"


def _kept(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What the file has, where this run does not measure everything. All of a file is measured in one way."""
    if not options.json or not (options.only or options.resume) or not _file(options).exists():
        return []
    try:
        content = json.loads(_file(options).read_bytes())
        runs = [dict(run, scenario=str(run["scenario"])) for run in content["runs"]]
        then = {"quick": content["quick"], **content["machine"]}
    except (LookupError, TypeError, ValueError) as error:
        sys.exit(f"{_file(options)} is no file of this suite, so nothing is added to it: {error}")
    now = {"quick": options.quick, **machine()}
    others = [f"{name} {then.get(name)}, now {value}" for name, value in now.items() if then.get(name) != value]
    if any((run["device"] == FakeKernels.name) is not (options.device == "cpu") for run in runs if "device" in run):
        others.append(f"device {_device(runs)}, now {options.device}")
    if others:
        sys.exit(f"{_file(options)} was measured otherwise ({'; '.join(others)}); name another directory by --json")
    return runs


def _write(options: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    if options.json:
        promises = [promise._asdict() for promise in _promises(runs, timed=options.device == "cuda")]
        write(NAME, options, runs, {"device": _device(runs), "promises": promises}, _file(options))


def _device(runs: Iterable[dict[str, Any]]) -> str:
    return ", ".join(sorted({run["device"] for run in runs if "device" in run})) or "no device"


def _promises(runs: list[dict[str, Any]], *, timed: bool) -> Iterator[Promise]:
    """The promises, from the runs. On the fake driver times mean nothing, so only promises without one can hold."""
    for promise in _all_promises(runs):
        yield promise if timed or promise.wanted in TIMELESS else promise._replace(wanted="", holds=None)


def _ghost_promises(run: dict[str, Any]) -> Iterator[Promise]:
    scenario = run["scenario"]
    ours = scenario.startswith("ghost_gate")
    yield _slowdown(f"{scenario}: slowdown", run, 0.01 if ours or scenario.startswith("ghost_trials") else None)
    yield Promise(f"{scenario}: fill", f"{100 * run['fill']:.0f}%", "", None)
    if scenario.startswith("ghost_trials"):
        return  # its kernels write no stamps
    harvest = f"{100 * run['harvest']:.0f}%"
    yield Promise(f"{scenario}: harvest", harvest, "≥ 60%" if ours else "", run["harvest"] >= 0.6 if ours else None)
    outside = f"{run['outside']} of {run['kernels']}"
    yield Promise(
        f"{scenario}: kernels that start outside a bubble",
        outside,
        "0" if ours else "",
        run["outside"] == 0 if ours else None,
    )
    over_us = run.get("over_us", [])  # older files have none
    most_us = f", up to {max(over_us):.0f} µs" if over_us else ""
    yield Promise(f"{scenario}: kernels that run on after a bubble", f"{len(over_us)}{most_us}", "", None)
    if ours:
        yield _at_most(f"{scenario}: bubble start to first kernel, p50", run["resume_us"], 50, "µs")


def _context_promises(run: dict[str, Any]) -> Iterator[Promise]:
    way = run["scenario"].removeprefix("context_")
    if way != "changes":
        yield _slowdown(f"second process {way}: slowdown", run, 0.01 if way != "naive" else None)
        return
    for when, what in (("alone", "alone"), ("beside", "while a context comes and goes")):
        yield Promise(f"longest gap between kernels, {what}", f"{max(run[f'{when}_gaps_us']):.0f} µs", "", None)


def _all_promises(runs: Iterable[dict[str, Any]]) -> Iterator[Promise]:
    for run in runs:
        try:
            yield from list(_promises_of(run))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # an older version's, or without values
            text = f"cannot be judged: {type(error).__name__}: {error}"
            yield Promise(run["scenario"], text, NO_ERROR, False)


def _promises_of(run: dict[str, Any]) -> Iterator[Promise]:
    scenario = run["scenario"]
    if "error" in run:
        yield Promise(scenario, run["error"], NO_ERROR, False)
    elif scenario == "words":
        yield _at_most("a word, device to device of another process, p50", run["across_us"], 50, "µs")
        yield Promise("a word, device to host, p50", f"{median(run['to_host_us']):.1f} µs", "", None)
        yield Promise("a word, host to device and back, p50", f"{median(run['round_trip_us']):.1f} µs", "", None)
    elif scenario.startswith("context_"):
        yield from _context_promises(run)
    elif scenario.startswith("ghost_"):
        yield from _ghost_promises(run)
    elif scenario == "sigstop":
        yield Promise(
            "kernels that end while their process is stopped, of a deep queue",
            f"{run['after']} of {run['queued']}",
            "",
            None,
        )
    elif scenario == "sigkill":
        yield Promise("the device continues after SIGKILL at the gate", str(run["goes_on"]), YES, run["goes_on"])
    elif scenario == "fusion":
        best = max(run["by_k"], key=lambda point: float(point["over_full_width"]))
        speedup = best["over_full_width"]
        what = f"ResNet-18 of width ÷8, {best['k']} fused, against one of full width"
        yield Promise(what, f"{speedup:.1f}x", "≥ 16.6x", speedup >= 16.6)
    elif scenario == "memory":
        yield Promise("a context takes", f"{run['context_mib']:.0f} MiB", "", None)
        held = f"{100 * run['held']:.1f}%"
        yield Promise("an allocator's cap holds", held, f"≤ {100 * run['cap']:g}%", run["held"] <= run["cap"])


def _at_most(what: str, values: list[float], most: float, unit: str) -> Promise:
    if not values:
        return Promise(what, "nothing was measured", f"≤ {most} {unit}", False)
    return Promise(what, f"{median(values):.1f} {unit}", f"≤ {most} {unit}", median(values) <= most)


def _slowdown(what: str, run: dict[str, Any], most: float | None) -> Promise:
    low, high = run["slowdown_ci95"]
    # too noisy where the interval lies on both sides
    holds = None if most is None or low <= most < high else high <= most
    measured = f"{100 * run['slowdown']:+.2f}% [{100 * low:+.2f}, {100 * high:+.2f}]"
    return Promise(what, measured, "" if most is None else f"≤ {100 * most:g}%", holds)


def _print_table(device: str, promises: list[Promise]) -> None:
    width = max((len(promise.what) for promise in promises), default=0)
    print(f"{device}\n")
    for what, measured, wanted, holds in promises:
        verdict = {True: "holds", False: "BROKEN", None: ""}[holds]
        print(f"{what:<{width}}  {measured:<28}{wanted:<10}{verdict}")


if __name__ == "__main__":
    with ended_when_asked():
        sys.exit(main())
