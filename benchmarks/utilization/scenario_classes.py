"""The classes of scenarios of `bubble_utilization`. Harvest is claimed per class, never over all classes.

Bubbles are *short* where a step has less than `SHORT_BELOW_MS` of bubble time per micro-batch. The classes follow the
bubbles, not the harvest; a test recomputes them from the raw runs.
"""

from typing import NamedTuple

from benchmarks.windows.modes import ORACLE, STEP_GRAIN

SHORT_BELOW_MS = 10.0
"""Scenarios have either at most 9.5 ms of bubble time per micro-batch, or at least 16 ms."""


class ScenarioClass(NamedTuple):
    """Scenarios about which one claim is made."""

    title: str
    scenarios: tuple[str, ...]


REAL_JOB = ScenarioClass("real job", ("real_two_ranks",))
SHORT_BUBBLES = ScenarioClass("short bubbles", ("ghost_16_0_64", "ghost_16_0_64_slow_last", "ghost_dualpipev_4_1_8"))
LONG_BUBBLES = ScenarioClass(
    "long bubbles",
    (
        *("ghost_4_0_4", "ghost_4_1_4", "ghost_4_2_4", "ghost_4_3_4", "ghost_8_3_8", "ghost_16_8_16"),
        *("ghost_4_0_4_slow_last", "ghost_4_1_4_slow_last", "ghost_4_2_4_slow_last", "ghost_4_3_4_slow_last"),
        *("ghost_8_3_8_slow_last", "ghost_16_8_16_slow_last", "ghost_dualpipev_4_1_8_slow_last"),
        *("ghost_4_1_4_jitter", "ghost_4_1_4_stall", "ghost_4_1_4_resize"),
        *("ghost_4_1_4_small_k", "ghost_4_1_4_large_k", "ghost_4_1_4_shallow", "ghost_4_1_4_deep"),
        *("ghost_4_1_4_compute_bound", "ghost_4_1_4_memory_bound"),
    ),
)
CLASSES = (REAL_JOB, LONG_BUBBLES, SHORT_BUBBLES)
GHOST_STAGES = ScenarioClass("ghost stages", (*LONG_BUBBLES.scenarios, *SHORT_BUBBLES.scenarios))
"""Both classes of ghosts together, for the main job's slowdown alone."""

REPEATS = {"ghost_16_0_64_oracle": ORACLE, "ghost_4_3_4_step_grain": STEP_GRAIN}
"""A scenario measured again beside one other mode, with no window of the idle class. It never counts twice."""
