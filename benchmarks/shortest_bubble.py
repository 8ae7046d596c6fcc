"""Gain and cost of squeezing by the length of the bubbles: from what length does a bubble pay?

A main job multiplies matrices and waits for a known time, on one core with a side task that trains the digits study. It
uses the hooks' own clock and signals, and the real gate. Windows with and without squeezing alternate. The *cost* of a
bubble is how much longer the main job takes from one bubble to the next; the *gain* is the side task's work in it, as
time of a dedicated device. `squeeze.min_bubble_ms` follows from both.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.shared.paths import ROOT
from benchmarks.shared.processes import environment
from benchmarks.shared.results import finish, kept_runs, parse
from benchmarks.studies import ENDLESS_DIGITS
from ds_hooks.clock.cpu import CpuClock
from ds_hooks.shared.page.file import Page, make_private_dir, page_path
from ds_hooks.shared.page.layout import Field, Role, SideActivity
from ds_hooks.side_process import SideProcess
from squeezer.reports.student_t import t_quantile_975

NAME = "shortest_bubble"
MODES = ("preemptive", "cooperative")
LENGTHS_MS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0)
BUBBLES = 30
"""Per window; the first does not count."""
MARGIN_MS = 0.3
"""The default of `squeeze.margin_ms`, for the cooperative mode."""
DEDICATED_S = 0.5
WARM_UPS = 4
"""Long bubbles in which the side task builds its trials."""
COMPUTE_ROWS, COMPUTE_WIDTH = 256, 512
"""A few milliseconds of work, with weights and activations that fill a cache."""


@dataclass(frozen=True, slots=True)
class Window:
    """Mean time from one bubble's start to the next, less the wait; and work per bubble."""

    between_ms: float
    work: float


def main() -> None:
    """Measure, print, write."""
    if sys.argv[1:2] == ["side"]:
        _be_the_side_task(Path(sys.argv[2]))
        return
    options = parse(NAME, __doc__ or "")
    if options.only not in (None, *MODES):
        raise SystemExit(f"--only {options.only}: no such scenario; allowed: {', '.join(MODES)}")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    runs = kept_runs(options)
    for mode in MODES if options.only is None else [options.only]:
        runs.append({"scenario": mode, "by_length": _measure(mode, cycles=3 if options.quick else 12)})
    finish(NAME, options, runs, _summary(runs))


def _measure(mode: str, *, cycles: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="bsq-") as folder:
        page = Page.open(page_path(make_private_dir(Path(folder) / "pages"), 0))
        page.claim(Role.MAIN)
        command = [sys.executable, "-m", "benchmarks.shortest_bubble", "side", str(page.path)]
        with subprocess.Popen(command, env=environment(page.path.parent), cwd=ROOT) as process:
            while page.words[Field.SIDE_PID] != process.pid or page.words[Field.SIDE_ACTIVITY] != SideActivity.ASLEEP:
                time.sleep(0.05)
            page.words[Field.SIDE_PROCESS] = process.pid
            found = _windows(_MainJob(page, preemptive=mode == "preemptive"), cycles)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
        page.close()
    return [_figures(length_ms, *found[length_ms]) for length_ms in LENGTHS_MS]


class _MainJob:
    """Computes, and waits in bubbles."""

    def __init__(self, page: Page, *, preemptive: bool) -> None:
        import torch

        torch.set_num_threads(1)
        self._words = page.words
        self._clock, self._side = CpuClock(page, time.monotonic_ns), SideProcess(page.words)
        self._preemptive = preemptive
        self._step = 0
        self._x = torch.randn(COMPUTE_ROWS, COMPUTE_WIDTH)
        self._weights = [torch.randn(COMPUTE_WIDTH, COMPUTE_WIDTH) / COMPUTE_WIDTH**0.5 for _ in range(4)]

    def window(self, length_ms: float, *, squeezed: bool) -> Window:
        """Run some bubbles in a row."""
        between_ms = []
        work = 0
        begin_ns = 0
        for bubble in range(BUBBLES + 1):
            if bubble == 1:
                work = self._words[Field.WORK]
            before_ns, begin_ns = begin_ns, self._bubble(length_ms, squeezed=squeezed)
            if bubble > 1:
                between_ms.append((begin_ns - before_ns) / 1e6 - length_ms)
            self._compute()
        return Window(fmean(between_ms), (self._words[Field.WORK] - work) / BUBBLES)

    def dedicated_per_ms(self) -> float:
        """The side task's work in a long bubble, per ms of its CPU time."""
        self._bubble(DEDICATED_S * 200, squeezed=True)
        work, cpu_ns = self._words[Field.WORK], self._clock.side_cpu_ns()
        self._bubble(DEDICATED_S * 1e3, squeezed=True)
        return (self._words[Field.WORK] - work) / (self._clock.side_cpu_ns() - cpu_ns) * 1e6

    def _bubble(self, length_ms: float, *, squeezed: bool) -> int:
        self._step += 1
        clock, side = self._clock, self._side
        permit_ms = 60_000.0 if self._preemptive else max(0.0, length_ms - MARGIN_MS)
        begin_ns = clock.open(self._step, 0, round(permit_ms * 1e6) if squeezed else 0)
        if squeezed:
            side.wake()
        left_ns = begin_ns + round(length_ms * 1e6) - time.monotonic_ns()
        time.sleep(max(0, left_ns) / 1e9)
        clock.close()
        side.halt(() if self._preemptive else [SideActivity.UNIT])
        return begin_ns

    def _compute(self) -> None:
        x = self._x
        for weight in self._weights:
            x = (x @ weight).relu_()
        if not self._preemptive:
            self._side.halt()  # as after the main job's next instruction


Found = dict[float, tuple[list[tuple[Window, Window]], list[float]]]


def _windows(job: _MainJob, cycles: int) -> Found:
    """Map each length to pairs of windows (squeezed, alone), and the dedicated rate beside each."""
    found: Found = {length_ms: ([], []) for length_ms in LENGTHS_MS}
    for _ in range(WARM_UPS):
        job.dedicated_per_ms()
    after = job.dedicated_per_ms()
    for cycle in range(cycles):
        before = after
        for length_ms in LENGTHS_MS if cycle % 2 else reversed(LENGTHS_MS):
            first, second = (job.window(length_ms, squeezed=squeezed == bool(cycle % 2)) for squeezed in (True, False))
            found[length_ms][0].append((first, second) if cycle % 2 else (second, first))
        after = job.dedicated_per_ms()
        for _, rates in found.values():
            rates.append((before + after) / 2)  # the machine's speed drifts
    return found


def _figures(length_ms: float, pairs: Sequence[tuple[Window, Window]], per_ms: Sequence[float]) -> dict[str, Any]:
    costs_us = [1e3 * (squeezed.between_ms - alone.between_ms) for squeezed, alone in pairs]
    gains_us = [1e3 * squeezed.work / rate for (squeezed, _), rate in zip(pairs, per_ms, strict=True)]
    nets_us = [gain - cost for gain, cost in zip(gains_us, costs_us, strict=True)]
    return {
        "bubble_ms": length_ms,
        "compute_ms": median(alone.between_ms for _, alone in pairs),
        "cost_us": fmean(costs_us),
        "cost_us_ci95": _ci95(costs_us),
        "harvest": fmean(gains_us) / (1e3 * length_ms),
        "net_us": fmean(nets_us),
        "net_us_ci95": _ci95(nets_us),
        "raw": [[round(s.between_ms, 4), round(a.between_ms, 4), round(s.work, 1)] for s, a in pairs],
        "dedicated_per_ms": [round(rate, 2) for rate in per_ms],
    }


def _ci95(values: Sequence[float]) -> list[float]:
    half = t_quantile_975(len(values) - 1) * stdev(values) / len(values) ** 0.5
    return [fmean(values) - half, fmean(values) + half]


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per mode and length: harvest, cost and net gain; and the length from which bubbles pay with 95% confidence."""
    summary: dict[str, Any] = {}
    for run in runs:
        by_length = run["by_length"]
        for figures in by_length:
            key = f"{run['scenario']}_{figures['bubble_ms']:g}_ms"
            summary[f"{key}_harvest"] = round(figures["harvest"], 3)
            summary[f"{key}_cost_us"] = round(figures["cost_us"])
            summary[f"{key}_net_us"] = round(figures["net_us"])
        loses = [figures["bubble_ms"] for figures in by_length if figures["net_us_ci95"][0] <= 0]
        longer = [length_ms for length_ms in LENGTHS_MS if not loses or length_ms > max(loses)]
        summary[f"{run['scenario']}_pays_from_ms"] = min(longer, default=None)
    return summary


def _be_the_side_task(path: Path) -> None:
    from trials.gate.base import StopRequested, block_signals
    from trials.gate.cpu import CpuGate

    block_signals()
    import optuna
    import torch

    from trials.gate.base import HOST_UNIT
    from trials.study import load_study
    from trials.training.group import TrialGroup
    from trials.training.member import build_member

    torch.set_num_threads(1)
    study = load_study(ENDLESS_DIGITS)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    draws = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    members = [build_member(study, k, study.suggest(draws.ask())) for k in range(study.rows)]
    os.nice(19)
    page = Page.open(path, create=False)
    gate = CpuGate(page)
    group = TrialGroup(study, members, gate)
    page.claim(Role.SIDE)
    gate.rest()
    try:
        for epoch in count():
            gate.enter(HOST_UNIT)
            for inputs, targets, per_trial in group.batches(epoch):
                group.train_step(inputs, targets, per_trial)
                gate.enter(HOST_UNIT)
                gate.add_work(group.size * len(targets))
    except StopRequested:
        pass
    page.close()


if __name__ == "__main__":
    main()
