"""The windows of one run: which mode has the main job's next steps.

All processes of a run derive them from the step's number alone.
"""

import json
import os
import random
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Self

ENVIRONMENT = "BENCHMARK_WINDOWS"
ALONE = "alone"
PREEMPTIVE, IDLE, COOPERATIVE = "preemptive", "idle", "cooperative"
GATED = (PREEMPTIVE, IDLE, COOPERATIVE)
"""Modes in which the daemon's side task runs; in the others it sleeps. `PREEMPTIVE` is `preemptive = "stop"`, `IDLE`
"idle", the default."""
PLACEBO, CACHE_PLACEBO = "placebo", "cache_placebo"
PLACEBOS = (PLACEBO, CACHE_PLACEBO)
"""Modes in which the side task runs as in the preemptive one, but computes nothing: see `studies/placebo_digits.py`."""
AWAKE = "awake"
"""Each core is kept awake by a process of the idle class that touches no memory: see `spinners`."""
UNHOOKED = "unhooked"
"""The engine has no hooks at all: see `benchmarks.gpu.blocks`."""
LOW_PRIORITY = "low_priority"
"""A process without a gate, at the lowest priority that its device knows: see `benchmarks.gpu.ungated`."""
NAIVE, SCHED_IDLE, STEP_GRAIN = "naive", "sched_idle", "step_grain"
NICENESS_19, LEAST_WEIGHT = "niceness_19", "least_weight"
"""Naive co-location at the least priority: of the process, or of a control group (see `control_group`)."""
FUSED = {"step_grain_8": 8, "step_grain_4": 4}
"""Step grain with fewer fused trials, so with shorter steps. More than ours would suit ours too."""
STEP_GRAINS = (STEP_GRAIN, *FUSED)
GATELESS = (SCHED_IDLE, *STEP_GRAINS, NICENESS_19, LEAST_WEIGHT)
"""Modes in which another process trains the same study without our gate, and does not share the core as an equal."""
DEDICATED = "dedicated"
"""Steps that do not count: in the first one the main job is stopped, and the dedicated rate is measured."""
_ALLOWED = (ALONE, AWAKE, DEDICATED, *PLACEBOS, UNHOOKED, LOW_PRIORITY, NAIVE, *GATED, *GATELESS)

_GATE_OF = {**{mode: mode for mode in GATED}, **dict.fromkeys((IDLE, *PLACEBOS), PREEMPTIVE)}
"""Whose plan it has."""

DEFAULTS = """
[side]
study = "{study}"
[run]
directory = "{run}"
"""
WINDOWED = (
    DEFAULTS
    + """
calibrate_s = 0.0
[squeeze]
alone_share = 0.0  # the windows decide (daemon.py)
[guard]
enabled = false
"""
)
"""Of a run in which the windows decide."""


class WindowStep(NamedTuple):
    """A step's place. `cycle` is -1 before the first cycle; `at` counts the steps of the window from 0."""

    cycle: int
    window: int
    mode: str
    at: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """The order of a run's windows: `observe` steps without a side task, `warm_up` squeezed ones, then cycles.

    In the warm-up the side task builds its trials, and the daemon learns how it overruns; where the cooperative mode is
    measured, the first half is cooperative, and all of it where no other gated mode is. `cycle` holds pairs of a mode
    and its number of steps, and repeats; if `shuffled`, each time in another order, which only the number of the cycle
    decides, and in which only a first window of the mode `dedicated` stays where it is.

    The daemon changes its plan in steps that are not gated, so between windows of two gated modes lies another one. A
    placebo is gated as the preemptive mode is.
    """

    observe: int
    warm_up: int
    cycle: tuple[tuple[str, int], ...]
    shuffled: bool = False

    def __post_init__(self) -> None:
        modes = [mode for mode, _ in self.cycle]
        unknown = set(modes) - {*_ALLOWED}
        if unknown:
            raise ValueError(f"Windows.cycle has the modes {sorted(unknown)}: allowed: {_ALLOWED}")
        gates = [_GATE_OF[mode] for mode in modes if mode in _GATE_OF]
        if self.shuffled and len({*gates}) > 1 and not (modes[0] == DEDICATED and len(gates) + 1 < len(modes)):
            raise ValueError(
                f"Windows.cycle: {modes} cannot be shuffled; allowed: one mode of {GATED}, or several after "
                f"{DEDICATED} and beside a mode that is not gated"
            )
        for mode, after in pairwise((*modes, modes[0])):
            if not self.shuffled and _needs_another_plan(mode, after):
                raise ValueError(f"Windows.cycle: {after} follows {mode}: another window must lie between them")

    @property
    def length(self) -> int:
        """The number of steps in a cycle."""
        return sum(steps for _, steps in self.cycle)

    @property
    def modes(self) -> set[str]:
        """The modes of the cycle."""
        return {mode for mode, _ in self.cycle}

    def first_step(self, cycle: int) -> int:
        """The number of the first step of `cycle`, counted from 1."""
        return self.observe + self.warm_up + cycle * self.length + 1

    def locate(self, step: int) -> WindowStep:
        """Where `step` lies, counted from 1."""
        since = step - self.first_step(0)
        if since < -self.warm_up:
            return WindowStep(-1, -1, ALONE, step - 1)
        if since < 0:
            at = since + self.warm_up
            cooperative = self.warm_up // (1 if self.modes & {*GATED} == {COOPERATIVE} else 2)
            half = cooperative if COOPERATIVE in self.modes else -1
            return WindowStep(-1, 0, COOPERATIVE if at < half else ALONE if at == half else PREEMPTIVE, at)
        cycle, at = divmod(since, self.length)
        for window, (mode, steps) in enumerate(_shuffled(self.cycle, cycle) if self.shuffled else self.cycle):
            if at < steps:
                return WindowStep(cycle, window, mode, at)
            at -= steps
        raise AssertionError("the windows of a cycle are as long as the cycle")

    def next_gated(self, step: int) -> str:
        """The mode of the first gated step from `step` on, which for placebos is the preemptive one."""
        modes = (self.locate(later).mode for later in range(step, step + 2 * self.length))
        return next(_GATE_OF[mode] for mode in modes if mode in _GATE_OF)

    def environment(self) -> dict[str, str]:
        """The environment variable that passes the windows to other processes."""
        return {ENVIRONMENT: json.dumps(asdict(self))}

    @classmethod
    def of_environment(cls) -> Self:
        """The windows that another process has passed."""
        fields = json.loads(os.environ[ENVIRONMENT])
        return cls(**{**fields, "cycle": tuple((mode, steps) for mode, steps in fields["cycle"])})


def _needs_another_plan(mode: str, after: str) -> bool:
    return mode in _GATE_OF and after in _GATE_OF and _GATE_OF[mode] != _GATE_OF[after]


@lru_cache
def _shuffled(cycle: tuple[tuple[str, int], ...], seed: int) -> list[tuple[str, int]]:
    """One of all orders in which no plan changes between two windows; each is as likely."""
    draws = random.Random(seed)
    first = [cycle[0]] if cycle[0][0] == DEDICATED else []
    while True:
        order = [*first, *draws.sample(cycle[len(first) :], len(cycle) - len(first))]
        if not any(_needs_another_plan(mode, after) for (mode, _), (after, _) in pairwise(order)):
            return order
