"""Checks on a GPU everything that squeezing relies on, in a few minutes and without a package registry.

It prints a table of promises and whether each holds. `--device cpu` runs it on the fake driver, which shows that the
suite works and nothing about a device.

    words     do words of a shared page pass between two processes on one device, and how fast
    context   what a second process costs the main job: idle, waiting at the gate, or computing
    ghost     a ghost stage alone, and beside a side task: naive, behind the host's gate, behind the device's
    memory    how much of the device a context takes, and whether an allocator's cap holds
    faults    SIGSTOP with a deep queue; SIGKILL while a stream waits at the gate
    fusion    ResNet-18 of an eighth of its width, fused, against one of full width: only if it is named
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gpu.ghost_stream import RECEIVES, WAYS
from benchmarks.gpu.parts import Bench, context_costs, faults, memory, mps_server, words_between_processes
from benchmarks.shared.results import write

NAME = "gpu_suite"
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
    parser.add_argument("--mps", action="store_true", help="with an MPS server of our own; writes gpu_suite_mps.json")
    parser.add_argument("--only", metavar="PART", choices=PARTS, help="this part alone")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="the side tasks of the part ghost")
    parser.add_argument("--receives", nargs="+", choices=RECEIVES, default=RECEIVES, help="and its receives")
    parser.add_argument("--windows", type=int, metavar="N", help="and its pairs of windows")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bsq-", dir="/dev/shm"))
        if options.mps:
            stack.enter_context(mps_server(Path(folder)))
        bench = Bench.open(options.device, Path(folder), quick=options.quick)
        for name in parts_of(options.only):
            print(f"{name} …", file=sys.stderr, flush=True)
            try:
                for run in PARTS[name](bench, options):
                    runs.append(run)
                    _write(options, bench, runs)  # at once: what is measured must not be lost
            except Exception as error:  # the other parts still count
                runs.append({"scenario": name, "error": f"{type(error).__name__}: {error}"})
                _write(options, bench, runs)
                print(f"{name}: {runs[-1]['error']}", file=sys.stderr)
        bench.close()
        _print_table(bench.kernels.name, list(_promises(runs, timed=options.device == "cuda")))
    return int(any(promise.holds is False for promise in _promises(runs, timed=options.device == "cuda")))


def _write(options: argparse.Namespace, bench: Bench, runs: list[dict[str, Any]]) -> None:
    if options.json:
        promises = [promise._asdict() for promise in _promises(runs, timed=options.device == "cuda")]
        summary = {"device": bench.kernels.name, "promises": promises}
        write(NAME, options, runs, summary, options.json / f"{NAME}{'_mps' if options.mps else ''}.json")


def _ghost(bench: Bench, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    from benchmarks.gpu.stage import ghost_stage  # needs pyzmq, which the parts before it do without

    return ghost_stage(bench, options.ways, options.receives, options.windows)


def _fusion(bench: Bench, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    from benchmarks.gpu.fusion import fusion  # needs torch and Optuna

    return fusion(bench)


Part = Callable[[Bench, argparse.Namespace], Iterable[dict[str, Any]]]
PARTS: dict[str, Part] = {
    "words": lambda bench, options: words_between_processes(bench),
    "context": lambda bench, options: context_costs(bench),
    "ghost": _ghost,
    "memory": lambda bench, options: memory(bench),
    "faults": lambda bench, options: faults(bench),
    "fusion": _fusion,
}


def parts_of(only: str | None) -> list[str]:
    """The parts to measure: the one that is named, or all whose figures decide whether a device can be squeezed."""
    return [name for name in PARTS if name != "fusion"] if only is None else [only]


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
    if ours:
        yield _at_most(f"{scenario}: bubble start to first kernel, p50", run["resume_us"], 50, "µs")


def _all_promises(runs: list[dict[str, Any]]) -> Iterator[Promise]:
    for run in runs:
        scenario = run["scenario"]
        if "error" in run:
            yield Promise(scenario, run["error"], NO_ERROR, False)
        elif scenario == "words":
            yield _at_most("a word, device to device of another process, p50", run["across_us"], 50, "µs")
            yield Promise("a word, device to host, p50", f"{median(run['to_host_us']):.1f} µs", "", None)
            yield Promise("a word, host to device and back, p50", f"{median(run['round_trip_us']):.1f} µs", "", None)
        elif scenario.startswith("context_"):
            wanted = 0.01 if scenario != "context_naive" else None
            yield _slowdown(f"second process {scenario.removeprefix('context_')}: slowdown", run, wanted)
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
    sys.exit(main())
