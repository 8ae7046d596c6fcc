"""A unit that the device stopped did nothing meanwhile."""

import numpy as np

from squeezer.records.units import UNIT_DTYPE, cut_at_stops, stopped_intervals


def test_what_was_stopped_at_a_bubbles_end_goes_on_in_the_next_one_that_is_opened() -> None:
    bubbles = [
        {"start_ns": start_ns, "end_ns": start_ns + 5, "permit_until_ns": permit_until_ns, "stopped": stopped}
        for start_ns, permit_until_ns, stopped in [(0, 4, True), (10, None, False), (20, 24, False), (30, 34, True)]
    ]
    assert stopped_intervals(bubbles) == [(5, 20)]


def test_a_stopped_unit_becomes_the_pieces_in_which_it_ran() -> None:
    units = np.array([(0, 10, 10, 0, 1), (10, 100, 25, 1, 1), (110, 5, 5, 2, 1)], UNIT_DTYPE)
    cut = cut_at_stops(units, [(20, 50), (60, 105)])
    assert [tuple(int(value) for value in unit) for unit in cut] == [
        (0, 10, 10, 0, 1),
        (10, 10, 10, 1, 1),
        (50, 10, 10, 1, 1),
        (105, 5, 5, 1, 1),
        (110, 5, 5, 2, 1),
    ]


def test_without_stops_nothing_changes() -> None:
    units = np.array([(0, 10, 10, 0, 1)], UNIT_DTYPE)
    assert cut_at_stops(units, []) is units
    assert (cut_at_stops(units, [(20, 30)]) == units).all()
