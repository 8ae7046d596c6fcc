"""How many trials pruning is expected to stop."""

from trials.side_task.endings import Endings


def test_those_before_a_rung_end_by_the_share_that_ended_so_far() -> None:
    endings = Endings((2, 5))
    assert endings.expected([0] * 8, 2) == 0, "nothing is known"
    endings.scored, endings.pruned = 16, 8
    assert endings.expected([0] * 8, 2) == 4
    assert endings.expected([0] * 8, 1) == 0, "their rung is further away"
    assert endings.expected([2, 2, 3, 3, 4, 4, 5, 6], 2) == 2, "the two at 2 and those beyond 5 have none within two"
    endings.pruned = 40
    assert endings.expected([1, 4], 2) == 2, "no more than there are, whoever else has ended some"


def test_without_rungs_none_is_pruned() -> None:
    endings = Endings(())
    endings.pruned = 3
    assert endings.expected([0, 1], 5) == 0
