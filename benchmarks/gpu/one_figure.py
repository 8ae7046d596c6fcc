"""One figure of `gpu_suite`, in a process of its own: a device that hangs, or a context that is lost, costs no other.

`python -m benchmarks.gpu.one_figure FIGURE --device KIND --folder FOLDER` writes what it has measured, or the reason
why not, to FOLDER/row.json.
"""

import argparse
import importlib.util
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Bench, context_changes, context_cost, memory, sigkill, sigstop, words_between_processes
from benchmarks.shared.results import nvidia_smi, replace_text
from squeezer.calibration.limited import ended_when_asked

Row = dict[str, Any]
Measure = Callable[[Bench, int | None], Row]
"""Takes the pairs of windows, too; None: as many as usual."""
WAYS = ("naive", "host", "gate", "trials")
"""Of a side task beside the ghost stage."""
RECEIVES = ("waiting", "spinning")
"""Of that stage."""


def _ghost(way: str, receive: str, bench: Bench, windows: int | None) -> Row:
    _check_installed("deepspeed", "zmq", *(["optuna"] if way == "trials" else []))
    from benchmarks.gpu.stage import ghost_stage

    return ghost_stage(bench, way, receive, windows)


def _memory(bench: Bench, windows: int | None) -> Row:
    _check_installed("torch")
    return memory(bench)


def _fusion(bench: Bench, windows: int | None) -> Row:
    _check_installed("torch", "optuna")
    from benchmarks.gpu.fusion import fusion

    return fusion(bench)


def _check_installed(*modules: str) -> None:
    """Name all that a figure lacks, where those before it do without.

    Raises:
        ModuleNotFoundError: one is missing.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"not installed here: {', '.join(missing)}")


def ghost_figure(way: str, receive: str) -> str:
    """The figure of a ghost stage beside such a side task."""
    return f"ghost_{way}_{receive}"


def _context(way: str, bench: Bench, windows: int | None) -> Row:
    return context_cost(bench, way)


PARTS: dict[str, dict[str, Measure]] = {
    "words": {"words": lambda bench, windows: words_between_processes(bench)},
    "context": {
        **{f"context_{way}": partial(_context, way) for way in ("idle", "waiting", "naive")},
        "context_changes": lambda bench, windows: context_changes(bench),
    },
    "ghost": {ghost_figure(way, receive): partial(_ghost, way, receive) for receive in RECEIVES for way in WAYS},
    "memory": {"memory": _memory},
    "faults": {
        "sigstop": lambda bench, windows: sigstop(bench),
        "sigkill": lambda bench, windows: sigkill(bench),
    },
    "fusion": {"fusion": _fusion},
}
"""The figures of each part, the cheapest and most decisive first."""
FIGURES = {name: measure for figures in PARTS.values() for name, measure in figures.items()}
NEED_A_GPU = {"memory", *(ghost_figure("trials", receive) for receive in RECEIVES)}
ROW = "row.json"
METERS = "timestamp,clocks.sm,power.draw,temperature.gpu"
"""Time, MHz, W and °C."""


@contextmanager
def meters(file: Path) -> Iterator[Callable[[], list[str]]]:
    """Have NVIDIA's own tool note the first device's meters meanwhile, in another process.

    Yields:
        A function: the lines so far, of `METERS`; none where there is no such tool.
    """
    command = nvidia_smi(METERS, "--loop-ms=500")
    with ExitStack() as stack:
        out = stack.enter_context(file.open("w", encoding="utf-8"))
        with suppress(OSError):
            process = stack.enter_context(subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL))
            stack.callback(process.kill)
        yield lambda: file.read_text(encoding="utf-8").splitlines()


def main() -> None:
    """Measure it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.one_figure", description=__doc__)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--folder", type=Path, required=True, help="an empty one, in memory")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--windows", type=int)
    options = parser.parse_args()
    with ExitStack() as ends:
        try:
            bench = Bench.open(options.device, options.folder, quick=options.quick)
            read = ends.enter_context(meters(options.folder / "meters"))
            row = {"device": bench.kernels.name, **FIGURES[options.figure](bench, options.windows)}
            row["meters"] = read()
            ends.callback(bench.close)
        except Exception as error:  # the other figures still count
            row = {"error": f"{type(error).__name__}: {error}"}
        replace_text(options.folder / ROW, json.dumps(row))  # before what may hang, where a device does


if __name__ == "__main__":
    with ended_when_asked():
        main()
