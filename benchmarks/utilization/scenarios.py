"""The scenarios of `bubble_utilization`: some have random blocks, others are run as users run them."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.shared.processes import environment, run_directories
from benchmarks.shared.reported import reported
from benchmarks.shared.results import commit
from benchmarks.studies import ENDLESS_PLACEBO_DIGITS, MANY_DIGITS
from benchmarks.utilization.ghost_run import Ghost, train, train_in_windows, write_config
from benchmarks.windows.control_group import NoLeastWeightError, least_weight_group
from benchmarks.windows.figures import collect
from benchmarks.windows.modes import (
    ALONE,
    AWAKE,
    CACHE_PLACEBO,
    COOPERATIVE,
    DEDICATED,
    DEFAULTS,
    IDLE,
    LEAST_WEIGHT,
    NICENESS_19,
    PLACEBO,
    PREEMPTIVE,
    SCHED_IDLE,
    STEP_GRAINS,
    Windows,
)

LONG, MANY, DUALPIPEV = "long", "many", "dualpipev"
GHOSTS = {
    LONG: Ghost(stages=4, stage=1, micro_batches=4, rows=256),
    MANY: Ghost(stages=8, stage=3, micro_batches=16, rows=64),
    DUALPIPEV: Ghost(stages=4, stage=1, micro_batches=8, rows=256, dualpipev=True),
}
"""Class -> its stage: long bubbles; twice as many micro-batches as stages; DualPipeV."""
BLOCK_STEPS = 5
DEDICATED_STEPS = 2  # as many as a change of plans takes
OBSERVED_STEPS, WARM_UP_STEPS = 6, 48
ARMS, NAIVE, YIELD, YIELD_COOPERATIVE = "arms", "naive", "yield", "cooperative"
MODES = {
    ARMS: (ALONE, AWAKE, PLACEBO, PREEMPTIVE, IDLE, COOPERATIVE, SCHED_IDLE, *STEP_GRAINS),
    NAIVE: (AWAKE, PREEMPTIVE, NICENESS_19, LEAST_WEIGHT),
}
SECONDS, QUICK_SECONDS = {ARMS: 240.0, NAIVE: 70.0}, {ARMS: 30.0, NAIVE: 15.0}
LEAST_ROUNDS, QUICK_LEAST_ROUNDS = 8, 2
YIELD_RUNS = 3
YIELD_STEPS, QUICK_YIELD_STEPS = 500, 200
CONFIGS = {YIELD: DEFAULTS, YIELD_COOPERATIVE: DEFAULTS + "[squeeze]\npreemptive = false\n"}


def plan(*, quick: bool) -> list[tuple[str, int]]:
    """(scenario, number of the run) of all runs; the quick ones come once each."""
    runs = range(1 if quick else YIELD_RUNS)
    found = [(f"{of}_{kind}", 0) for of in GHOSTS for kind in (ARMS, NAIVE)]
    found += [(f"{of}_{YIELD}", number) for of in GHOSTS for number in runs]
    return found + [(f"{MANY}_{YIELD_COOPERATIVE}", number) for number in runs]


def measure(scenario: str, *, quick: bool) -> dict[str, Any]:
    """One run of one scenario: its windows, or what its report says."""
    of, kind = scenario.split("_")
    if kind in CONFIGS:
        return {"commit": commit(), **_reported(GHOSTS[of], kind, QUICK_YIELD_STEPS if quick else YIELD_STEPS)}
    modes = (*MODES[kind], CACHE_PLACEBO) if scenario == f"{LONG}_{ARMS}" else MODES[kind]
    least = (QUICK_SECONDS[kind], QUICK_LEAST_ROUNDS) if quick else (SECONDS[kind], LEAST_ROUNDS)
    return {"commit": commit(), **_in_blocks(scenario, GHOSTS[of], modes, *least)}


def _in_blocks(scenario: str, ghost: Ghost, modes: Sequence[str], seconds: float, rounds: int) -> dict[str, Any]:
    with ExitStack() as ends:
        missing: dict[str, str] = {}
        group = None
        if LEAST_WEIGHT in modes:
            try:
                group = ends.enter_context(least_weight_group())
            except NoLeastWeightError as error:
                missing[LEAST_WEIGHT] = str(error)
                print(f"*** {scenario}: {LEAST_WEIGHT} is NOT MEASURED: {error}", file=sys.stderr, flush=True)
        windows = Windows(
            observe=OBSERVED_STEPS,
            warm_up=WARM_UP_STEPS,
            cycle=((DEDICATED, DEDICATED_STEPS), *((mode, BLOCK_STEPS) for mode in modes if mode not in missing)),
            shuffled=True,
        )
        run, pages = ends.enter_context(run_directories())
        study = ENDLESS_PLACEBO_DIGITS
        ranks = train_in_windows(
            ghost, windows, run, pages, study=study, seconds=seconds, cycles=rounds, least_weight=group
        )
        found = [window.raw() for window in collect(windows, ranks) if window.mode != DEDICATED]
        return {"not_measured": missing, "windows": found}


def _reported(ghost: Ghost, kind: str, steps: int) -> dict[str, Any]:
    with run_directories() as (run, pages):
        config = write_config(CONFIGS[kind], run, MANY_DIGITS)
        train([*ghost.arguments(), "--steps", str(steps)], config, environment(pages))
        return reported(run)
