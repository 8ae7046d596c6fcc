"""How well the guard tells a slowdown from noise: `python -m benchmarks.guard_power`.

Simulated: step times with a known slowdown of squeezed steps go through the daemon's own state machine, with its
defaults. Per kind of disturbance, noise of a step and true slowdown, over seeds:

- *squeezed*: the share of steps that were squeezed, of at most 90%;
- *lost*: how much of that the guard took (only meaningful at 0%, where each shut gate is a false alarm);
- *shut_after*: the steps until the gate was first shut, as quartiles; null: not within the run;
- *cost*: the slowdown of the whole run, its first steps included.

Held-out disturbances were written down when the guard was finished. After them it was changed for known ones: when the
draw becomes dense, to keep the losses of `lengths` and `two_lengths` below 5%; how few comparisons may decide, for the
cost of 40% on `two_ranks`; how many comparisons that are far out decide nothing, for the false alarms of `two_lengths`;
blocks have three steps, of which the first does not count, since on real jobs it still feels what was before; and, so
that fewer steps are left alone, how a dense draw looks, how often it is halved, and that longer squeezed steps make it
dense, the latter for `late`.
"""

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.shared.results import commit, parse
from squeezer.config import GuardTable, SqueezeTable
from squeezer.policy.actions import Note
from squeezer.policy.events import JobAttached, Side, SideChanged, StepEnded, StepStarted
from squeezer.policy.state import GateMachine

Noise = NDArray[np.float64]
"""One log factor per step."""
Make = Callable[[np.random.Generator, int, float], Noise]

NAME = "guard_power"
STEPS, SEEDS, QUICK_SEEDS = 3000, 10, 3
STEP_NS = 200_000_000
SLOWDOWNS = (0.0, 0.01, 0.02, 0.04, 0.4)
DEVIATIONS = (0.01, 0.03, 0.1)
MOST_SQUEEZED = 0.9
LATE_STEP = 100


def white(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """Independent normal noise."""
    return random.normal(0, deviation, steps)


def heavy(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """Student's t with 3 degrees of freedom."""
    return np.multiply(random.standard_t(3, steps), deviation / math.sqrt(3))


def bursts(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """Now and then 2 to 30 steps are 10 to 40% longer."""
    noise, at = white(random, steps, deviation), 0
    while at < steps:
        at += int(random.exponential(150))
        length = int(random.integers(2, 31))
        noise[at : at + length] += random.uniform(0.1, 0.4)
        at += length
    return noise


def thermal(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """The machine becomes 15% slower in its first 300 steps, and then drifts."""
    drift = 0.15 * (1 - np.exp(-np.arange(steps) / 100)) + np.cumsum(random.normal(0, deviation / 20, steps))
    return white(random, steps, deviation) + drift


def autocorrelated(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """Each step is like the one before: an autoregression by 0.9."""
    noise = white(random, steps, deviation)
    for step in range(1, steps):
        noise[step] = 0.9 * noise[step - 1] + math.sqrt(1 - 0.81) * noise[step]
    return noise


def every_other(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """Odd steps are twice as long as even ones."""
    return white(random, steps, deviation) + math.log(2) * (np.arange(steps) % 2).astype(np.float64)


def periodic(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """Every 20th step, as long as a round of the draw, takes three times as long."""
    return white(random, steps, deviation) + np.where(np.arange(steps) % 20 == 0, math.log(3), 0.0)


def lengths(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """Sequences of varying length: a step takes 0.7 to 1.3 times its usual time."""
    return white(random, steps, deviation) + np.log(random.uniform(0.7, 1.3, steps))


def two_lengths(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """One step in five, at random, takes 5 to 8 times as long, such as by an evaluation."""
    long = np.log(random.uniform(5, 8, steps))
    return white(random, steps, deviation) + np.where(random.uniform(size=steps) < 0.2, long, 0.0)


def grows(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """From its middle on, the job's steps take ten times as long."""
    return white(random, steps, deviation) + np.where(np.arange(steps) > steps / 2, math.log(10), 0.0)


KINDS: dict[str, Make] = {
    make.__name__: make
    for make in (white, heavy, bursts, thermal, autocorrelated, every_other, periodic, lengths, two_lengths, grows)
}
"""Known while the guard was made."""


def neighbour(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """Another job slows the machine by 8% for 30 steps, and rests for 30, in turn."""
    return white(random, steps, deviation) + np.where(np.arange(steps) % 60 < 30, 0.08, 0.0)


def two_speeds(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """The machine changes between two speeds, 25% apart, after 10 steps on average."""
    speed = np.cumsum(random.uniform(size=steps) < 0.1) % 2
    return white(random, steps, deviation) + np.where(speed > 0, math.log(1.25), 0.0)


def skewed(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """Steps have a shortest time, and exponential delays on top."""
    return random.exponential(deviation, steps)


def every_seventh(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """Every 7th step is half as long again."""
    return white(random, steps, deviation) + np.where(np.arange(steps) % 7 == 0, math.log(1.5), 0.0)


def curriculum(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """Sequences grow every 100 steps, up to threefold."""
    return white(random, steps, deviation) + np.log(1 + 2 * np.floor(np.arange(steps) / 100) * 100 / steps)


def stalls(random: np.random.Generator, steps: int, deviation: float) -> Noise:
    """One step in a hundred takes 5 to 50 times as long."""
    long = np.log(random.uniform(5, 50, steps))
    return white(random, steps, deviation) + np.where(random.uniform(size=steps) < 0.01, long, 0.0)


HELD_OUT: dict[str, Make] = {
    make.__name__: make for make in (neighbour, two_speeds, skewed, every_seventh, curriculum, stalls)
}
"""Written down when the guard was finished."""
TWO_RANKS = "two_ranks"
"""White noise. Two ranks are each slowed by squeezing, and the step is as long as the slower one's. The second rank's
side task is ready 100 steps later."""
LATE = "late"
"""White noise. The slowdown begins in the middle, when the guard has long been sure that there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One simulated run.

    Attributes:
        squeezed: the share of squeezed steps.
        cost: the slowdown of the whole run.
        shut_at: the step after which the gate was first shut since the slowdown began; None: never.
        shut: how often.
    """

    squeezed: float
    cost: float
    shut_at: int | None
    shut: int


def simulate(
    noise: Noise, slowdown: float, seed: int, *, begins: int = 0, ranks: int = 1, squeeze: SqueezeTable | None = None
) -> Outcome:
    """One run of a job whose steps after `begins` are longer by `slowdown` where any rank squeezes them."""
    machines = [GateMachine((squeeze or SqueezeTable()).policy(GuardTable())) for _ in range(ranks)]
    for machine in machines:
        machine.handle(JobAttached(0, seed))
    machines[0].handle(SideChanged(Side.READY))
    squeezed, lost_ns, shut = 0, 0.0, []
    times_ns = STEP_NS * np.exp(noise)
    for step, own_ns in enumerate(times_ns.tolist(), start=1):
        if step == LATE_STEP:
            for machine in machines[1:]:
                machine.handle(SideChanged(Side.READY))
        for machine in machines:
            machine.handle(StepStarted(step))
        harm_ns = own_ns * slowdown if step > begins and any(machine.squeezed for machine in machines) else 0.0
        squeezed += bool(machines[0].squeezed)
        lost_ns += harm_ns
        for machine in machines:
            for action in machine.handle(StepEnded(step, round(own_ns + harm_ns))):
                if machine is machines[0] and isinstance(action, Note) and action.decision.what == "shut":
                    shut.append(step)
    late = [step - begins for step in shut if step > begins]
    return Outcome(
        squeezed=squeezed / len(noise),
        cost=lost_ns / float(times_ns.sum()),
        shut_at=late[0] if late else None,
        shut=len(shut),
    )


def cells(seeds: int, only: str | None = None) -> Iterator[dict[str, Any]]:
    """The table's cells, one after another: of all kinds of disturbance, or of one."""
    for kind, make in {**KINDS, TWO_RANKS: white, LATE: white, **HELD_OUT}.items():
        if only not in (None, kind):
            continue
        ranks, begins = 2 if kind == TWO_RANKS else 1, STEPS // 2 if kind == LATE else 0
        for deviation, slowdown in product(DEVIATIONS, SLOWDOWNS):
            outcomes = [
                simulate(
                    make(np.random.default_rng(seed), STEPS, deviation), slowdown, seed, begins=begins, ranks=ranks
                )
                for seed in range(seeds)
            ]
            yield {"kind": kind, "held_out": kind in HELD_OUT, "deviation": deviation, **_cell(slowdown, outcomes)}


def _cell(slowdown: float, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    after = sorted(math.inf if each.shut_at is None else each.shut_at for each in outcomes)
    squeezed = statistics.fmean(each.squeezed for each in outcomes)
    return {
        "slowdown": slowdown,
        "runs": len(outcomes),
        "squeezed": round(squeezed, 4),
        "squeezed_lowest": round(min(each.squeezed for each in outcomes), 4),
        "lost": round(1 - squeezed / MOST_SQUEEZED, 4),
        "shut_after": [_finite(after[(len(after) - 1) * quarter // 4]) for quarter in (1, 2, 3)],
        "shut": sum(each.shut for each in outcomes),
        "cost": round(statistics.fmean(each.cost for each in outcomes), 5),
    }


def _finite(step: float) -> int | None:
    return None if math.isinf(step) else int(step)


def row(cell: dict[str, Any]) -> str:
    """A cell as one printed line."""
    low, middle, high = ("never" if each is None else str(each) for each in cell["shut_after"])
    return (
        f"{cell['kind']:<16}{cell['deviation']:>6.0%}{cell['slowdown']:>6.0%}   squeezed {cell['squeezed']:>6.1%} "
        f"(lowest {cell['squeezed_lowest']:>6.1%})   shut after {middle:>5} ({low} to {high})   cost {cell['cost']:.2%}"
    )


def main() -> None:
    """Simulate, print, write."""
    options = parse(NAME, __doc__ or "")
    kept = json.loads(options.json.read_text(encoding="utf-8")) if options.json and options.json.exists() else {}
    found = [cell for cell in kept.get("cells", []) if options.only and cell["kind"] != options.only]
    for cell in cells(QUICK_SEEDS if options.quick else SEEDS, options.only):
        found.append(cell)
        print(row(cell), flush=True)
    if options.json:
        kept |= {"name": NAME, "commit": commit(), "quick": options.quick, "steps": STEPS, "cells": found}
        text = json.dumps(kept, indent=1)
        text = re.sub(r"\n( {3,}|  (?=\}))", " ", text)  # a cell on one line
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
