"""A discrete-event model of a pipeline's stages, one of which may be real.

Every stage walks its own program on its own clock. A ghost stage advances lazily until it needs a message that the true
stage has not sent yet. The true stage reports its actual send times and asks when its next message arrives, so a delay
in the true stage comes back through the same dependencies as in a real pipeline.

By default a send returns at once. Where stages *meet*, as under gloo, it blocks until the message is taken.

There is no clock and no I/O here. All times are integers in nanoseconds on one axis, which the caller chooses.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.ghost.program import GhostModelError, Op, meeting
from benchmarks.ghost.recording import Recording


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Durations of a stage's work. `stage_ratios` has one factor per stage, or is empty (all 1.0).

    Where `recorded` is not empty, it has what all stages did in a real job instead.
    """

    forward_ns: int
    backward_ns: int
    optimizer_ns: int = 0
    latency_ns: int = 0
    stage_ratios: tuple[float, ...] = ()
    recorded: tuple[Recording, ...] = ()
    meets: bool = False
    """Both ends of a message, and all stages in the norm and the loss, go on together, `latency_ns` after the last of
    them has come; else `latency_ns` is the message's flight, and only receivers wait."""
    jitter: float = 0.0  # every compute is scaled by a factor drawn from 1 - jitter .. 1 + jitter
    steady_stage: int = -1  # the true one: as a ghost in a replay it does not jitter
    seed: int = 0

    def compute_ns(self, stage: int, what: str) -> float:
        """Mean duration of one compute op on `stage`."""
        base_ns = {"forward": self.forward_ns, "backward": self.backward_ns, "optimizer": self.optimizer_ns}[what]
        return base_ns * (self.stage_ratios[stage] if self.stage_ratios else 1.0)


@dataclass(frozen=True, slots=True)
class Wait:
    """One receive, sync, or send that waits for its receiver.

    It began at `start_ns`, its message was there at `arrival_ns`, and it returned at `end_ns`.
    """

    step: int
    slot: int
    what: str
    micro_batch: int
    start_ns: int
    arrival_ns: int
    end_ns: int

    @property
    def idle_ns(self) -> int:
        """Time without anything to compute; 0 if the message was there first."""
        return max(0, self.end_ns - self.start_ns) if self.arrival_ns > self.start_ns else 0


class _Work(NamedTuple):
    """An op in the form in which a program is walked fastest: the walk takes the true stage's time.

    Attributes:
        op: the op itself.
        duration_ns: its compute time if that is constant; -1: none, or a varying one.
        message: the number of the message it sends; -1: none.
        sources: the numbers of the messages it waits for.
        place: the number of this message in the step, or of the next one.
    """

    op: Op
    duration_ns: int
    message: int
    sources: tuple[int, ...]
    place: int


class Meeting(NamedTuple):
    """A message of the true stage: all that it waits for is under way from `together_ns`, and there at `end_ns`."""

    together_ns: int
    end_ns: int


@dataclass(slots=True)
class _Walker:
    stage: int
    program: Sequence[_Work]
    rng: random.Random
    now_ns: int
    cursor: int = 0
    step: int = 0
    waits: list[Wait] = field(default_factory=list)
    step_ends_ns: list[int] = field(default_factory=list)


class PipelineModel:
    """All stages but the true one. They advance as far as the true one's messages allow.

    Args:
        programs: one program for each stage, in order.
        timing: durations of the ghosts' work.
        true_stage: the stage whose sends come in through `sent`; None for a replay of all stages as ghosts.
        start_ns: when every stage begins step 0.
        steps: ghosts stop after this many steps; None for no limit, which needs a true stage to block on.
        keep_history: collect waits and step ends for `replay`; a long live run leaves it off.

    Attributes:
        pace: how many times as long as recorded the ghosts take.
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
        self.pace = 1.0
        self._messages: dict[tuple[str, int, int, int], int] = {}
        """(its meeting, source) -> its number, the same in each step."""
        self._sent_ns: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """Step -> message -> when."""
        self._waiting: dict[tuple[int, int], list[_Walker]] = {}
        """(step, message) -> what can continue once that is sent."""
        self._oldest_step = 0
        self.walkers = [
            _Walker(stage, self._compiled(stage, program), random.Random(f"{timing.seed}/{stage}"), start_ns)
            for stage, program in enumerate(programs)
            if stage != true_stage
        ]
        self._ready = list(self.walkers)
        own = [] if true_stage is None else [op for op in programs[true_stage] if op.verb != "compute"]
        self._places = {op: place for place, op in enumerate(own)}

    def sent(self, step: int, op: Op, at_ns: int) -> None:
        """Record when the true stage sent the message of `op`, or reached its sync."""
        assert self._true_stage is not None
        self._send(step, self._message(op, self._true_stage, self._true_stage), at_ns)

    def meets(self, step: int, op: Op, at_ns: int) -> Meeting:
        """The true stage has come to the message `op` at `at_ns`: until when it stays there."""
        if op.verb != "recv" or self._timing.meets:
            self.sent(step, op, at_ns)
        if op.verb == "send" and not self._timing.meets:
            return Meeting(at_ns, at_ns)
        end_ns = self.arrival_ns(step, op)
        return Meeting(end_ns - self._own_transfer_ns(op), end_ns)

    def arrival_ns(self, step: int, op: Op) -> int:
        """When the message arrives that the true stage's receive or sync `op` waits for.

        Raises:
            GhostModelError: if the ghosts cannot send it before the true stage sends something first.
        """
        assert self._true_stage is not None
        sent_ns, sources = self._sent_ns[step], self._sources(op, self._true_stage)
        if any(source not in sent_ns for source in sources):
            self.advance()
        if any(source not in sent_ns for source in sources):
            ghosts = ", ".join(f"stage {w.stage} at step {w.step} {w.program[w.cursor].op}" for w in self.walkers)
            own = f"stage {self._true_stage} at step {step} {op}"
            raise GhostModelError(f"{own} and its ghosts wait for each other: {ghosts}")
        self._forget_before(step - 1)
        return max(sent_ns[source] for source in sources) + self._own_transfer_ns(op)

    def advance(self) -> None:
        """Move every ghost as far as it can go."""
        while self._ready:
            self._walk(self._ready.pop())

    def _walk(self, walker: _Walker) -> None:
        program = walker.program
        sent_ns = self._sent_ns[walker.step]
        while self._steps is None or walker.step < self._steps:
            op, duration_ns, message, sources, place = program[walker.cursor]
            if duration_ns >= 0:
                walker.now_ns += duration_ns
            elif message < 0 and not sources:
                walker.now_ns += self._duration_ns(walker, op, place)
            else:
                if message >= 0:
                    self._send(walker.step, message, walker.now_ns)
                transfer_ns = self._transfer_ns(walker, place) if sources else 0
                arrival_ns = 0
                for source in sources:
                    at_ns = sent_ns.get(source)
                    if at_ns is None:
                        self._waiting.setdefault((walker.step, source), []).append(walker)
                        return
                    arrival_ns = max(arrival_ns, at_ns + transfer_ns)
                if sources:
                    self._receive(walker, op, arrival_ns)
            walker.cursor += 1
            if walker.cursor == len(program):
                walker.cursor = 0
                walker.step += 1
                sent_ns = self._sent_ns[walker.step]
                if self._keep_history:
                    walker.step_ends_ns.append(walker.now_ns)

    def _send(self, step: int, message: int, at_ns: int) -> None:
        self._sent_ns[step][message] = at_ns
        walkers = self._waiting.pop((step, message), None)
        if walkers is not None:
            self._ready += walkers

    def _receive(self, walker: _Walker, op: Op, arrival_ns: int) -> None:
        start_ns, walker.now_ns = walker.now_ns, max(walker.now_ns, arrival_ns)
        if self._keep_history:
            wait = Wait(walker.step, op.slot, op.what, op.micro_batch, start_ns, arrival_ns, walker.now_ns)
            walker.waits.append(wait)

    def _transfer_ns(self, walker: _Walker, place: int) -> int:
        timing = self._timing
        if not timing.recorded:
            return timing.latency_ns
        return round(timing.recorded[walker.stage].of_step(walker.step).transfers_ns[place] * self.pace)

    def _own_transfer_ns(self, op: Op) -> int:
        if not self._timing.recorded:
            return self._timing.latency_ns
        assert self._true_stage is not None
        return round(self._timing.recorded[self._true_stage].shortest_ns[self._places[op]] * self.pace)

    def _duration_ns(self, walker: _Walker, op: Op, place: int) -> int:
        timing = self._timing
        if timing.recorded:
            return round(timing.recorded[walker.stage].of_step(walker.step).segments_ns[place] * self.pace)
        mean_ns = timing.compute_ns(walker.stage, op.what)
        jitter = timing.jitter if walker.stage != timing.steady_stage else 0.0
        return round(mean_ns * walker.rng.uniform(1 - jitter, 1 + jitter)) if jitter else round(mean_ns)

    def _compiled(self, stage: int, program: Sequence[Op]) -> list[_Work]:
        timing, compiled, place = self._timing, list[_Work](), 0
        varies = timing.jitter and stage != timing.steady_stage
        for op in program:
            if op.verb == "compute":
                if not timing.recorded:  # else it is part of what stands before the next message
                    duration_ns = -1 if varies else round(timing.compute_ns(stage, op.what))
                    compiled.append(_Work(op, duration_ns, -1, (), place))
                continue
            if timing.recorded:
                compiled.append(_Work(Op(op.slot, "compute", "segment", 0), -1, -1, (), place))
            speaks = op.verb != "recv" or timing.meets
            message = self._message(op, stage, stage) if speaks else -1
            compiled.append(_Work(op, -1, message, self._sources(op, stage), place))
            place += 1
        return compiled

    def _message(self, op: Op, stage: int, source: int) -> int:
        return self._messages.setdefault((*meeting(op, stage), source), len(self._messages))

    def _sources(self, op: Op, stage: int) -> tuple[int, ...]:
        everyone = range(self._last_stage + 1)
        if self._timing.meets:
            sources = list(everyone) if op.is_for_all else [stage, op.peer]
        elif op.verb == "sync":
            sources = [source for source in everyone if source != stage]
        else:
            sources = [op.peer] if op.verb == "recv" else []
        return tuple(self._message(op, stage, source) for source in sources)

    def _forget_before(self, step: int) -> None:
        # Once the true stage waits in step s, every ghost has left step s - 2, so nobody needs its messages.
        while self._oldest_step < step:
            self._sent_ns.pop(self._oldest_step, None)
            self._oldest_step += 1


@dataclass(frozen=True, slots=True)
class StageTrace:
    """One stage in a replay: its receives, and when each of its steps ended."""

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
