"""The baselines of `bubble_utilization`: the same study, trained on the main job's cores without our gate.

    naive         an ordinary process, never gated
    niceness_19   the same at the least priority
    least_weight  the same in a control group of the least weight
    sched_idle    the same in the kernel's idle class, which runs when nothing else wants the core
    step_grain    in the idle class, too, but gated by whole training steps, as FreeRide gates: a step runs if 1.2 times
                  its median fits into what is left of the forecast bubble. A bubble of a ghost stage wakes it
                  (`ghost/job.py`); besides, it looks every 10 ms, as FreeRide does, and at once after a step
    step_grain_K  the same with K fused trials

All start before the run and are stopped except in their own windows, so that they share one run. Step grain has our
forecasts and our class; only the gate differs. In the first step of windows of the mode `dedicated` the main job is
stopped for a moment, in which the naive one measures the rate of a dedicated device.

`Baselines` starts `python -m benchmarks.windows.baselines --study FILE --pages DIR --rank N --logs DIR` per rank.
"""

import argparse
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.shared.paths import ROOT
from benchmarks.windows.daemon import FORECASTS
from benchmarks.windows.modes import (
    DEDICATED,
    FUSED,
    GATELESS,
    LEAST_WEIGHT,
    NAIVE,
    NICENESS_19,
    SCHED_IDLE,
    STEP_GRAINS,
    Windows,
)
from ds_hooks.shared.page.file import Page, PageError, page_path
from ds_hooks.shared.page.layout import Field
from trials.gate.base import block_signals
from trials.gate.process import nap, run_when_idle

if TYPE_CHECKING:
    from trials.study import Study
    from trials.training.group import TrialGroup

LOOK_EVERY_S = 0.02
POLL_S = 0.01
FITS = 1.2
PROFILED_STEPS = 20
SETTLE_S, SLICE_S = 0.1, 0.25
"""Of the dedicated rate: the start that cold caches spoil, and the slice that is measured."""
STEP = struct.Struct("<qqq")
"""end_ns, trial-samples, CPU time in ns since the record before: one per training step, its batch's loading with it."""


def log_path(logs: Path, rank: int, name: str) -> Path:
    """A baseline's log of steps. A file with the suffix .pid appears beside it when it is ready."""
    return logs / f"baseline{rank}.{name}.steps"


def ready_processes(ready_files: Iterable[Path]) -> dict[str, int]:
    """Mode -> the process of its baseline, of one rank whose baselines are ready."""
    return {file.name.split(".")[1]: int(file.read_text(encoding="ascii")) for file in ready_files}


def find_page(pages: Path, rank: int) -> Page | None:
    """The page of `rank` below `pages`, if it exists yet."""
    for path in pages.rglob(page_path(Path(), rank).name):
        try:
            return Page.open(path, create=False)
        except PageError:
            return None
    return None


class Baselines(threading.Thread):
    """Lets the baselines of every rank run in their windows.

    Args:
        pages: a directory above the run's pages.
        ranks: the number of ranks.
        windows: the windows of the run.
        env: the baselines' environment.
        study: the study that they train.
        logs: an existing directory for their logs.
        least_weight: the file by which a process enters the control group of the baseline of that name.

    Attributes:
        names: the baselines: the naive one, and those that have windows.
    """

    def __init__(
        self,
        *,
        pages: Path,
        ranks: int,
        windows: Windows,
        env: Mapping[str, str],
        study: Path,
        logs: Path,
        least_weight: Path | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self._pages, self._ranks, self._windows, self._logs = pages, ranks, windows, logs
        self.names = (NAIVE, *(name for name in GATELESS if name in windows.modes))
        command = [
            sys.executable,
            "-m",
            "benchmarks.windows.baselines",
            "--study",
            str(study),
            "--pages",
            str(pages),
        ]
        command += ["--logs", str(logs), "--names", *self.names]
        command += [] if least_weight is None else ["--least-weight", str(least_weight)]
        self._processes = [
            subprocess.Popen([*command, "--rank", str(rank)], env=dict(env), cwd=ROOT) for rank in range(ranks)
        ]
        self._done = threading.Event()
        self._running: str | None = None
        self._slices: list[tuple[int, int, int]] = []

    @property
    def ready_files(self) -> list[Path]:
        """Files that exist once all baselines are ready, and stopped until their windows."""
        return [
            log_path(self._logs, rank, name).with_suffix(".pid") for rank in range(self._ranks) for name in self.names
        ]

    def run(self) -> None:
        """Follow the main job's steps, and let each window's baseline run."""
        pages: list[Page | None] = [None] * self._ranks
        bound = False
        measured: set[int] = set()
        while not self._done.wait(LOOK_EVERY_S):
            if not bound:
                pages = [page or find_page(self._pages, rank) for rank, page in enumerate(pages)]
                bound = self._bind(pages)
                continue
            assert pages[0] is not None
            words = pages[0].words
            if not words[Field.MAIN_PID]:
                self._let_run(None)
                continue
            position = self._windows.locate(words[Field.STEP])
            self._let_run(position.mode)
            if position.mode == DEDICATED and position.cycle not in measured:
                measured.add(position.cycle)
                self._measure_dedicated(pages, position.cycle)
        for page in pages:
            if page is not None:
                page.close()

    def finish(self) -> list[dict[int, float]]:
        """After the job: stop all.

        Returns:
            Per rank, cycle -> trial-samples per second on a device of the baselines' own: by the CPU time of the naive
            baseline, in slices of that cycle in which the main job was stopped. So it is measured at the machine's
            speed of that time, which drifts.
        """
        self._done.set()
        self.join()
        self._let_run(None)
        return [self._rates(rank) for rank in range(self._ranks)]

    def _rates(self, rank: int) -> dict[int, float]:
        steps = self.steps(rank, NAIVE)
        inside = {
            cycle: [s for s in steps if any(c == cycle and a < s[0] <= b for c, a, b in self._slices)]
            for cycle in {slice[0] for slice in self._slices}
        }
        return {cycle: sum(s[1] for s in own) / sum(s[2] for s in own) * 1e9 for cycle, own in inside.items() if own}

    def _measure_dedicated(self, pages: "list[Page | None]", cycle: int) -> None:
        """Stop the main job for a moment, in which the naive baselines have the devices to themselves."""
        mains = [page.words[Field.MAIN_PID] for page in pages if page is not None]
        try:
            for pid in mains:
                os.kill(pid, signal.SIGSTOP)
            self._let_run(NAIVE)
            self._done.wait(SETTLE_S)
            begin_ns = time.monotonic_ns()
            self._done.wait(SLICE_S)
            self._slices.append((cycle, begin_ns, time.monotonic_ns()))
            self._let_run(None)
        finally:
            for pid in mains:
                os.kill(pid, signal.SIGCONT)

    def steps(self, rank: int, name: str) -> list[tuple[int, int, int]]:
        """(end_ns, trial-samples, CPU time in ns) of every training step of a baseline so far."""
        data = log_path(self._logs, rank, name).read_bytes()
        return list(STEP.iter_unpack(data[: len(data) // STEP.size * STEP.size]))

    def close(self) -> None:
        """End the baselines."""
        self._done.set()
        if self.is_alive():
            self.join()
        for process in self._processes:
            process.kill()  # the kernel kills those that it has forked
            process.wait()

    def _bind(self, pages: "list[Page | None]") -> bool:
        """Put the baselines and their threads on the cores of their rank, once they and the main job exist."""
        mains = [page.words[Field.MAIN_PID] if page is not None else 0 for page in pages]
        if not all(mains) or not all(file.exists() for file in self.ready_files):
            return False
        for rank, main_pid in enumerate(mains):
            cores = os.sched_getaffinity(main_pid)
            for name in self.names:
                for thread in Path(f"/proc/{self._pid(rank, name)}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), cores)
        return True

    def _let_run(self, mode: str | None) -> None:
        wanted = mode if mode in self.names else None
        if wanted == self._running:
            return
        for name, number in ((self._running, signal.SIGSTOP), (wanted, signal.SIGCONT)):
            for rank in range(self._ranks) if name is not None else ():
                os.kill(self._pid(rank, name or ""), number)
        self._running = wanted

    def _pid(self, rank: int, name: str) -> int:
        return int(log_path(self._logs, rank, name).with_suffix(".pid").read_text())


# From here on: in the baseline's own process


class BubbleSteps:
    """Whether a whole step fits into what is left of the forecast bubble."""

    def __init__(self, pages: Path, rank: int) -> None:
        self._pages, self._rank = pages, rank
        self._page: Page | None = None

    def wait(self, step_ns: float) -> None:
        """Return when a step that takes `step_ns` fits. The gate's signals must be blocked."""
        while not self._fits(step_ns):
            nap(POLL_S)

    def _fits(self, step_ns: float) -> bool:
        self._page = self._page or find_page(self._pages, self._rank)
        if self._page is None:
            return False
        words = self._page.words
        bubble = words[Field.BUBBLE]
        forecast = words[Field.PERMITS + FORECASTS + words[Field.SLOT]]
        counts_from = Field.BUBBLE_END_NS if forecast >> 32 else Field.BUBBLE_START_NS
        end_ns = words[counts_from] + (forecast & 0xFFFFFFFF) * 1000
        fits = time.monotonic_ns() + FITS * step_ns <= end_ns
        return bool(bubble & 1) and fits and words[Field.BUBBLE] == bubble


def _train(
    study: "Study",
    group: "TrialGroup",
    log: Path,
    when_ready: Callable[[], object],
    before_step: Callable[[float], object],
) -> None:
    """Train for ever; stop this process once a few steps have shown how long one takes."""
    costs_ns: deque[int] = deque(maxlen=PROFILED_STEPS)  # of its own windows soon, not of the crowded start
    done, recorded_ns = 0, time.thread_time_ns()
    with log.open("wb", buffering=0) as file:
        for epoch in count():
            for inputs, targets, per_trial in group.batches(epoch % study.epochs):
                if done >= PROFILED_STEPS:
                    before_step(median(costs_ns))
                start_ns = time.thread_time_ns()
                group.train_step(inputs, targets, per_trial)
                end_ns = time.thread_time_ns()
                costs_ns.append(end_ns - start_ns)
                file.write(STEP.pack(time.monotonic_ns(), group.size * len(targets), end_ns - recorded_ns))
                recorded_ns = end_ns
                done += 1
                if done == PROFILED_STEPS:
                    when_ready()  # not earlier: it would take very long while all processes start
                    ready = log.with_suffix(".pid")
                    ready.with_suffix(".new").write_text(str(os.getpid()))
                    ready.with_suffix(".new").rename(ready)
                    os.kill(os.getpid(), signal.SIGSTOP)
            group.end_epoch()


def main() -> None:
    """Run the baselines of one rank: one process each, forked once the study is loaded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.windows.baselines")
    parser.add_argument("--study", type=Path, required=True)
    parser.add_argument("--pages", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--names", nargs="+", required=True)
    parser.add_argument("--least-weight", type=Path)
    options = parser.parse_args()
    block_signals()

    import optuna
    import torch

    from ds_hooks.shared.processes.parent import die_with_parent
    from trials.gate.base import OpenGate
    from trials.study import load_study
    from trials.training.group import TrialGroup
    from trials.training.member import build_member

    die_with_parent()
    torch.set_num_threads(1)
    study = load_study(options.study)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    draws = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    own, *others = options.names
    for name in others:
        if os.fork() == 0:
            die_with_parent()
            own = name
            break
    members = [build_member(study, k, study.suggest(draws.ask())) for k in range(FUSED.get(own, study.rows))]
    group = TrialGroup(study, members, OpenGate())
    when_ready: Callable[[], object] = {
        NICENESS_19: lambda: os.nice(19),
        LEAST_WEIGHT: lambda: options.least_weight.write_text("0", encoding="ascii"),
        **dict.fromkeys((SCHED_IDLE, *STEP_GRAINS), run_when_idle),
    }.get(own, int)
    before_step: Callable[[float], object] = float
    if own in STEP_GRAINS:
        before_step = BubbleSteps(options.pages, options.rank).wait
    _train(study, group, log_path(options.logs, options.rank, own), when_ready, before_step)


if __name__ == "__main__":
    main()
