"""What squeezing costs a real pipeline on two GPUs: DeepSpeed's own engine, NCCL between its two stages.

    python -m benchmarks.gpu_pipeline [--quick] [--rounds N] [--json FILE] [--device cpu]

One run of `examples/pretrain.py`, started by `ds_squeeze` under an MPS server of its own, in rounds of five short
blocks of steps in random order:

    unhooked       the job alone: the hooks are taken off
    alone          the hooks report each step, and no bubble opens
    cooperative    squeezed, as on every GPU
    naive          a process that trains the same study beside the job, without a gate
    low_priority   the same at the lowest priority of an MPS client, without a gate

Each round gives one log ratio of mean step times to those of its unhooked block; their mean is the slowdown, with
Student's t interval over the rounds. The first steps of a block do not count. All processes exist in all blocks. FILE
is written every few seconds.

`--device cpu` is a dry run on two cores with gloo: it shows that all but MPS and NCCL works, and nothing about a GPU.
If something is missing, the command names it and ends with status 2.
"""

import argparse
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import ROOT, environment, finish, mean_and_ci95, winsorized, write
from benchmarks.gpu.block_files import RANKS, ready_path, step_word, steps_path, trained_path
from benchmarks.processes import start
from benchmarks.utilization.windows import ALONE, COOPERATIVE, LOW_PRIORITY, NAIVE, STUDY, UNHOOKED, WINDOWED, Windows
from squeezer.calibration.mps_server import CONTROL, mps_server
from squeezer.records.reader import load_run

NAME = "gpu_pipeline"
ARMS = {"hooks": ALONE, "squeezed": COOPERATIVE, "naive": NAIVE, "low_priority": LOW_PRIORITY}
"""Name of a figure -> the mode of its blocks."""
BLOCK_STEPS, WASH_OUT_STEPS = 8, 3  # the daemon plans anew once the hooks are back, for a later step
CYCLE = tuple((mode, BLOCK_STEPS) for mode in (UNHOOKED, *ARMS.values()))
WINDOWS = Windows(observe=6, warm_up=120, cycle=CYCLE, shuffled=True)
QUICK_WINDOWS = Windows(observe=4, warm_up=30, cycle=CYCLE, shuffled=True)
ROUNDS, QUICK_ROUNDS = 60, 4
JOB = {
    "cuda": ["--width", "1024", "--layers", "16", "--micro-batch-size", "16"],
    "cpu": ["--width", "64", "--layers", "2"],
}
READY_WITHIN_S, LOOK_EVERY_S, WRITE_EVERY_S = 300.0, 0.2, 5.0
LIMIT_S = 1800.0
NOTHING_MEASURED = 2


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{NAME}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=JOB, default="cuda", help="cpu: a dry run on two cores")
    parser.add_argument("--quick", action="store_true", help="a short warm-up, few rounds")
    parser.add_argument("--rounds", type=int, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw steps and the summary there")
    options = parser.parse_args()
    lacks = lacking(options.device)
    if lacks:
        print(f"{NAME}: nothing was measured. Missing:", *lacks, sep="\n  ", file=sys.stderr)
        return NOTHING_MEASURED
    run = {"scenario": options.device, "steps_ms": [], "ungated_steps": {}, "reported_steps": {}, "side": None}
    error = None
    try:
        _measure(options, run)
    except (OSError, RuntimeError, TimeoutError, subprocess.SubprocessError) as raised:
        error = run["error"] = f"{type(raised).__name__}: {raised}"
    finish(NAME, options, [run], summary(run))
    if error is not None:
        print(f"{NAME}: {error}", file=sys.stderr)
    return int(error is not None)


def lacking(device: str) -> list[str]:
    """What this machine lacks for the measurement, in words."""
    modules = {"torch": "PyTorch", "deepspeed": "DeepSpeed", "zmq": "pyzmq", "sklearn": "scikit-learn, for the study"}
    lacks = [f"{text} ({name})" for name, text in modules.items() if importlib.util.find_spec(name) is None]
    if device == "cpu":
        cores = len(os.sched_getaffinity(0))
        return lacks if cores >= RANKS else [*lacks, f"two cores: this process may use {cores}"]
    if importlib.util.find_spec("torch") is not None:
        import torch

        if (devices := torch.cuda.device_count()) < RANKS:
            lacks.append(f"two GPUs: PyTorch {torch.__version__} finds {devices}")
    if shutil.which(CONTROL) is None:
        lacks.append(f"MPS ({CONTROL}, of NVIDIA's driver): without it bubbles are only observed")
    return lacks


def summary(run: Mapping[str, Any]) -> dict[str, Any]:
    """The slowdown of each arm against the job without hooks, its 95% interval, and the number of rounds."""
    figures: dict[str, Any] = {}
    means = _block_means(run["steps_ms"])
    for name, mode in ARMS.items():
        alone = {round_: log for (round_, own), log in means.items() if own == UNHOOKED}
        ratios = [log - alone[round_] for (round_, own), log in means.items() if own == mode and round_ in alone]
        figures[f"{name}_rounds"] = len(ratios)
        if ratios:
            mean, interval = mean_and_ci95(ratios)
            figures[f"{name}_slowdown"] = math.expm1(mean)
            figures[f"{name}_slowdown_ci95"] = interval and [math.expm1(bound) for bound in interval]
    return {**figures, "ungated_steps": run["ungated_steps"], "side": run["side"]}


def _block_means(steps_ms: Sequence[Sequence[Any]]) -> dict[tuple[int, str], float]:
    """(round, mode) -> the mean logarithm of the steps that count, of each whole block.

    Steps far from others of their block count as less far. Other blocks of the round may be far from it by nature.
    """
    blocks: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for round_, mode, at, ms in steps_ms:
        if at >= WASH_OUT_STEPS:
            blocks[round_, mode].append(math.log(ms))
    whole = {place: logs for place, logs in blocks.items() if len(logs) == BLOCK_STEPS - WASH_OUT_STEPS}
    near = winsorized([*whole.values()]) if whole else []
    return {place: fmean(logs) for place, logs in zip(whole, near, strict=True)}


def _measure(options: argparse.Namespace, run: dict[str, Any]) -> None:
    """One run. `run` takes what is known so far, even if an error comes.

    Raises:
        RuntimeError: the job or an ungated side task has failed.
        TimeoutError: one of them takes too long.
    """
    windows = QUICK_WINDOWS if options.quick else WINDOWS
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="bsq-", dir="/dev/shm")))
        pages, records = folder / "pages", folder / "run"
        pages.mkdir(mode=0o700)
        env = {**environment(pages), **windows.environment(), "DS_ACCELERATOR": options.device}
        if options.device == "cuda":
            env |= ends.enter_context(mps_server(folder))
        for rank in range(RANKS):
            step_word(folder, rank, create=True)
        _start_ungated(options.device, folder, env, ends)
        config = folder / "squeezer.toml"
        config.write_text(WINDOWED.format(study=STUDY, run=records), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.utilization.windowed_launch", "--squeezer", str(config)]
        command += ["--num_accelerators", str(RANKS), "--module", "benchmarks.gpu.blocks", str(folder)]
        # one step more: the last one's time is never known
        command += [
            str(ROOT / "examples" / "pretrain.py"),
            "--steps",
            str(windows.first_step(rounds)),
            *JOB[options.device],
        ]
        job = start(command, env, ends)
        deadline_s = time.monotonic() + LIMIT_S
        due_s = 0.0
        while (status := job.poll()) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the job has not ended within {LIMIT_S:.0f} s")
            time.sleep(LOOK_EVERY_S)
            if options.json and time.monotonic() > due_s:
                due_s = time.monotonic() + WRITE_EVERY_S
                _read(folder, windows, run)
                write(NAME, options, [run], summary(run))
        _read(folder, windows, run)
        if status:
            raise RuntimeError(f"the job ended with status {status}")
        reported = [step.step for rank in load_run(records) for step in rank.step_times()]
        run["reported_steps"] = Counter(windows.locate(step).mode for step in reported)
        run["side"] = _side(records)


def _start_ungated(device: str, folder: Path, env: Mapping[str, str], ends: ExitStack) -> None:
    """Start the side tasks without a gate on each device, and wait until they are ready."""
    visible = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] or ["0", "1"]
    waited = {}
    for rank in range(RANKS):
        for mode, priority in ((NAIVE, "0"), (LOW_PRIORITY, "1")):
            own = {**env, "CUDA_VISIBLE_DEVICES": visible[rank], "CUDA_MPS_CLIENT_PRIORITY": priority}
            command = [sys.executable, "-m", "benchmarks.gpu.ungated", mode, "--folder", str(folder)]
            command += ["--rank", str(rank), "--study", str(STUDY), "--device", device]
            waited[ready_path(folder, mode, rank)] = start(command, own, ends)
    deadline_s = time.monotonic() + READY_WITHIN_S
    while not all(path.exists() for path in waited):
        if any(process.poll() is not None for process in waited.values()):
            raise RuntimeError("a side task without a gate has failed; its error is above")
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the side tasks without a gate are not ready within {READY_WITHIN_S:.0f} s")
        time.sleep(LOOK_EVERY_S)


def _read(folder: Path, windows: Windows, run: dict[str, Any]) -> None:
    """Take what the processes have written so far. A step's time is the mean of its ranks'."""
    ranks = [{step: ms for step, ms in _lines(steps_path(folder, rank))} for rank in range(RANKS)]
    known = sorted(set.intersection(*map(set, ranks)))
    at = {step: windows.locate(step) for step in known}
    run["steps_ms"] = [
        [at[step].cycle, at[step].mode, at[step].at, round(fmean(rank[step] for rank in ranks), 3)]
        for step in known
        if at[step].cycle >= 0
    ]
    run["ungated_steps"] = {
        mode: sum(trained for rank in range(RANKS) for _, trained in _lines(trained_path(folder, mode, rank)))
        for mode in (NAIVE, LOW_PRIORITY)
    }


def _lines(path: Path) -> Sequence[Sequence[Any]]:
    """The whole lines of a file that may still grow, or not be there yet."""
    with suppress(FileNotFoundError):
        text = path.read_text(encoding="ascii")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return []


def _side(records: Path) -> dict[str, Any]:
    """What the report says of the gated side task."""
    command = [sys.executable, "-m", "squeezer", "report", str(records), "--json"]
    report = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=120).stdout)
    side = report["side"]
    return {key: side[key] for key in ("fill", "harvest", "not_started")}


if __name__ == "__main__":
    sys.exit(main())
