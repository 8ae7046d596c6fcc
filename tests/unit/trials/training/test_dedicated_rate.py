"""The rate of a dedicated device does not suffer from what else the machine runs."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

from trials.training.rehearsal import _rate

NICENESS = 10  # beside niceness 0: about a tenth of the core


def epochs(cpu_s: float) -> Iterator[int]:
    """Each takes `cpu_s` of CPU time, and is a work of 1."""
    while True:
        start_s = time.thread_time()
        while time.thread_time() < start_s + cpu_s:
            pass
        yield 1


def test_time_in_which_others_had_the_core_does_not_count() -> None:
    measured = subprocess.run([sys.executable, __file__], stdout=subprocess.PIPE, check=True, text=True, timeout=120)
    rate, by_clock = map(float, measured.stdout.split())
    assert rate > 50  # of the 100 that a core of its own would give
    assert rate > 2 * by_clock


def _print_rates() -> None:
    """Measure on a core that a busy process has most of; print the rate, and that by the clock."""
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            os.nice(NICENESS)
            done: list[int] = []
            start_s = time.monotonic()
            rate = _rate((done.append(work) or work for work in epochs(cpu_s=0.01)), seconds=1.0)
            print(rate, sum(done) / (time.monotonic() - start_s))
        finally:
            busy.kill()


if __name__ == "__main__":
    _print_rates()
