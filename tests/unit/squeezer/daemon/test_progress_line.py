"""The line that a job prints while it trains."""

from dataclasses import replace

from squeezer.daemon.bubble_accounts import NOTHING
from squeezer.daemon.progress_line import EVERY_NS, ProgressLine

S = 1_000_000_000


def test_the_first_line_comes_when_there_is_something_to_compare_with() -> None:
    progress = ProgressLine()
    assert progress.line(1, 5 * S, 4 * S, None, EVERY_NS) is None
    assert progress.line(2, 6 * S, 5 * S, None, 2 * EVERY_NS - 1) is None, "not yet time"
    # since the first call: 3 s of 10 s idle, and the side task is not there
    assert progress.line(30, 8 * S, 7 * S, None, 2 * EVERY_NS) == "step 30: idle 30% of the time"


def test_with_a_side_task_it_says_how_much_of_the_bubbles_is_used() -> None:
    progress = ProgressLine()
    progress.line(1, 0, 0, None, EVERY_NS)
    line = progress.line(30, 4 * S, 3 * S, replace(NOTHING, work=9, trials_running=16, epochs=1), 2 * EVERY_NS)
    assert line == "step 30: idle 40% of the time, 75% of it used; 16 trials running"
