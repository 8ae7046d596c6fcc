"""A discrete-event model of a pipeline's stages, one of which may be real.

Every stage walks its own program on its own clock. A ghost stage advances lazily until it needs a message that the true
stage has not sent yet. The true stage reports its actual send times and asks when its next message arrives, so a delay
in the true stage comes back through the same dependencies as in a real pipeline.

There is no clock and no I/O here. All times are integers in nanoseconds on one axis, which the caller chooses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.ghost_program import GhostModelError, Op


class Stall(NamedTuple):
    """The first compute of `stage` in `step` takes so much longer."""

    stage: int
    step: int
    length_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long a stage's work takes. `stage_ratios` has one factor for each stage, or is empty (all 1.0)."""

    forward_ns: int
    backward_ns: int
    optimizer_ns: int = 0
    latency_ns: int = 0
    stage_ratios: tuple[float, ...] = ()
    jitter: float = 0.0  # every compute is scaled by a factor drawn from 1 - jitter .. 1 + jitter
    jitter_step: int = 0  # from this step on
    steady_stage: int = -1  # the true one: as a ghost in a replay it does not jitter
    seed: int = 0
    stall: Stall | None = None

    def compute_ns(self, stage: int, what: str) -> float:
        """Mean duration of one compute op on `stage`."""
        base_ns = {"forward": self.forward_ns, "backward": self.backward_ns, "optimizer": self.optimizer_ns}[what]
        return base_ns * (self.stage_ratios[stage] if self.stage_ratios else 1.0)


@dataclass(frozen=True, slots=True)
class Wait:
    """One receive or sync: begun at `start_ns`, its message was there at `arrival_ns`, it returned at `end_ns`."""

    step: int
    slot: int
    what: str
    micro_batch: int
    start_ns: int
    arrival_ns: int
    end_ns: int

    @property
    def idle_ns(self) -> int:
        """Time in which the stage had nothing to compute; 0 if the message was there first."""
        return max(0, self.end_ns - self.start_ns) if self.arrival_ns > self.start_ns else 0


class _Message(NamedTuple):
    step: int
    what: str
    micro_batch: int
    source: int


@dataclass(slots=True)
class _Walker:
    stage: int
    program: Sequence[Op]
    rng: random.Random
    now_ns: int
    cursor: int = 0
    step: int = 0
    waits: list[Wait] = field(default_factory=list)
    step_ends_ns: list[int] = field(default_factory=list)


class PipelineModel:
    """All stages but the true one, advancing as far as what the true one has sent allows.

    Args:
        programs: one program for each stage, in order.
        timing: durations of the ghosts' work.
        true_stage: the stage whose sends come in through `sent`; None for a replay of all stages as ghosts.
        start_ns: when every stage begins step 0.
        steps: ghosts stop after this many steps; None for no limit, which needs a true stage to block on.
        keep_history: collect waits and step ends for `replay`; a long live run leaves it off.
    """

    def __init__(
        self,
        programs: Sequence[Sequence[Op]],
        timing: Timing,
        *,
        true_stage: int | None = None,
        start_ns: int = 0,
        steps: int | None = None,
        keep_history: bool = False,
    ) -> None:
        if true_stage is None and steps is None:
            raise ValueError("without a true stage nothing ever blocks: give a number of steps")
        self._timing = timing
        self._last_stage = len(programs) - 1
        self._true_stage = true_stage
        self._steps = steps
        self._keep_history = keep_history
        self._sent_ns: dict[_Message, int] = {}
        self._oldest_step = 0
        self.walkers = [
            _Walker(stage, program, random.Random(f"{timing.seed}/{stage}"), start_ns)
            for stage, program in enumerate(programs)
            if stage != true_stage
        ]

    def sent(self, step: int, op: Op, at_ns: int) -> None:
        """The true stage has sent the message of `op`, or come to its sync, at `at_ns`. Sends return at once."""
        assert self._true_stage is not None
        self._sent_ns[_Message(step, op.what, op.micro_batch, self._true_stage)] = at_ns

    def arrival_ns(self, step: int, op: Op) -> int:
        """When what the true stage's receive or sync `op` waits for is there.

        Raises:
            GhostModelError: if the ghosts cannot send it before the true stage sends something first.
        """
        assert self._true_stage is not None
        self.advance()
        arrival_ns = self._arrival_ns(self._true_stage, step, op)
        if arrival_ns is None:
            ghosts = ", ".join(f"stage {w.stage} at step {w.step} {w.program[w.cursor]}" for w in self.walkers)
            own = f"stage {self._true_stage} at step {step} {op}"
            raise GhostModelError(f"{own} and its ghosts wait for each other: {ghosts}")
        self._forget_before(step - 1)
        return arrival_ns

    def advance(self) -> None:
        """Move every ghost as far as it can go."""
        moved = True
        while moved:
            moved = any(self._walk(walker) for walker in self.walkers)

    def _walk(self, walker: _Walker) -> bool:
        moved = False
        while self._steps is None or walker.step < self._steps:
            op = walker.program[walker.cursor]
            if op.verb in ("recv", "sync"):
                if op.verb == "sync":
                    self._sent_ns[_Message(walker.step, op.what, op.micro_batch, walker.stage)] = walker.now_ns
                arrival_ns = self._arrival_ns(walker.stage, walker.step, op)
                if arrival_ns is None:
                    break
                self._receive(walker, op, arrival_ns)
            elif op.verb == "send":
                self._sent_ns[_Message(walker.step, op.what, op.micro_batch, walker.stage)] = walker.now_ns
            else:
                walker.now_ns += self._duration_ns(walker, op)
            moved = True
            walker.cursor += 1
            if walker.cursor == len(walker.program):
                walker.cursor = 0
                walker.step += 1
                if self._keep_history:
                    walker.step_ends_ns.append(walker.now_ns)
        return moved

    def _receive(self, walker: _Walker, op: Op, arrival_ns: int) -> None:
        start_ns, walker.now_ns = walker.now_ns, max(walker.now_ns, arrival_ns)
        if self._keep_history:
            wait = Wait(walker.step, op.slot, op.what, op.micro_batch, start_ns, arrival_ns, walker.now_ns)
            walker.waits.append(wait)

    def _duration_ns(self, walker: _Walker, op: Op) -> int:
        timing = self._timing
        mean_ns = timing.compute_ns(walker.stage, op.what)
        jitters = walker.step >= timing.jitter_step and walker.stage != timing.steady_stage
        jitter = timing.jitter if jitters else 0.0
        duration_ns = round(mean_ns * walker.rng.uniform(1 - jitter, 1 + jitter)) if jitter else round(mean_ns)
        stall = timing.stall
        if stall is not None and (walker.stage, walker.step, op.what, op.micro_batch) == (*stall[:2], "forward", 0):
            duration_ns += stall.length_ns
        return duration_ns

    def _arrival_ns(self, stage: int, step: int, op: Op) -> int | None:
        if op.verb == "sync":
            sources = [source for source in range(self._last_stage + 1) if source != stage]
        else:
            sources = [op.peer]
        sent_ns = [self._sent_ns.get(_Message(step, op.what, op.micro_batch, source)) for source in sources]
        known_ns = [at_ns for at_ns in sent_ns if at_ns is not None]
        return max(known_ns) + self._timing.latency_ns if len(known_ns) == len(sources) else None

    def _forget_before(self, step: int) -> None:
        # Once the true stage waits in step s, every ghost has left step s - 2: its messages are of no use to anyone.
        if step > self._oldest_step:
            self._sent_ns = {message: at for message, at in self._sent_ns.items() if message.step >= step}
            self._oldest_step = step


@dataclass(frozen=True, slots=True)
class StageTrace:
    """What one stage did in a replay: its receives, and the time at which each of its steps ended."""

    waits: tuple[Wait, ...]
    step_ends_ns: tuple[int, ...]


def replay(programs: Sequence[Sequence[Op]], timing: Timing, *, steps: int = 1) -> list[StageTrace]:
    """Run all stages as ghosts from time 0, and return one trace for each stage."""
    model = PipelineModel(programs, timing, steps=steps, keep_history=True)
    model.advance()
    return [StageTrace(tuple(w.waits), tuple(w.step_ends_ns)) for w in model.walkers]


def isolated_bubbles_ns(programs: Sequence[Sequence[Op]], timing: Timing, stage: int) -> tuple[int, ...]:
    """Bubbles of `stage` in one step on its own, in order; the last is the wait until the slowest stage is done."""
    traces = replay(programs, timing)
    own_end_ns = traces[stage].step_ends_ns[0]
    bubbles_ns = [wait.idle_ns for wait in traces[stage].waits]
    bubbles_ns.append(max(trace.step_ends_ns[0] for trace in traces) - own_end_ns)
    return tuple(bubble_ns for bubble_ns in bubbles_ns if bubble_ns)


def steady_bubble_ratio(programs: Sequence[Sequence[Op]], timing: Timing, stage: int, *, steps: int = 8) -> float:
    """Share of `stage`'s time that is bubble, over `steps` steps after the pipeline has settled (2 steps)."""
    trace = replay(programs, timing, steps=steps + 2)[stage]
    idle_ns = sum(wait.idle_ns for wait in trace.waits if wait.step >= 2)
    return idle_ns / (trace.step_ends_ns[-1] - trace.step_ends_ns[1])
