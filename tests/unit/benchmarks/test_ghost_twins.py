"""What `benchmarks.ghost_twins` says of twins whose difference from the real stages is known."""

from typing import Any

import pytest

from benchmarks.ghost.network import EXAMPLES
from benchmarks.ghost_twins import STAGES, summary, table


def stage(scale: float, fill: float) -> dict[str, Any]:
    lengths = {"slots_ms": {"1": 10 * scale, "4": 30 / scale}, "bubble_ms": 40 * scale}
    return {"steps": 9, "step_ms": 100 * scale, **lengths, "fill": fill, "harvest": fill / 2}


def test_differences_are_those_between_twin_and_real_stage() -> None:
    runs = [
        {"scenario": job, "round": number, "real": [stage(1.0, 0.8)] * STAGES, "twin": [stage(1.25, 0.7)] * STAGES}
        for job in EXAMPLES
        for number in range(3)
    ]
    found = summary(runs)
    for job in EXAMPLES:
        for number in range(STAGES):
            of = {name: found[f"{job}_{number}_{name}"] for name in ("bubble", "slots", "step", "fill", "harvest")}
            assert of == pytest.approx(
                {"bubble": 0.25, "slots": 8.5 / 40, "step": 0.25, "fill": -0.1, "harvest": -0.05}
            )
            assert found[f"{job}_{number}_fill_ci95"] == pytest.approx([-0.1, -0.1])
    first = (
        "| stage 0 of `pretrain.py` | +25% (+25% to +25%) | 21% | 80%, −10% (−10% to −10%) | 40%, −5% (−5% to −5%) |"
    )
    assert first in table(found).splitlines()


def test_a_slot_that_only_one_of_them_has_counts_as_missing_in_the_other() -> None:
    real, twin = stage(1.0, 0.8), stage(1.0, 0.8)
    twin["slots_ms"] = {"1": 10.0}
    run = {"scenario": "pretrain", "round": 0, "real": [real] * STAGES, "twin": [twin] * STAGES}
    assert summary([run])["pretrain_0_slots"] == pytest.approx(30 / 40)
