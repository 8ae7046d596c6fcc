"""The part `ghost` of `gpu_suite`: slowdown and harvest of a ghost stage with the real hooks and three side tasks.

The benchmark acts as the daemon: it receives the hooks' messages, forecasts each slot, and plans the squeezed windows.
Windows alternate. Before each window the device drains, so that no step feels the window before.
"""

import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.ghost.model import Timing
from benchmarks.ghost.program import GhostShape, programs_of
from benchmarks.gpu.fake_driver import DEFAULT_STREAM, FakeDriver
from benchmarks.gpu.fake_torch import fake_torch
from benchmarks.gpu.ghost_stream import StreamStage
from benchmarks.gpu.parts import UNIT_US, Bench, Side
from benchmarks.shared.intervals import ratio_with_ci95
from ds_hooks import attach
from ds_hooks.shared import wire
from ds_hooks.shared.page.file import Page, make_private_dir, page_path, socket_path
from ds_hooks.shared.page.layout import Field, Role
from ds_hooks.shared.page.plan import plan_slot, plan_steps
from squeezer.daemon.receiver import Receiver
from squeezer.policy.forecast import SlotForecast

SHAPE = GhostShape(stages=4, stage=1, micro_batches=4, clipping=False)
FORWARD_MS = {"cuda": 4.0, "cpu": 20.0}
OBSERVE_STEPS = 8
WINDOW_STEPS = 8
WINDOWS, QUICK_WINDOWS = 10, 2
"""Pairs of a window alone and one beside a side task."""
WARM_UP_WINDOWS = 12
"""Squeezed windows that are not counted, in which real trials are built, and their steps recorded as graphs."""
MARGIN_NS = 300_000
MIN_BUBBLE_NS = 1_500_000
QUANTILE = 0.4
_PATIENCE_S = 10.0


class Listener:
    """Receives the hooks' messages, forecasts, and plans."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._receiver = Receiver(socket_path(page.path.parent, 0), lambda fault: print(fault, file=sys.stderr))
        self._forecast = SlotForecast(QUANTILE)
        self._begun: dict[int, tuple[int, int]] = {}
        self._slots: set[int] = set()
        self.steps: dict[int, tuple[int, int]] = {}
        """Step -> (begin, end) in ns."""
        self.bubble_ns: defaultdict[int, int] = defaultdict(int)
        """Step -> all its bubbles."""
        self._step_begin_ns = 0
        self._over = False

    def hear(self) -> None:
        """Receive all pending messages."""
        more = True
        while more:
            more = False
            for part in self._receiver.parts():
                more = True
                envelope = self._receiver.decode(part)
                if envelope is not None:
                    self._take(envelope.t_ns, envelope.message)

    def hear_the_end(self) -> None:
        """Receive all messages up to the goodbye."""
        end_s = time.monotonic() + _PATIENCE_S
        while not self._over and time.monotonic() < end_s:
            self.hear()
            time.sleep(1e-3)

    def plan(self, *, squeezed: bool, slots: bool) -> None:
        """Plan all steps issued from now on."""
        for slot in sorted(self._slots):
            length_ns = self._forecast.length_ns(slot) or 0
            permit_ns = length_ns - MARGIN_NS if slots and length_ns >= MIN_BUBBLE_NS else 0
            plan_slot(self._page.words, slot, permit_ns)
        plan_steps(self._page.words, *((1, 2**31) if squeezed else (0, 0)))

    def close(self) -> None:
        """Close the socket."""
        self._receiver.close()

    def _take(self, t_ns: int, message: wire.Message) -> None:
        match message:
            case wire.StepStart():
                self._step_begin_ns = t_ns
            case wire.StepEnd():
                self.steps[message.step] = (self._step_begin_ns, t_ns)
            case wire.BubbleStart():
                self._begun[message.epoch] = (message.slot, t_ns)
            case wire.BubbleEnd() if message.epoch in self._begun:
                slot, begin_ns = self._begun.pop(message.epoch)
                self._slots.add(slot)
                self._forecast.observe(slot, t_ns - begin_ns)
                self.bubble_ns[message.step] += t_ns - begin_ns
            case wire.Bye():
                self._over = True


@contextmanager
def _compute_stream(bench: Bench) -> Iterator[int]:
    """The stream on which the main job computes, where the hooks look for it."""
    driver = bench.driver
    if not isinstance(driver, FakeDriver):
        import torch

        torch.cuda.init()
        yield int(torch.cuda.current_stream().cuda_stream)
        return
    with fake_torch(driver):
        yield DEFAULT_STREAM


def ghost_stage(bench: Bench, way: str, receive: str, windows: int | None = None) -> dict[str, Any]:
    """Run one kind of side task with one kind of receive, in so many pairs of windows."""
    windows = windows or (QUICK_WINDOWS if bench.quick else WINDOWS)
    forward_ns = int(FORWARD_MS[bench.device] * 1e6)
    timing = Timing(forward_ns=forward_ns, backward_ns=2 * forward_ns, optimizer_ns=forward_ns // 2)
    first = len(bench.kernels.stamps())
    programs_of(SHAPE)  # imports DeepSpeed before a fake replaces torch
    with ExitStack() as stack:
        page = Page.open(page_path(make_private_dir(bench.folder / "stage"), 0))
        stack.callback(page.close)
        page.claim(Role.DAEMON)
        listener = Listener(page)
        stack.callback(listener.close)
        stream = stack.enter_context(_compute_stream(bench))
        stage = StreamStage(
            SHAPE,
            timing,
            driver=bench.driver,
            kernels=bench.kernels,
            stream=stream,
            device=bench.device,
            spinning=receive == "spinning",
            synchronize=lambda: bench.finish(stream),
            folder=bench.folder,
        )
        stack.enter_context(stage)
        handle = attach(stage, directory=page.path.parent, local_rank=0)
        stack.callback(handle.detach)
        if not handle.enabled:
            raise RuntimeError(f"the hooks are off: {handle.fault}")
        with bench.side(way, page) as side:
            step = _window(bench, stage, listener, stream, OBSERVE_STEPS)
            if way == "trials":
                listener.plan(squeezed=True, slots=True)
                step += sum(_window(bench, stage, listener, stream, WINDOW_STEPS) for _ in range(WARM_UP_WINDOWS))
            bounds, busy_ns = [], []
            for squeezed in (False, True) * windows:
                listener.plan(squeezed=squeezed, slots=way != "naive")
                before_ns = page.words[Field.BUSY_NS]
                bounds.append((step, step := step + _window(bench, stage, listener, stream, WINDOW_STEPS)))
                busy_ns.append(page.words[Field.BUSY_NS] - before_ns)
            listener.plan(squeezed=False, slots=False)
        handle.detach()
        listener.hear_the_end()
    own = bench.kernels.stamps()[first:]
    steps = [number for begin, end in bounds[1::2] for number in range(begin + 1, end + 1)]
    squeezed_ns = sum(listener.bubble_ns[number] for number in steps)
    fill = sum(busy_ns[1::2]) / squeezed_ns if squeezed_ns else 0.0
    return {**_figures(listener, bounds, own, side, bench), "fill": fill}


def _window(bench: Bench, stage: StreamStage, listener: Listener, stream: int, steps: int) -> int:
    for _ in range(steps):
        stage.train_batch()
        listener.hear()
        time.sleep(0)
    bench.finish(stream)
    return steps


def _figures(
    listener: Listener, bounds: list[tuple[int, int]], own: list[tuple[int, int]], side: Side, bench: Bench
) -> dict[str, Any]:
    """Figures of each pair of windows: alone, then beside the side task."""
    theirs = sorted(side.stamps())
    per_step = 2 * SHAPE.micro_batches + 1
    pairs, bubble_ns, kernels, outside, resume_us, over_us = [], 0.0, 0, 0, [], []
    for alone, beside in zip(bounds[::2], bounds[1::2], strict=True):
        if not all(step in listener.steps for window in (alone, beside) for step in _inner(window)):
            continue  # a message was lost
        alone_ns, beside_ns = (
            fmean(listener.steps[step][1] - listener.steps[step][0] for step in _inner(window))
            for window in (alone, beside)
        )
        pairs.append((beside_ns, alone_ns))
        bubble_ns += sum(listener.bubble_ns[step] for step in _inner(beside))
        compute = own[beside[0] * per_step + per_step : beside[1] * per_step]
        both = [(start_ns, end_ns) for start_ns, end_ns in theirs if compute[0][0] <= start_ns <= compute[-1][1]]
        over_us += ran_over_us(both, compute)
        inside = [start_ns for start_ns, _ in both]
        kernels += len(inside)
        outside += sum(any(begin <= start_ns < end for begin, end in compute) for start_ns in inside)
        for (_, end_ns), (begin_ns, _) in pairwise(compute):
            started = next((s for s in inside if end_ns <= s < begin_ns), None)
            if started is not None and begin_ns - end_ns >= MIN_BUBBLE_NS:
                resume_us.append((started - end_ns) / 1e3)
    slowdown, interval = ratio_with_ci95(pairs) if len(pairs) > 1 else (float("nan"), [float("nan")] * 2)
    return {
        "slowdown": slowdown,
        "slowdown_ci95": interval,
        "harvest": kernels * UNIT_US[bench.device] * 1e3 / bubble_ns if bubble_ns else 0.0,
        "kernels": kernels,
        "outside": outside,
        "over_us": over_us,
        "resume_us": resume_us,
        "pairs_ns": pairs,
    }


def ran_over_us(side: list[tuple[int, int]], compute: list[tuple[int, int]]) -> list[float]:
    """For how long each kernel of the side task ran on beside the main job's, of those that began in a bubble, in µs.

    Args:
        side: (start, end) of the side task's kernels, in ns.
        compute: the same of the main job's, in order.
    """
    found = []
    begins = [begin_ns for begin_ns, _ in compute]
    for start_ns, end_ns in side:
        after = bisect_right(begins, start_ns)
        began_in_bubble = not after or compute[after - 1][1] <= start_ns
        if began_in_bubble and after < len(begins) and end_ns > begins[after]:
            found.append((end_ns - begins[after]) / 1e3)
    return found


def _inner(window: tuple[int, int]) -> range:
    """The steps of a window, counted from 1, without the first, which refills the pipeline."""
    return range(window[0] + 2, window[1] + 1)
