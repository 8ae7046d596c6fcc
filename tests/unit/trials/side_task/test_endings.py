"""How many trials pruning is expected to stop, and how long to wait for a verdict."""

import pytest

from trials.side_task.endings import Endings, idle_share


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


def test_a_wait_for_verdicts_costs_no_more_than_the_epochs_in_vain_that_it_may_save() -> None:
    endings = Endings((2,))
    for number in range(8):
        endings.reported(number)
    assert endings.worth_s(range(8), 1.0, 1.0) == 0, "none has been pruned so far"
    endings.heard(0, pruned=True)
    endings.heard(1, pruned=True)
    endings.heard(2)
    assert (endings.scored, endings.pruned, endings.undecided([1, 2, 3, 4])) == (8, 2, 2)
    assert endings.worth_s([1, 2, 3, 4], 1.0, 1.0) == pytest.approx(0.25 * 2 / 4), "a quarter are pruned"
    assert endings.worth_s([1, 2, 3, 4], 1.0, 0.5) == pytest.approx(2 * 0.25 * 2 / 4), "half of the device computes on"
    assert endings.worth_s([1, 2, 3, 4], 1.0, 0.01) == 1.0, "no longer than the epoch itself"
    assert endings.worth_s([3, 4], 1.0, 0.0) == 1.0, "the search needs the only core at any rate"
    assert endings.worth_s([1, 2], 1.0, 0.0) == 0, "all is known"


def test_what_waits_for_a_core_that_it_needs_itself_stands_still_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(cores: int, threads: int) -> float:
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
        monkeypatch.setattr("torch.get_num_threads", lambda: threads)
        return idle_share()

    assert (on(1, 1), on(4, 4), on(4, 2), on(4, 8)) == (0.0, 0.75, 1.0, 0.75)
