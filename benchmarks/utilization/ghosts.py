"""The scenarios of `bubble_utilization`: the windows of their runs, and the ghost stages that are squeezed."""

from dataclasses import dataclass

from benchmarks.studies import variant_digits
from benchmarks.windows.modes import (
    ALONE,
    COOPERATIVE,
    NAIVE,
    ORACLE,
    PREEMPTIVE,
    SCHED_IDLE,
    STEP_GRAIN,
    Windows,
)

WINDOWS = Windows(
    observe=6,
    warm_up=32,
    cycle=(
        # ungated modes upset the forecasts, so the preemptive mode follows them: it needs none
        *((ALONE, 4), (PREEMPTIVE, 4), (ALONE, 3), (COOPERATIVE, 6), (ALONE, 3), (ORACLE, 6)),
        *((STEP_GRAIN, 4), (SCHED_IDLE, 3), (NAIVE, 2)),
    ),
)
REAL_WINDOWS = Windows(
    observe=6,
    warm_up=80,  # its bubbles are short
    cycle=(
        # its steps vary most, so more of them are ours
        *((ALONE, 5), *((PREEMPTIVE, 4), (ALONE, 3), (COOPERATIVE, 4), (ALONE, 3)) * 3),
        *((STEP_GRAIN, 4), (SCHED_IDLE, 4), (NAIVE, 3)),
    ),
)
REAL_CYCLES = 30
GHOST_CYCLES = 8
"""The least number, however long a step is."""
DISTURBED_WINDOWS = Windows(observe=6, warm_up=32, cycle=((PREEMPTIVE, 3), (ALONE, 2), (COOPERATIVE, 3), (ALONE, 2)))
"""Ten steps each, so that the first cycle after a disturbance is its first ten steps."""
BESIDE_WINDOWS = {
    other: Windows(
        observe=6,
        warm_up=32,
        cycle=((PREEMPTIVE, 6), (ALONE, 2), (COOPERATIVE, 6), (ALONE, 2), (other, 6), (ALONE, 2)),
    )
    for other in (ORACLE, STEP_GRAIN)
}
"""Ours beside one other mode, for close calls: more windows, and no ungated baselines that upset forecasts."""
DISTURBED_AT_CYCLE = 3
CYCLES_AFTER = 5
"""50 steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ghost:
    """A ghost stage as main job; `rows` is its micro-batch size, chosen so that a step takes well below a second."""

    stages: int
    stage: int
    micro_batches: int
    rows: int
    slow_last: float = 1.0
    jitter: float = 0.0
    stalls: bool = False
    resizes: bool = False
    dualpipev: bool = False
    beside: str | None = None
    side: str | None = None

    @property
    def name(self) -> str:
        """The scenario's name."""
        kinds = {
            "slow_last": self.slow_last != 1.0,
            "jitter": self.jitter,
            "stall": self.stalls,
            "resize": self.resizes,
            self.beside: self.beside,
            self.side: self.side,
        }
        kind = "ghost_dualpipev" if self.dualpipev else "ghost"
        shape = f"{kind}_{self.stages}_{self.stage}_{self.micro_batches}"
        return "_".join([shape, *(str(kind) for kind, chosen in kinds.items() if chosen)])

    @property
    def is_disturbed(self) -> bool:
        """Whether the run is disturbed half-way."""
        return self.stalls or self.resizes

    @property
    def windows(self) -> Windows:
        """The windows of its run."""
        if self.beside is not None:
            return BESIDE_WINDOWS[self.beside]
        return DISTURBED_WINDOWS if self.is_disturbed else WINDOWS

    @property
    def seconds(self) -> float:
        """The least time for its windows."""
        if self.beside is not None:
            return 240.0
        return 75.0 if self.side else 110.0

    def arguments(self) -> list[str]:
        """Options for `benchmarks.ghost.job`."""
        shape = ["--stages", self.stages, "--stage", self.stage, "--micro-batches", self.micro_batches]
        more = ["--micro-batch-size", self.rows, "--slow-last", self.slow_last, "--jitter", self.jitter]
        disturbed_step = self.windows.first_step(DISTURBED_AT_CYCLE) - 1  # counted from 0
        more += ["--dualpipev"] if self.dualpipev else []
        more += ["--stall-step", disturbed_step] if self.stalls else []
        more += ["--resize-step", disturbed_step] if self.resizes else []
        if self.is_disturbed:
            more += ["--steps", self.windows.first_step(DISTURBED_AT_CYCLE + 1 + CYCLES_AFTER) - 1]
        return [str(word) for word in (*shape, *more)]


SHAPES = (
    *((4, stage, 4, 512) for stage in range(4)),
    *((8, 3, 8, 256), (16, 8, 16, 128), (16, 0, 64, 48)),
)
"""(stages, stage, micro-batches, rows)."""
REAL = "real_two_ranks"


def all_ghosts() -> list[Ghost]:
    """Every ghost stage, in the order in which they are measured."""
    ghosts = [
        Ghost(stages=p, stage=k, micro_batches=m, rows=rows, slow_last=slow)
        for slow in (1.0, 1.3)
        for p, k, m, rows in SHAPES
    ]
    ghosts += [
        Ghost(stages=4, stage=1, micro_batches=8, rows=512, slow_last=slow, dualpipev=True) for slow in (1.0, 1.3)
    ]
    # the shortest bubbles, and the longest: one in each step
    for (p, k, m, rows), other in ((SHAPES[-1], ORACLE), (SHAPES[3], STEP_GRAIN)):
        ghosts.append(Ghost(stages=p, stage=k, micro_batches=m, rows=rows, beside=other))
    p, k, m, rows = SHAPES[1]
    ghosts.append(Ghost(stages=p, stage=k, micro_batches=m, rows=rows, jitter=0.2))
    ghosts.append(Ghost(stages=p, stage=k, micro_batches=m, rows=rows, stalls=True))
    ghosts.append(Ghost(stages=p, stage=k, micro_batches=m, rows=rows, resizes=True))
    ghosts += [Ghost(stages=p, stage=k, micro_batches=m, rows=rows, side=side) for side in variant_digits.VARIANTS]
    return ghosts
