"""Guards the time between steps: loading, evaluation, checkpoints. Pure, like `guard`.

A side task sleeps there, but its writes, its search worker or its memory may still be in the way. Together with the
steps, which `guard` judges, this is all of the main job's time, from start to start.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from squeezer.policy.guard import LEAST_STEPS, Decision, Guard, excess_over

BETWEEN = "between "
"""Begins the cause of every decision here."""
PAUSES = f"{BETWEEN}pauses"
PAUSE_TIMES = 5.0
"""A time between steps of this many usual ones, and of half a step at least, is a pause: an evaluation or a checkpoint.
Pauses are compared with pauses."""
RECENT_STEPS = 50
RECENT_PAUSES = 16
SURE = 4.0
"""In standard errors; pauses are few, and need not be of one kind."""


class BetweenGuard:
    """The guard of one device's time between steps.

    The tests are those of `Guard`, on the time after each step in proportion to a usual step. Pauses have one of their
    own. It can only compare pauses after squeezed steps if some come after steps left alone.

    Args:
        budget: the share of a step by which the time after it may grow.
        retry_steps: see `Guard`.
    """

    def __init__(self, budget: float, retry_steps: int) -> None:
        self._budget = budget
        self._retry_steps = retry_steps
        self.forget()

    def forget(self) -> None:
        """Another job begins."""
        self._guard = Guard(self._budget, self._retry_steps, 0)
        self._steps_ns: deque[int] = deque(maxlen=RECENT_STEPS)
        self._usual_ns: deque[int] = deque(maxlen=RECENT_STEPS)
        self._pauses_ns: dict[bool, deque[float]] = {label: deque(maxlen=RECENT_PAUSES) for label in (True, False)}

    @property
    def allows(self) -> bool:
        """Whether the gate may open."""
        return self._guard.allows

    def next_began(self, step: int, duration_ns: int, between_ns: int, squeezed: bool | None) -> list[Decision]:
        """The step after `step` has begun.

        Args:
            step: the step before it.
            duration_ns: how long that took.
            between_ns: the time from its end to the next one's start.
            squeezed: see `Guard.step_ended`.
        """
        self._steps_ns.append(duration_ns)
        step_ns = median(self._steps_ns)
        usual_ns = median(self._usual_ns) if self._usual_ns else 0
        if len(self._usual_ns) >= LEAST_STEPS and between_ns > max(PAUSE_TIMES * usual_ns, step_ns / 2):
            judged = self._judge_pause(step, between_ns, squeezed)
            between_ns = round(usual_ns)  # for the other tests, as if there had been none
        else:
            self._usual_ns.append(between_ns)
            judged = []
        decisions = self._guard.step_ended(step, round(step_ns + between_ns), squeezed)
        return [*judged, *_named(decisions)]

    def _judge_pause(self, step: int, between_ns: int, squeezed: bool | None) -> list[Decision]:
        if squeezed is None:
            return []
        self._pauses_ns[squeezed].append(between_ns)
        after_squeezed, after_alone = self._pauses_ns[True], self._pauses_ns[False]
        if not squeezed or len(after_squeezed) < LEAST_STEPS:
            return []
        excess = excess_over(after_squeezed, after_alone, self._budget)
        if excess is None or excess < SURE:
            return []
        slowdown = sum(after_squeezed) / len(after_squeezed) / (sum(after_alone) / len(after_alone)) - 1
        after_squeezed.clear()  # judge by new ones when squeezing is tried again
        return self._guard.shut(step, PAUSES, {"slowdown": slowdown})


def _named(decisions: Iterable[Decision]) -> list[Decision]:
    return [
        decision if decision.cause.startswith(BETWEEN) else replace(decision, cause=f"{BETWEEN}{decision.cause}")
        for decision in decisions
    ]
