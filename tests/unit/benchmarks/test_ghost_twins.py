"""What `benchmarks.ghost_twins` says of twins whose difference from the real stages is known."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.ghost.network import EXAMPLES
from benchmarks.ghost_twins import SETTLED_STEP, STAGES, _figures_of, summary, table
from tests.support.made_up_rank import MadeUpRank


def stage(pace: float = 1.0, error: float = 0.0, points: float = 0.0) -> dict[str, Any]:
    """A stage on a machine that is `pace` times as slow; its bubbles are off by `error`, its shares by `points`."""
    return {
        "steps": 9,
        "compute_ms": 60 * pace,
        "slots_ms": {"1": [10 * pace * (1 + error), 20 * pace], "4": [30 * pace * (1 - error), 60 * pace]},
        "share": 0.4 + points,
        "fill": 0.8 + points,
        "harvest": 0.5 + points,
    }


def rounds(*twins: dict[str, Any]) -> list[dict[str, Any]]:
    """One round per twin, the same for all stages of all jobs."""
    return [
        {
            "scenario": job,
            "round": number,
            "real": [stage()] * STAGES,
            "twin": [twin] * STAGES,
            "out_of_step": [{"median": 0.03, "p90": 0.04}] * STAGES,
        }
        for number, twin in enumerate(twins)
        for job in EXAMPLES
    ]


def test_a_twin_on_a_slower_machine_is_compared_at_the_real_stages_pace() -> None:
    found = summary(rounds(*[stage(1.25)] * 3))
    for job in EXAMPLES:
        for number in range(STAGES):
            names = ("pace", "median", "p90", "share", "fill", "harvest")
            of = {name: found[f"{job}_{number}_{name}"] for name in names}
            assert of == pytest.approx({"pace": 1.25, "median": 0, "p90": 0, "share": 0, "fill": 0, "harvest": 0})
            assert {found[f"{job}_{number}_{name}_verdict"] for name in names[1:]} == {"agrees"}


def test_differences_are_those_between_twin_and_real_stage() -> None:
    found = summary(rounds(*[stage(2.0, 0.5, -0.06)] * 3))
    expected = {"median": 0.5, "p90": 0.0, "share": -0.06, "fill": -0.06, "harvest": -0.06}
    assert {name: found[f"denoise_1_{name}"] for name in expected} == pytest.approx(expected)
    verdicts = [found[f"denoise_1_{name}_verdict"] for name in expected]
    assert verdicts == ["differs", "agrees", "differs", "differs", "agrees"]
    shown = table(found).splitlines()
    cell = "80%, −6 (−6 to −6): differs"
    assert f"| fill | 5 points | {' | '.join([cell] * len(EXAMPLES) * STAGES)} |" in shown
    assert f"| their 90th percentile, replayed out of step | | {' | '.join(['4%'] * len(EXAMPLES) * STAGES)} |" in shown
    cell = "50% (50% to 50%): differs"
    assert f"| single bubbles: their median | 10% | {' | '.join([cell] * len(EXAMPLES) * STAGES)} |" in shown


def test_rounds_that_disagree_leave_the_question_open() -> None:
    found = summary(rounds(stage(points=-0.06), stage(points=0.06), stage()))
    assert found["pretrain_0_fill"] == pytest.approx(0)
    assert found["pretrain_0_fill_verdict"] == "open"
    assert summary(rounds(stage()))["pretrain_0_fill_verdict"] == "open", "one round bounds nothing"


def test_a_slot_that_only_one_of_them_has_counts_as_missing_in_the_other() -> None:
    twin = stage()
    del twin["slots_ms"]["4"]
    found = summary(rounds(twin))
    assert (found["pretrain_0_median"], found["pretrain_0_p90"]) == pytest.approx((30 / 40, 60 / 80))


def test_the_figures_of_a_stage_are_those_of_its_settled_squeezed_steps(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    rank.work_per_step = 8
    for _ in range(1, SETTLED_STEP):
        rank.step(True, 500.0, [(10, 300)])
    for length_ms in (20, 21, 22, 23, 24):
        rank.step(False, 300.0, [(10, 90), (150, 90)])
        # every other step does without its second bubble
        second = [(80, 10)] if length_ms % 2 else []
        rank.step(True, 100.0, [(10, length_ms), *second], [(11, 5, 5)])
    rank.end(work_per_s=1000.0)
    rank.write()
    (found,) = _figures_of(tmp_path)
    assert found["steps"] == 5
    assert found["slots_ms"] == {"0": [22.0, 23.6], "1": [0.0, 10.0]}
    assert found["share"] == pytest.approx((20 + 21 + 22 + 23 + 24 + 2 * 10) / 500)
    assert found["compute_ms"] == pytest.approx(76.0)
    assert 0 < found["fill"] < 1 and found["harvest"] > 0


def test_a_job_whose_side_task_has_trained_nothing_is_refused(tmp_path: Path) -> None:
    rank = MadeUpRank(tmp_path)
    for _ in range(2 * SETTLED_STEP):
        rank.step(False, 100.0, [(10, 20)])
    rank.end()
    rank.write()
    with pytest.raises(RuntimeError, match="the side task has trained nothing"):
        _figures_of(tmp_path)
