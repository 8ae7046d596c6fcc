"""Soaks the real job in random faults, and compares its losses bit by bit with those of the job alone.

    python -m benchmarks.soak --minutes 60 --seed 1 --json benchmarks/results/soak.jsonl

Each run trains `examples/pretrain.py` in two stages beside the example's study under `ds_squeeze`. One to three faults,
drawn from the seed, hit daemons, side tasks, search workers, their children, the launchers, the ranks, the terminal or
the disk. A fault aimed at the main job may end it, but must change no loss before that. After each run nothing may be
left behind. The file is appended to, so that a soak that was cut short resumes. The exit status is 1 if a run failed.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

from benchmarks.shared.results import commit, machine
from benchmarks.soak import results
from benchmarks.soak.faults import STEPS, draw
from benchmarks.soak.job import Paths, losses_alone
from benchmarks.soak.one_run import run_once

_CLONE_NEWNS = 0x20000


def main() -> int:
    """Soak, print, append."""
    options = _parse()
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    may_mount = _own_mounts()
    if not may_mount:
        print("SKIPPED: the full disk. Only root may mount a small one", file=sys.stderr, flush=True)
    at = commit()
    named = {"seed": options.seed, "steps_planned": options.steps, "commit": at, "machine": machine()}
    try:
        lines = results.to_continue(options.json, at, options.seed, options.steps) if options.json else []
    except results.ResultsError as error:
        print(f"benchmarks.soak: {error}", file=sys.stderr)
        return 2
    if not lines:
        lines.append({**named, "alone": _alone(options.seed, options.steps)})
        if options.json:
            results.append(options.json, lines[0])
    alone, runs = lines[0]["alone"], lines[1:]
    number = 0 if not runs else runs[-1]["run"] + 1
    while options.run is not None or sum(run["seconds"] for run in runs) < options.minutes * 60:
        number = number if options.run is None else options.run
        plan = draw(options.seed, number, options.steps)
        if not may_mount:
            plan = replace(plan, faults=tuple(fault for fault in plan.faults if fault.what != "full disk"))
        result = run_once(number, plan, options.seed, alone)
        runs.append({"run": number, "date": time.strftime("%Y-%m-%dT%H:%M:%S"), **named, **result})
        if options.json:
            results.append(options.json, runs[-1])
        faults = ", ".join(_describe(fault) for fault in result["faults"])
        verdict = "; ".join(result["failed"]) or "fine"
        print(f"run {number}, {result['form']}: {faults}: {result['ended']}: {verdict}", file=sys.stderr, flush=True)
        if options.run is not None:
            break
        number += 1
    print(results.summary(runs))
    return 1 if any(run["failed"] for run in runs) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of runs, earlier ones in FILE included")
    parser.add_argument("--seed", type=int, default=1, help="of the faults, and of the training")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each run of the main job; default: {STEPS}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the results there, one line per run")
    parser.add_argument("--run", type=int, metavar="N", help="repeat just this run")
    return parser.parse_args()


def _alone(seed: int, steps: int) -> list[str]:
    """The losses of the job alone, from two runs that must agree."""
    with tempfile.TemporaryDirectory(prefix="bsq-soak-", dir="/tmp") as made:
        paths = Paths(Path(made), Path(made) / "run")
        first, second = losses_alone(paths, seed, steps), losses_alone(paths, seed, steps)
    if first != second:
        raise RuntimeError("two runs of the job alone differ, so nothing can be compared")
    return first


def _describe(fault: dict[str, object]) -> str:
    """In the order of words that people use."""
    victim = f" {fault['victim']}{fault['rank']}" if fault["victim"] else ""
    when = f"at step {fault['at_step']}" if "at_step" in fault else "no victim"
    return f"{fault['what']}{victim} ({when})"


def _own_mounts() -> bool:
    """Whether this process, as root, may mount disks that vanish with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getuid() != 0 or libc.unshare(_CLONE_NEWNS) != 0:
        return False
    private = subprocess.run(["mount", "--make-rprivate", "/"], check=False, stderr=subprocess.DEVNULL)
    return private.returncode == 0


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
