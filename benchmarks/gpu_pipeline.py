"""What squeezing costs a real pipeline on two GPUs: DeepSpeed's own engine, NCCL between its two stages.

    python -m benchmarks.gpu_pipeline [--quick] [--rounds N] [--json FILE] [--one-gpu] [--device cpu]

First the devices are measured (`squeezer doctor --measure`), as without a verdict of its own nothing would be squeezed.
Then one run of `examples/pretrain.py`, started by `ds_squeeze` under an MPS server of its own, in rounds of five short
blocks of steps in random order:

    unhooked       the job alone: the hooks are taken off
    alone          the hooks report each step, and no bubble opens
    cooperative    squeezed, as on every GPU
    naive          a process that trains the same study beside the job, without a gate
    low_priority   the same at the lowest priority of an MPS client, without a gate

Each round gives one log ratio of mean step times to those of its unhooked block; their mean is the slowdown, with
Student's t interval over the rounds. The first steps of a block do not count. All processes exist in all blocks. FILE
is written every few seconds.

`--one-gpu` runs both stages on one device, as if each were a machine of its own: NCCL, which refuses two ranks on a
device of one host, then passes data by sockets. All of it is at work, but what a side task does in one stage's bubble
it does beside the other stage's kernels, so that slowdowns are worse than on two devices.

`--device cpu` is a dry run on two cores with gloo: it shows that all but MPS and NCCL works, and nothing about a GPU.
If something is missing, the command names it and ends with status 2.
"""

import argparse
import importlib.util
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.gpu.block_files import RANKS, ready_path, step_word, steps_path, trained_path
from benchmarks.shared.intervals import mean_and_ci95, winsorized
from benchmarks.shared.paths import ROOT
from benchmarks.shared.processes import environment, start
from benchmarks.shared.results import finish, write
from benchmarks.studies import MANY_DIGITS
from benchmarks.windows.modes import ALONE, COOPERATIVE, LOW_PRIORITY, NAIVE, UNHOOKED, WINDOWED, Windows
from ds_hooks.shared.page.file import DIRECTORY_VARIABLE
from launch.rank import core_share
from squeezer.calibration import measure
from squeezer.calibration.limited import ended_when_asked
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
MEASURED_WITHIN_S = measure.LIMIT_S + 120
LIMIT_S = 1800.0
NOTHING_MEASURED = 2


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{NAME}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=JOB, default="cuda", help="cpu: a dry run on two cores")
    parser.add_argument("--quick", action="store_true", help="a short warm-up, few rounds")
    parser.add_argument("--one-gpu", action="store_true", help="both stages on one device, by two launchers")
    parser.add_argument("--rounds", type=int, metavar="N")
    parser.add_argument("--warm-up", type=int, metavar="N", help="squeezed steps before the first round")
    parser.add_argument("--records", type=Path, metavar="DIR", help="keep the run's records there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw steps and the summary there")
    options = parser.parse_args()
    lacks = lacking(options.device, 1 if options.one_gpu else RANKS)
    if lacks:
        print(f"{NAME}: nothing was measured. Missing:", *lacks, sep="\n  ", file=sys.stderr)
        return NOTHING_MEASURED
    scenario = f"{options.device}_one_device" if options.one_gpu else options.device
    run: dict[str, Any] = {
        "scenario": scenario,
        "steps_ms": [],
        "ungated_steps": {},
        "reported_steps": {},
        "side": None,
    }
    error = None
    try:
        _measure(options, run)
    except (OSError, RuntimeError, TimeoutError, subprocess.SubprocessError) as raised:
        error = run["error"] = f"{type(raised).__name__}: {raised}"
    finish(NAME, options, [run], summary(run))
    if error is not None:
        print(f"{NAME}: {error}", file=sys.stderr)
    return int(error is not None)


def lacking(device: str, gpus: int = RANKS) -> list[str]:
    """What this machine lacks for the measurement, in words."""
    modules = {"torch": "PyTorch", "deepspeed": "DeepSpeed", "zmq": "pyzmq", "sklearn": "scikit-learn, for the study"}
    lacks = [f"{text} ({name})" for name, text in modules.items() if importlib.util.find_spec(name) is None]
    if device == "cpu":
        cores = len(os.sched_getaffinity(0))
        return lacks if cores >= RANKS else [*lacks, f"two cores: this process may use {cores}"]
    if importlib.util.find_spec("torch") is not None:
        import torch

        if (devices := torch.cuda.device_count()) < gpus:
            wanted = "two GPUs" if gpus == RANKS else "a GPU"
            lacks.append(f"{wanted}: PyTorch {torch.__version__} finds {devices}")
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
    windows = replace(windows, warm_up=options.warm_up or windows.warm_up)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="bsq-", dir="/dev/shm")))
        records = (options.records or folder / "run").absolute()
        env = {**environment(folder / "pages"), **windows.environment(), "DS_ACCELERATOR": options.device}
        if options.device == "cuda":
            env |= {**ends.enter_context(mps_server(folder)), "XDG_STATE_HOME": str(folder / "state")}
            run["verdicts"] = measure_devices(env, 1 if options.one_gpu else RANKS)
        for rank in range(RANKS):
            step_word(folder, rank, create=True)
        _start_ungated(options, folder, env, ends)
        config = folder / "squeezer.toml"
        config.write_text(WINDOWED.format(study=MANY_DIGITS, run=records), encoding="utf-8")
        script = ["--module", "benchmarks.gpu.blocks", str(folder), str(ROOT / "examples" / "pretrain.py")]
        # one step more: the last one's time is never known
        script += ["--steps", str(windows.first_step(rounds)), *JOB[options.device]]
        command = [sys.executable, "-m", "benchmarks.windows.launcher", "--squeezer", str(config)]
        launch = _launch_as_two_hosts if options.one_gpu else _launch
        jobs = launch(command, script, folder, env, ends)
        deadline_s = time.monotonic() + LIMIT_S
        due_s = 0.0
        while any(job.poll() is None for job in jobs):
            if any(job.poll() for job in jobs):  # its peer would wait for it
                break
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the job has not ended within {LIMIT_S:.0f} s")
            time.sleep(LOOK_EVERY_S)
            if options.json and time.monotonic() > due_s:
                due_s = time.monotonic() + WRITE_EVERY_S
                _read(folder, windows, run)
                write(NAME, options, [run], summary(run))
        _read(folder, windows, run)
        if any(job.poll() != 0 for job in jobs):
            raise RuntimeError(f"the job ended with status {next(job.poll() for job in jobs if job.poll())}")
        reported = [step.step for rank in load_run(records) for step in rank.step_times()]
        run["reported_steps"] = Counter(windows.locate(step).mode for step in reported)
        run["side"] = _side(records)


def measure_devices(env: Mapping[str, str], count: int) -> list[list[str]]:
    """Find out what the first devices allow, and keep it where `env` says; what the doctor says of each.

    Raises:
        RuntimeError: one cannot be measured.
    """
    said = []
    for device in range(count):
        command = [sys.executable, "-m", "squeezer", "doctor", "--measure", "--device", str(device)]
        done = subprocess.run(
            command, cwd=ROOT, env=dict(env), capture_output=True, text=True, check=False, timeout=MEASURED_WITHIN_S
        )
        if done.returncode:
            raise RuntimeError(f"device {device} cannot be measured: {done.stdout}{done.stderr}")
        said.append(done.stdout.splitlines())
    return said


Processes = list["subprocess.Popen[bytes]"]


def _launch(
    command: Sequence[str], script: Sequence[str], folder: Path, env: Mapping[str, str], ends: ExitStack
) -> Processes:
    """One launcher for two devices."""
    (folder / "pages").mkdir(mode=0o700)
    return [start([*command, "--num_accelerators", str(RANKS), *script], env, ends)]


def _launch_as_two_hosts(
    command: Sequence[str], script: Sequence[str], folder: Path, env: Mapping[str, str], ends: ExitStack
) -> Processes:
    """A launcher for each rank, with half of the cores, as on two hosts of which each has the first device."""
    (folder / "hosts").write_text("".join(f"host{rank} slots=1\n" for rank in range(RANKS)), encoding="ascii")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    jobs = []
    for rank in range(RANKS):
        pages = folder / f"pages{rank}"
        pages.mkdir(mode=0o700)
        own = {DIRECTORY_VARIABLE: str(pages), "NCCL_HOSTID": f"host{rank}"}
        own |= {f"{library}_SOCKET_IFNAME": "lo" for library in ("NCCL", "GLOO")}
        cores = core_share(sorted(os.sched_getaffinity(0)), rank, RANKS)
        launcher = ["taskset", "-c", ",".join(map(str, cores)), *command]
        launcher += ["--hostfile", str(folder / "hosts"), "--no_ssh", "--node_rank", str(rank)]
        launcher += ["--master_addr", "127.0.0.1", "--master_port", str(port)]
        jobs.append(start([*launcher, *script], {**env, **own}, ends))
    return jobs


def _start_ungated(options: argparse.Namespace, folder: Path, env: Mapping[str, str], ends: ExitStack) -> None:
    """Start the side tasks without a gate on each rank's device, and wait until they are ready."""
    visible = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] or ["0", "1"]
    if options.one_gpu:
        visible = [visible[0]] * RANKS
    waited = {}
    for rank in range(RANKS):
        for mode, priority in ((NAIVE, "0"), (LOW_PRIORITY, "1")):
            own = {**env, "CUDA_VISIBLE_DEVICES": visible[rank], "CUDA_MPS_CLIENT_PRIORITY": priority}
            command = [sys.executable, "-m", "benchmarks.gpu.ungated", mode, "--folder", str(folder)]
            command += ["--rank", str(rank), "--study", str(MANY_DIGITS), "--device", options.device]
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
    with ended_when_asked():
        sys.exit(main())
