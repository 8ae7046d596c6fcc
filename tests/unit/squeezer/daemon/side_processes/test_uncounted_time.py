"""What a control group counts, against what the main job has said."""

import pytest

from ds_hooks.shared import wire
from squeezer.daemon.correlator import Correlator
from squeezer.daemon.side_processes.control_group import make_side_group
from squeezer.daemon.side_processes.parent_group import NoGroupError
from squeezer.daemon.side_processes.uncounted_time import UncountedTime


def said(correlator: Correlator, cpu_ns: int) -> None:
    correlator.bubble_started(0, wire.BubbleStart(1, 1, 3, wire.WaitKind.RECV_GRAD, cpu_ns, 30))


def test_the_rest_is_uncounted() -> None:
    correlator = Correlator(lambda slot, gap_ns: None, host_measures=True)
    uncounted = UncountedTime(correlator)
    unknown = {"group_cpu_ms": None, "uncounted_ms": None}
    assert uncounted.take() == unknown
    for cpu_ns, counted_ns in ((5_000_000, 0), (9_000_000, 4_000_000)):
        said(correlator, counted_ns)
        uncounted.look(cpu_ns)
    uncounted.begin()
    for cpu_ns, counted_ns in ((10_000_000, 5_000_000), (15_000_000, 8_000_000)):
        said(correlator, counted_ns)
        uncounted.look(cpu_ns)
    uncounted.look(99_000_000)  # the main job has said nothing since
    said(correlator, 50_000_000)
    uncounted.look(None)
    assert uncounted.take() == {"group_cpu_ms": 5.0, "uncounted_ms": 2.0}
    assert uncounted.take() == unknown


def test_a_real_group_counts_from_nothing() -> None:
    try:
        made = make_side_group()
    except NoGroupError as error:
        pytest.skip(f"no control groups here, so their count is NOT shown: {error}")
    assert made.cpu_ns() == 0
    made.close()
