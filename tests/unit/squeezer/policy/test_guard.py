"""The guard against made-up jobs, whose true slowdown is known."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from squeezer.policy.guard import CHECK_STEPS, RECENT_STEPS, Decision, Guard
from squeezer.policy.sprt import MOST_ROUNDS, Sprt

MS = 1_000_000
Steps = Callable[[int, bool], float]
"""A step's number and whether it is squeezed, to its length in ms."""

BURDENED_MS = [
    (True, [173, 169, 174]),
    (False, [173, 176, 174, 175]),
    (True, [185, 183, 175]),
    (False, [182, 173, 171, 172]),
    (True, [177, 182, 178]),
    (False, [192, 181, 208, 181]),
    (True, [196, 187, 217]),
    (False, [206, 187, 177, 167, 169, 176]),
    (True, [183, 187, 187]),
    (False, [174, 173]),
    (True, [191, 207, 189]),
    (False, [189, 199, 173, 171]),
]
"""Short windows: whether they are squeezed, and their steps."""

HIDDEN_MS = [
    (True, [224, 234, 227, 242]),
    (False, [238, 243, 236, 234]),
    (True, [231, 225, 223, 225, 231, 225, 228, 230, 220, 226, 228, 226]),
    (False, [227, 228, 228, 237]),
    (True, [235, 226, 226, 220, 251, 250, 252, 246, 241, 228, 237, 247]),
    (False, [229, 228, 229, 231]),
    (True, [267]),
]
"""Ordinary windows likewise."""


@dataclass
class Job:
    """Steps in windows of 20 squeezed ones and 5 alone, as the guard lets them."""

    guard: Guard = field(default_factory=lambda: Guard(0.01, 50, 300_000))
    step: int = 0
    squeezed: list[bool] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def run(self, steps: int, length_ms: Steps, overrun_ms: float = 0.0) -> list[str]:
        """What the guard decided in the next steps."""
        before = len(self.decisions)
        for _ in range(steps):
            self.step += 1
            window = self.step > 6 and (self.step - 7) % 25 < 20
            squeezed = window and self.guard.allows
            if squeezed:
                self.decisions += self.guard.overran(self.step, 4, round(overrun_ms * MS))
            label = squeezed if squeezed or not window else None
            duration_ns = round(length_ms(self.step, squeezed) * MS)
            self.decisions += self.guard.step_ended(self.step, duration_ns, label)
            self.squeezed.append(squeezed)
        return [decision.what for decision in self.decisions[before:]]


def noisy(slowdown: float, deviation: float = 0.02, alone_ms: float = 200.0, seed: int = 0) -> Steps:
    noise = random.Random(seed)
    return lambda step, squeezed: alone_ms * (1 + slowdown * squeezed) * noise.gauss(1, deviation)


def bursts(calm: Steps, seed: int, every_steps: int = 60) -> Steps:
    """The machine is slower, by 8 to 35%, for 2 to 30 steps now and then, squeezed or not."""
    chance = random.Random(seed)
    left, slower = 0, 0.0

    def length_ms(step: int, squeezed: bool) -> float:
        nonlocal left, slower
        if not left and chance.random() < 1 / every_steps:
            left, slower = chance.randint(2, 30), chance.uniform(0.08, 0.35)
        left = max(0, left - 1)
        return calm(step, squeezed) * (1 + (slower if left else 0.0))

    return length_ms


def share(squeezed: list[bool]) -> float:
    return sum(squeezed) / len(squeezed)


@pytest.mark.parametrize("deviation", [0.005, 0.05, 0.15])
def test_a_job_that_is_not_slowed_is_squeezed_on(deviation: float) -> None:
    job = Job()
    assert job.run(5000, noisy(0.0, deviation)).count("shut") <= 2, "by chance, with the noisiest"
    assert share(job.squeezed) > 0.75, "80% is all that there is"


@pytest.mark.parametrize(("slowdown", "deviation"), [(0.03, 0.005), (0.05, 0.02), (0.3, 0.1)])
def test_a_slowed_job_is_left_alone_soon_and_mostly(slowdown: float, deviation: float) -> None:
    job = Job()
    first = job.run(130, noisy(slowdown, deviation))
    assert "shut" in first, "within a few windows"
    job.run(4000, noisy(slowdown, deviation, seed=1))
    assert share(job.squeezed[500:]) < 0.15, "only now and then is it tried again"


def test_bursts_of_the_machine_hide_no_harm() -> None:
    costs = []
    for seed in range(40):
        job = Job()
        job.run(100, bursts(noisy(0.0, seed=seed), seed))
        before = len(job.squeezed)
        job.run(300, bursts(noisy(0.12, seed=seed + 50), seed + 50))
        harmed = job.squeezed[before + 10 :]
        costs.append(0.12 * max(sum(harmed[i : i + RECENT_STEPS]) for i in range(len(harmed) - RECENT_STEPS)) / 50)
    assert sorted(costs)[len(costs) // 2] <= 0.02, "when in bursts a third of all steps, and the budget is 1%"
    assert sorted(costs)[-5] <= 0.06, "squeezed without a guard they cost 10%"


def test_bursts_of_the_machine_are_no_harm() -> None:
    squeezed: list[bool] = []
    for seed in range(20):
        job = Job()
        job.run(500, bursts(noisy(0.0, seed=seed), seed))
        squeezed += job.squeezed
    assert share(squeezed) > 0.6


def test_a_slow_window_is_looked_into_though_steps_alone_had_strayed() -> None:
    """As measured: a burst in steps alone hid from the sum over steps what a loader did to the last squeezed window."""
    guard = Guard(0.01, 50, 300_000)
    steps = [(squeezed, ms) for squeezed, window_ms in HIDDEN_MS for ms in window_ms]
    decisions = []
    for step, (squeezed, ms) in enumerate(steps, start=1):
        decisions += guard.step_ended(step, ms * MS, squeezed)
    assert [(each.step, each.what, each.cause) for each in decisions] == [(len(steps), "compare", "windows")]


def test_what_broke_the_budget_is_tried_again_in_short_windows() -> None:
    job = Job()
    job.run(300, noisy(0.0, 0.01))
    job.run(300, noisy(0.15, 0.01, seed=1))
    shut = [at for at, decision in enumerate(job.decisions) if decision.what == "shut"]
    assert len(shut) >= 2
    for at, next_shut in pairwise(shut):
        between = [decision.what for decision in job.decisions[at + 1 : next_shut]]
        assert between == ["compare"], "and found guilty there"
    first = job.decisions[shut[0]].step
    until = job.decisions[shut[-1]].step
    assert sum(job.squeezed[first:until]) <= 2 * (len(shut) - 1), "two steps tell"


def test_a_small_slowdown_shows_in_many_windows() -> None:
    job = Job()
    job.run(2500, noisy(0.03, 0.03))
    shut = [decision for decision in job.decisions if decision.what == "shut"]
    assert shut and shut[0].cause in ("windows", "mean")


def test_steps_of_a_side_task_that_starts_again_divide_windows_and_count_for_none() -> None:
    guard = Guard(0.01, 50, 300_000)
    decided = []
    step = 0
    for _ in range(40):  # 110 ms beside 109 is within the budget; beside 105, which was squeezed too, it would not be
        for label, count, length_ms in ((False, 5, 109), (True, 6, 105), (None, 6, 180), (True, 6, 110)):
            for _ in range(count):
                step += 1
                decided += guard.step_ended(step, length_ms * MS + step % 3, label)
    assert decided == []


def test_steps_that_become_long_by_themselves_are_checked_and_squeezed_on() -> None:
    job = Job()
    job.run(300, noisy(0.0))
    # at step 310, in a squeezed window, the job changes its batch size
    changed = job.run(300, lambda step, squeezed: (400.0 if step > 310 else 200.0) + (step % 3))
    assert changed == ["check", "compare", "go_on"]
    assert share(job.squeezed[350:]) > 0.7


def test_steps_that_become_short_by_themselves_get_a_new_baseline_at_once() -> None:
    job = Job()
    job.run(300, noisy(0.0))
    assert job.run(12, noisy(0.0, alone_ms=100.0))[0] == "check"
    assert "shut" not in job.run(300, noisy(0.0, alone_ms=100.0))
    harmed = job.run(12, noisy(0.15, alone_ms=100.0))
    assert harmed[0] == "check", "the old steps, twice as long, hide nothing"


@pytest.mark.parametrize("slowdown", [0.1, 0.3])
def test_a_side_task_that_becomes_harmful_is_shut_out_within_ten_steps_and_comes_back(slowdown: float) -> None:
    job = Job()
    assert job.run(307, noisy(0.0, 0.015)) == []
    before = len(job.squeezed)
    job.run(10 + CHECK_STEPS, noisy(slowdown, 0.015, seed=1))
    assert sum(job.squeezed[before:]) <= 6
    assert job.decisions[-1].cause == "cusum" and job.decisions[-1].what == "shut"
    job.run(300, noisy(slowdown, 0.015, seed=2))
    tried = job.squeezed[before + 20 :]
    most = max(sum(tried[first : first + RECENT_STEPS]) for first in range(len(tried) - RECENT_STEPS))
    assert 1 <= most <= 6, "tried again for a few steps only"
    job.run(800, noisy(0.0, 0.015, seed=3))
    assert share(job.squeezed[-200:]) > 0.75


def test_one_stall_is_nothing() -> None:
    job = Job()
    calm = noisy(0.0)
    assert job.run(600, lambda step, squeezed: calm(step, squeezed) + (1000.0 if step == 310 else 0.0)) == []


def test_an_overrun_beyond_the_budget_shuts_at_once_and_longer_each_time() -> None:
    job = Job()
    job.run(100, noisy(0.0))
    decided = job.run(40, noisy(0.0), overrun_ms=6.0)
    assert "shut" in decided, "3% of each step"
    job.run(3000, noisy(0.0), overrun_ms=6.0)
    times = [decision.figures["for_steps"] for decision in job.decisions if decision.what == "shut"]
    assert times[:3] == [50, 100, 200] and max(times) == 50 * 32
    over = [any(job.squeezed[i : i + RECENT_STEPS]) for i in range(200, 3000)]
    assert sum(over) / len(over) < 0.5


def test_steps_that_were_not_heard_of_while_it_was_shut_are_waited_for() -> None:
    job = Job()
    job.run(100, noisy(0.0))
    while "shut" not in job.run(1, noisy(0.0), overrun_ms=6.0):
        pass
    job.step += 1000
    assert job.run(CHECK_STEPS - 1, noisy(0.0)) == [], "there is nothing yet to compare with"
    assert job.run(200, noisy(0.0))[:2] == ["compare", "go_on"]


def test_after_good_times_it_is_shut_for_a_short_time_again() -> None:
    job = Job()
    job.run(400, noisy(0.0), overrun_ms=6.0)
    job.run(4000, noisy(0.0))
    assert job.guard.allows
    before = len(job.decisions)
    job.run(100, noisy(0.0), overrun_ms=6.0)
    shut = [decision for decision in job.decisions[before:] if decision.what == "shut"]
    assert shut[0].figures["for_steps"] == 50


def test_a_tail_that_the_mean_hides_is_seen() -> None:
    noise = random.Random(0)

    def length_ms(step: int, squeezed: bool) -> float:
        slow = squeezed and noise.random() < 0.3
        return 200.0 * noise.gauss(1.025 if slow else 1 - 0.006 * squeezed, 0.002)

    job = Job()
    job.run(3000, length_ms)
    causes = {decision.cause for decision in job.decisions if decision.what == "shut"}
    assert "tail" in causes and causes <= {"tail", "cusum"}


def test_a_margin_widens_fast_and_narrows_slowly() -> None:
    job = Job()
    job.run(40, noisy(0.0))
    quiet_ns = job.guard.margin_ns(4)
    assert quiet_ns == 300_000
    assert job.run(3, noisy(0.0), overrun_ms=1.5) == ["widen"] * 3
    assert job.guard.margin_ns(4) == 8 * quiet_ns
    assert job.guard.margin_ns(5) == quiet_ns, "each slot has its own"
    assert job.run(400, noisy(0.0)) == ["narrow"] * 3
    assert job.guard.margin_ns(4) == quiet_ns


def test_small_overruns_are_bearable_up_to_half_of_the_budget() -> None:
    job = Job()  # of 200 ms a step: a millisecond is half of the budget
    assert job.run(240, noisy(0.0), overrun_ms=0.8) == []
    job = Job()
    job.run(240, noisy(0.0, alone_ms=100.0), overrun_ms=0.8)
    assert {decision.what for decision in job.decisions} == {"widen"}


def test_without_a_budget_nothing_is_guarded() -> None:
    job = Job(Guard(float("inf"), 50, 300_000))
    assert "shut" not in job.run(2000, noisy(0.5), overrun_ms=50.0)


def test_the_next_job_is_judged_by_itself() -> None:
    job = Job()
    job.run(300, noisy(0.3))
    assert not job.guard.allows
    job.guard.forget()
    assert job.guard.allows


def test_what_slows_may_begin_amid_a_comparison() -> None:
    """Steps as measured: after half of them a loader began to take a third of the core while squeezed ones ran."""
    alone_ms = [174, 164, 163, 175, 184, 174]
    comparison = Sprt(0.0635, 0.01, [ms * MS for ms in alone_ms])
    verdicts = [
        comparison.step_ended(ms * MS, squeezed=squeezed) for squeezed, window_ms in BURDENED_MS for ms in window_ms
    ]
    assert verdicts[-1] is True and set(verdicts[:-1]) == {None}
    assert comparison.figures["windows"] == MOST_ROUNDS, "what it saw before spoke for squeezing"


@pytest.mark.parametrize(("slowdown", "least", "most"), [(0.0, 0.0, 0.08), (0.15, 0.65, 1.0)])
def test_what_began_amid_noisy_comparisons_is_found_and_noise_itself_seldom(
    slowdown: float, least: float, most: float
) -> None:
    noise = random.Random(0)
    guilty = []
    for _ in range(300):
        comparison = Sprt(0.06, 0.01, [200 * MS * noise.lognormvariate(0, 0.08) for _ in range(6)])
        verdict, step = None, 0
        while verdict is None:
            squeezed = comparison.wants_squeezed
            burden = slowdown if squeezed and step >= 18 else 0.0
            step_ns = 200 * MS * (1 + burden) * noise.lognormvariate(0, 0.08)
            verdict, step = comparison.step_ended(step_ns, squeezed=squeezed), step + 1
        guilty.append(verdict)
    assert least <= sum(guilty) / len(guilty) <= most


def test_what_was_found_guilty_before_is_found_so_in_half_the_steps() -> None:
    noise = random.Random(0)

    def tried(slowdown: float, *, again: bool) -> tuple[float, float]:
        """The share of 300 comparisons that find it guilty, and the squeezed steps of one."""
        guilty = steps = 0
        for _ in range(300):
            alone_ns = [200 * MS * noise.lognormvariate(0, 0.04) for _ in range(6)]
            comparison = Sprt(0.06, 0.01, alone_ns, again=again)
            verdict = None
            while verdict is None:
                squeezed = comparison.wants_squeezed
                steps += squeezed
                step_ns = 200 * MS * (1 + slowdown * squeezed) * noise.lognormvariate(0, 0.04)
                verdict = comparison.step_ended(step_ns, squeezed=squeezed)
            guilty += verdict
        return guilty / 300, steps / 300

    first, then = tried(0.15, again=False), tried(0.15, again=True)
    assert first[0] > 0.97 and then[0] > 0.97
    assert then[1] < 0.65 * first[1]
    assert tried(0.0, again=True)[0] < 0.1, "and what harms no longer comes back"
