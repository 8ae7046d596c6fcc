"""launch/leftovers.py: whom its signals reach."""

import signal
import subprocess

from launch import leftovers
from tests.support import reused_pid


def test_a_number_that_another_process_gets_just_before_the_signal_is_not_signalled() -> None:
    ends = subprocess.Popen(["sleep", "60"])
    strangers = []

    def is_replaced() -> list[int]:
        ends.kill()
        ends.wait()
        strangers.append(reused_pid.start_with(ends.pid))
        return [ends.pid]

    leftovers._signal(ends.pid, signal.SIGTERM, is_replaced)
    assert [reused_pid.end(each) for each in strangers] == [0]
