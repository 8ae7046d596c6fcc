"""Measures all figures, each in a process of its own with a limit, and writes each row as soon as it is there.

python -m squeezer.calibration FILE [--mps] [--figures slices,arrival] [--quick] [--side KEY=VALUE]
"""

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ds_hooks.shared.cuda_driver import DriverError
from squeezer.calibration.figures import FIGURES, SHUT_S, Figures
from squeezer.calibration.limited import FIGURE_LIMIT_S, ended_when_asked, run_limited
from squeezer.calibration.measured_device import LateError, MeasuredDevice
from squeezer.calibration.mps_server import NoServerError, mps_server
from squeezer.calibration.verdict_store import driver_version

PROGRAM = "squeezer.calibration"


def main() -> int:
    """Measure. Returns how many figures failed."""
    parser = argparse.ArgumentParser(prog="python -m squeezer.calibration", description=__doc__)
    parser.add_argument("file", type=Path, help="where the rows go, a line of JSON each; appended")
    parser.add_argument("--figures", default=",".join(FIGURES))
    parser.add_argument("--mps", action="store_true", help="both processes as clients of an MPS server of our own")
    parser.add_argument("--side", action="append", default=[], metavar="KEY=VALUE", help="in the second's environment")
    parser.add_argument("--quick", action="store_true", help="a quarter of the repetitions")
    parser.add_argument("--one", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = sorted({*options.figures.split(",")} - {*FIGURES})
    if unknown:
        parser.error(f"no such figure: {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    if options.one:
        return _measure(options)
    failed = 0
    with ExitStack() as stack:
        environment = dict(os.environ)
        if options.mps:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bsq-mps-")))
            try:
                environment |= stack.enter_context(mps_server(folder))
            except NoServerError as error:
                sys.exit(f"nothing was measured: {error}")
        shared = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bsq-", dir="/dev/shm")))
        for figure in options.figures.split(","):
            start_s = time.monotonic()
            limit_s = _limit_s(figure)
            folder = shared / figure  # ours, for a figure may be killed
            folder.mkdir()
            command = [sys.executable, "-m", PROGRAM, *sys.argv[1:], "--one", str(folder), "--figures", figure]
            try:
                code = run_limited(command, environment, limit_s)
            except subprocess.TimeoutExpired:
                code = -1
                _write(options, figure, {"error": f"not done within {limit_s:g} s"})
            print(f"{figure}: {code}, {time.monotonic() - start_s:.1f} s", file=sys.stderr, flush=True)
            failed += code != 0
    return failed


def _limit_s(figure: str) -> float:
    return FIGURE_LIMIT_S + (SHUT_S if figure == "shut" else 0.0)


def _measure(options: argparse.Namespace) -> int:
    faulthandler.dump_traceback_later(_limit_s(options.figures) - 5)
    side = dict(item.split("=", 1) for item in options.side)
    path = options.one / "words"
    try:
        device = MeasuredDevice.open(path)
        _write(options, "device", {"uuid": device.uuid(), "name": device.kernels.name, "driver": driver_version()})
        figures = Figures(device, path, side, quick=options.quick)
        for row in getattr(figures, options.figures)():
            _write(options, options.figures, row)
        device.close()
    except (DriverError, LateError) as error:
        _write(options, options.figures, {"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def _write(options: argparse.Namespace, figure: str, row: dict[str, Any]) -> None:
    how = {"mps": options.mps, "quick": options.quick, "side_environment": options.side}
    kept = {"figure": figure, **how, **row}
    with options.file.open("a", encoding="utf-8") as file:
        file.write(json.dumps(kept) + "\n")


if __name__ == "__main__":
    with ended_when_asked():
        sys.exit(main())
