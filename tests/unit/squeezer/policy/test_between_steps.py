"""Harm between steps is seen: to loading, evaluation and checkpoints."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from squeezer.config import GuardTable, SqueezeTable
from squeezer.policy.actions import Note
from squeezer.policy.between_steps import PAUSES
from squeezer.policy.events import JobAttached, Side, SideChanged, StepEnded, StepStarted
from squeezer.policy.guard import Decision
from squeezer.policy.state import GateMachine
from squeezer.reports.why import sentence

MS = 1_000_000
STEP_MS = 200.0
Between = Callable[[int, bool], float]
"""A step's number and whether it was squeezed, to the ms until the next one."""


@dataclass
class Job:
    """A job whose steps are never slowed, in the daemon's own machine."""

    alone_steps: int = 5
    noise: random.Random = field(default_factory=lambda: random.Random(3))
    decisions: list[Decision] = field(default_factory=list)
    squeezed: list[bool | None] = field(default_factory=list)

    def run(self, steps: int, between_ms: Between) -> None:
        table = SqueezeTable(squeezed_steps=20, alone_steps=self.alone_steps)
        machine = GateMachine(table.policy(GuardTable()))
        machine.handle(JobAttached())
        machine.handle(SideChanged(Side.READY))
        since_ns = None
        for step in range(1, steps + 1):
            actions = machine.handle(StepStarted(step, since_ns))
            squeezed = machine.squeezed
            actions += machine.handle(StepEnded(step, round(STEP_MS * MS * self.noise.gauss(1, 0.01))))
            machine.validate()
            self.squeezed.append(squeezed)
            self.decisions += [action.decision for action in actions if isinstance(action, Note)]
            since_ns = round(between_ms(step, bool(squeezed)) * MS)

    def shut(self) -> list[str]:
        return [decision.cause for decision in self.decisions if decision.what == "shut"]

    def share(self) -> float:
        return sum(squeezed is True for squeezed in self.squeezed) / len(self.squeezed)


def loading(harm_ms: float = 0.0, usual_ms: float = 20.0) -> Between:
    noise = random.Random(1)
    return lambda _, squeezed: (usual_ms + harm_ms * squeezed) * noise.gauss(1, 0.1)


def with_checkpoints(usual: Between, every: int, slower: float = 1.0) -> Between:
    noise = random.Random(2)

    def between_ms(step: int, squeezed: bool) -> float:
        saving = 5000.0 * (slower if squeezed else 1.0) * noise.gauss(1, 0.03) if step % every == 0 else 0.0
        return usual(step, squeezed) + saving

    return between_ms


def test_a_job_that_loads_evaluates_and_saves_unharmed_is_squeezed_on() -> None:
    job = Job()
    job.run(3000, with_checkpoints(loading(), 50))
    assert len(job.shut()) <= 1 and job.share() > 0.7, "80% is all that there is"


def test_harm_to_loading_shuts_the_gate_though_no_step_is_longer() -> None:
    job = Job()
    job.run(1500, loading(harm_ms=20.0))
    causes = job.shut()
    assert causes and all(cause.startswith("between ") for cause in causes)
    assert job.share() < 0.3
    assert all("time between steps: " in sentence(vars_of(decision)) for decision in job.decisions if decision.cause)


def test_harm_to_checkpoints_shuts_the_gate() -> None:
    job = Job()
    job.run(3000, with_checkpoints(loading(), 7, slower=1.3))
    assert PAUSES in job.shut()
    unharmed = Job()
    unharmed.run(3000, with_checkpoints(loading(), 7))
    assert PAUSES not in unharmed.shut() and unharmed.share() > 0.7


@pytest.mark.parametrize("between_ms", [0.0, 1e-6, 100.0])
def test_times_that_never_change_prove_nothing(between_ms: float) -> None:
    job = Job()
    job.run(500, lambda *_: between_ms)
    assert job.shut() == []


def test_a_disabled_guard_judges_nothing_between_steps_either() -> None:
    machine = GateMachine(SqueezeTable().policy(GuardTable(enabled=False)))
    machine.handle(JobAttached())
    machine.handle(SideChanged(Side.READY))
    for step in range(1, 400):
        harm_ms = 500 if machine.squeezed else 20
        actions = machine.handle(StepStarted(step, harm_ms * MS))
        actions += machine.handle(StepEnded(step, 200 * MS))
        assert not any(isinstance(action, Note) and action.decision.what == "shut" for action in actions)


def vars_of(decision: Decision) -> dict[str, object]:
    return {"what": decision.what, "cause": decision.cause, "figures": decision.figures, "step": decision.step}
