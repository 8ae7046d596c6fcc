"""What units took within each bubble, where only a device's own times tell it."""

from typing import Any

import numpy as np
import pytest

from squeezer.records.units import UNIT_DTYPE, attribute

MS = 1_000_000


def bubble(start_ms: float, end_ms: float, *, slot: int = 1, opened: bool = True, side_ns: int | None = None) -> Any:
    times = {"start_ns": int(start_ms * MS), "end_ns": int(end_ms * MS), "permit_until_ns": 1 if opened else None}
    return {"slot": slot, **times, "side_ns": side_ns, "overrun_ns": None}


def units(*spans_ms: tuple[float, float]) -> Any:
    return np.array([(start * MS, wall * MS, wall * MS, 0, 0) for start, wall in spans_ms], UNIT_DTYPE)


def overran(t_ms: float, slot: int, overrun_ms: float) -> dict[str, Any]:
    return {"t_ns": int(t_ms * MS), "slot": slot, "overrun_ns": int(overrun_ms * MS)}


def test_units_count_in_the_bubble_in_which_they_ran_and_in_parts_where_they_end_later() -> None:
    bubbles = [bubble(10, 20), bubble(30, 40), bubble(50, 60)]
    attribute(bubbles, units((11, 4), (15, 4), (35, 7)), [])
    assert [b["side_ns"] / MS for b in bubbles] == [8, 5, 0]
    assert [b["overrun_ns"] for b in bubbles] == [0, 0, 0]


def test_an_overrun_belongs_to_the_last_bubble_of_its_slot_that_was_opened() -> None:
    bubbles = [bubble(10, 20), bubble(30, 40, slot=2), bubble(50, 60), bubble(70, 80, opened=False)]
    attribute(
        bubbles,
        units(),
        [overran(21, 1, 0.5), overran(41, 2, 0.2), overran(42, 2, 0.1), overran(81, 1, 0.7), overran(1, 1, 9)],
    )
    overruns = [b["overrun_ns"] for b in bubbles]
    assert overruns[:3] == pytest.approx([0.5 * MS, 0.3 * MS, 0.7 * MS]) and overruns[3] is None


def test_what_the_main_job_has_told_stays() -> None:
    bubbles = [bubble(10, 20, side_ns=3)]
    attribute(bubbles, units((11, 4)), [overran(21, 1, 0.5)])
    assert (bubbles[0]["side_ns"], bubbles[0]["overrun_ns"]) == (3, None)
