"""The guard against made-up jobs, whose true slowdown is known. Error rates: `test_error_rates`."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squeezer.policy.actions import Note
from squeezer.policy.events import JobAttached, Overran, Side, SideChanged, StepEnded, StepStarted
from squeezer.policy.guard import LONGEST_DOUBLINGS, Decision, Guard
from squeezer.policy.state import GateMachine
from tests.support.policies import policy

MS = 1_000_000
Length = Callable[[int, bool], float]
"""A step's number and whether it is squeezed, to a time in ms."""


@dataclass
class Job:
    """Steps as the daemon's own machine lets them be squeezed."""

    machine: GateMachine = field(default_factory=lambda: GateMachine(policy()))
    step: int = 0
    since_ns: int | None = None
    squeezed: list[bool | None] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine.handle(JobAttached(0, 29500))
        self.machine.handle(SideChanged(Side.READY))

    def run(
        self, steps: int, length_ms: Length, *, between_ms: Length | None = None, overrun_ms: float = 0.0
    ) -> list[str]:
        """What the guard decided in the next steps."""
        before = len(self.decisions)
        for _ in range(steps):
            self.step += 1
            actions = self.machine.handle(StepStarted(self.step, self.since_ns))
            squeezed = self.machine.squeezed
            if squeezed and overrun_ms:
                actions += self.machine.handle(Overran(4, round(overrun_ms * MS)))
            actions += self.machine.handle(StepEnded(self.step, round(length_ms(self.step, bool(squeezed)) * MS)))
            self.machine.validate()
            self.squeezed.append(squeezed)
            self.decisions += [action.decision for action in actions if isinstance(action, Note)]
            if between_ms is not None:
                self.since_ns = round(between_ms(self.step, bool(squeezed)) * MS)
        return [decision.what for decision in self.decisions[before:]]

    def shut(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.what == "shut"]

    def share(self) -> float:
        return sum(squeezed is True for squeezed in self.squeezed) / len(self.squeezed)


def noisy(slowdown: float, deviation: float = 0.02, alone_ms: float = 200.0, seed: int = 0) -> Length:
    noise = random.Random(seed)
    return lambda step, squeezed: alone_ms * (1 + slowdown * squeezed) * noise.gauss(1, deviation)


def test_a_slowed_job_is_tried_again_ever_more_rarely() -> None:
    job = Job()
    job.run(20_000, noisy(0.1))
    times = [decision.figures["for_steps"] for decision in job.shut()]
    assert times[:7] == [200 << min(doublings, LONGEST_DOUBLINGS) for doublings in range(7)]
    assert [decision.what for decision in job.decisions[:4]] == ["shut", "retry", "shut", "retry"]
    assert sum(squeezed is True for squeezed in job.squeezed[5000:]) < 150
    assert job.shut()[0].figures["slowdown"] == pytest.approx(0.1, abs=0.03)
    assert 0.01 < job.shut()[0].figures["at_least"] < job.shut()[0].figures["slowdown"]


def test_what_harms_no_longer_is_let_in_again_and_after_good_times_shut_for_a_short_time() -> None:
    job = Job()
    job.run(400, noisy(0.3))
    job.run(4000, noisy(0.0))
    assert job.machine.guard.allows and job.share() > 0.7
    before = len(job.shut())
    job.run(200, noisy(0.3))
    assert job.shut()[before].figures["for_steps"] == 200


def test_nothing_is_decided_without_evidence() -> None:
    guard = Guard(0.01, 200, 0)
    length = noisy(0.5)
    squeezed = [step > 6 for step in range(1, 400)]  # no step is ever left alone beside them
    decided = [guard.step_ended(at, round(length(at, each) * MS), each) for at, each in enumerate(squeezed, start=1)]
    assert not any(decided)


def test_without_steps_alone_only_overruns_are_seen() -> None:
    job = Job(GateMachine(policy(alone_share=0.0)))
    assert job.run(500, noisy(0.5)) == []
    assert "shut" in job.run(60, noisy(0.0), overrun_ms=6.0)


def test_a_job_of_three_steps_is_left_alone() -> None:
    job = Job()
    assert job.run(3, noisy(0.4)) == [] and True not in job.squeezed


def test_a_job_whose_first_steps_are_slow_is_no_slower_for_squeezing() -> None:
    """It warms up over 40 steps, and so does the machine, all while the draw is dense."""
    for seed in range(20):
        job = Job()
        calm = noisy(0.0, seed=seed)
        job.run(500, lambda step, of, calm=calm: calm(step, of) * (1 + 2 * math.exp(-step / 8)))
        assert not job.shut()


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_job_that_changes_by_itself_is_squeezed_on(factor: float) -> None:
    job = Job()
    calm = noisy(0.0)
    job.run(3000, lambda step, of: calm(step, of) * (factor if step > 1500 else 1.0))
    assert job.shut() == [] and job.share() > 0.87


def test_step_numbers_that_jump_are_gaps_and_no_shorter_punishment() -> None:
    job = Job()
    job.run(60, noisy(0.4))
    assert len(job.shut()) == 1
    job.step += 1_000_000
    assert "retry" not in job.run(100, noisy(0.0))
    job.step = 10
    assert "retry" in job.run(150, noisy(0.0))
    job.run(400, noisy(0.0))
    assert len(job.shut()) == 1


def test_steps_that_are_not_heard_of_blunt_the_test_and_do_not_mislead_it() -> None:
    for slowdown in (0.0, 0.1):
        job, lost = Job(), random.Random(1)
        length = noisy(slowdown)
        for _ in range(2000):
            job.step += lost.random() < 0.1
            job.run(1, length)
        assert bool(job.shut()) == bool(slowdown)


def test_the_first_steps_of_a_side_task_that_starts_again_are_not_compared() -> None:
    job = Job()
    for _ in range(12):
        job.run(150, noisy(0.0, 0.01))
        job.machine.handle(SideChanged(Side.DUE))
        job.run(10, noisy(0.0, 0.01))
        job.machine.handle(SideChanged(Side.STARTING))
        job.run(10, lambda *_: 600.0)
        job.machine.handle(SideChanged(Side.READY))
    assert job.shut() == []
    assert job.squeezed.count(None) > 60, "while it starts"


def test_an_overrun_beyond_the_budget_shuts_at_once_and_longer_each_time() -> None:
    job = Job()
    job.run(100, noisy(0.0))
    assert "shut" in job.run(40, noisy(0.0), overrun_ms=6.0), "3% of each step"
    job.run(9000, noisy(0.0), overrun_ms=6.0)
    assert [decision.figures["for_steps"] for decision in job.shut()[:3]] == [200, 400, 800]
    assert {decision.cause for decision in job.shut()} == {"overrun"}
    assert job.squeezed.count(True) < 200


def test_what_overran_before_the_gate_was_shut_does_not_count_afterwards() -> None:
    job = Job()
    while "shut" not in job.run(1, noisy(0.0), overrun_ms=6.0):
        pass
    job.machine.handle(Overran(4, 900 * MS))  # the side task was still at work
    job.run(1000, noisy(0.0))
    assert len(job.shut()) == 1


def test_a_margin_widens_fast_and_narrows_slowly() -> None:
    job = Job()
    job.run(60, noisy(0.0))
    guard = job.machine.guard
    quiet_ns = guard.margin_ns(4)
    decided = [guard.overran(1, 4, 1_500_000) for _ in range(3)]
    assert [decision.what for (decision,) in decided] == ["widen"] * 3
    assert guard.margin_ns(4) == 8 * quiet_ns
    assert guard.margin_ns(5) == quiet_ns, "each slot has its own"
    quiet = [decision.what for _ in range(400) for decision in guard.overran(1, 4, 0)]
    assert quiet == ["narrow"] * 3 and guard.margin_ns(4) == quiet_ns


def test_small_overruns_are_bearable_up_to_half_of_the_budget() -> None:
    job = Job()  # of 200 ms a step: a millisecond is half of the budget
    assert job.run(240, noisy(0.0), overrun_ms=0.8) == []
    job = Job()
    job.run(240, noisy(0.0, alone_ms=100.0), overrun_ms=0.8)
    assert {decision.what for decision in job.decisions} == {"widen"}


def test_without_a_budget_nothing_is_guarded_and_no_more_left_alone_than_the_share() -> None:
    job = Job(GateMachine(policy(enabled=False)))
    assert "shut" not in job.run(2000, noisy(0.5), overrun_ms=50.0)
    assert job.squeezed[6:126].count(False) == 12


def test_the_next_job_is_judged_by_itself() -> None:
    job = Job()
    job.run(100, noisy(0.3))
    assert not job.machine.guard.allows
    job.machine.guard.forget()
    assert job.machine.guard.allows


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.floats(-0.05, 0.5))
def test_decisions_follow_from_what_was_heard_alone(seed: int, slowdown: float) -> None:
    first, second = Job(), Job()
    assert first.run(300, noisy(slowdown, seed=seed)) == second.run(300, noisy(slowdown, seed=seed))
    assert first.decisions == second.decisions and first.squeezed == second.squeezed


# The time between steps


def loading(harm_ms: float = 0.0, usual_ms: float = 20.0) -> Length:
    noise = random.Random(1)
    return lambda _, squeezed: (usual_ms + harm_ms * squeezed) * noise.gauss(1, 0.1)


def with_checkpoints(usual: Length, every: int, slower: float = 1.0) -> Length:
    noise = random.Random(2)

    def between_ms(step: int, squeezed: bool) -> float:
        saving = 5000.0 * (slower if squeezed else 1.0) * noise.gauss(1, 0.03) if step % every == 0 else 0.0
        return usual(step, squeezed) + saving

    return between_ms


def test_a_job_that_loads_evaluates_and_saves_unharmed_is_squeezed_on() -> None:
    job = Job()
    job.run(3000, noisy(0.0, 0.01), between_ms=with_checkpoints(loading(), 50))
    assert job.shut() == [] and job.share() > 0.87


def test_harm_to_loading_shuts_the_gate_though_no_step_is_longer() -> None:
    job = Job()
    job.run(1500, noisy(0.0, 0.01), between_ms=loading(harm_ms=20.0))
    assert {decision.cause for decision in job.shut()} == {"gaps"}
    assert job.share() < 0.1


def test_harm_to_checkpoints_shuts_the_gate() -> None:
    job = Job()
    job.run(3000, noisy(0.0, 0.01), between_ms=with_checkpoints(loading(), 7, slower=1.3))
    assert {decision.cause for decision in job.shut()} == {"long_gaps"}
    unharmed = Job()
    unharmed.run(3000, noisy(0.0, 0.01), between_ms=with_checkpoints(loading(), 7))
    assert unharmed.shut() == []


def test_harm_to_few_long_gaps_is_found_though_that_of_steps_is_soon_known_to_be_none() -> None:
    """Evaluations, say, that take a third of the time. Of one block in 80, one or two of them would be alone."""
    job = Job()
    job.run(6000, noisy(0.0, 0.01), between_ms=with_checkpoints(loading(), 50, slower=1.3))
    assert {decision.cause for decision in job.shut()} == {"long_gaps"}
    short = Job()
    short.run(6000, noisy(0.0, 0.01), between_ms=with_checkpoints(loading(), 5000, slower=1.3))
    assert short.shut() == [] and short.share() > 0.96, "those that take little time cost no squeezing"


@pytest.mark.parametrize("between_ms", [0.0, 1e-6, 100.0])
def test_times_that_never_change_prove_nothing(between_ms: float) -> None:
    job = Job()
    assert job.run(500, lambda *_: 200.0, between_ms=lambda *_: between_ms) == []
