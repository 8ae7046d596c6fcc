"""Whose fault it is that a side task does not start after one that died, and when the next one is tried."""

from squeezer.daemon.recovery import FIRST_PAUSE_NS, LASTS_NS, Recovery

S = 1_000_000_000


def test_failures_to_start_after_a_death_are_excused_for_a_while_and_tried_at_growing_intervals() -> None:
    recovery = Recovery()
    now_ns = 100 * S
    assert not recovery.is_too_early(now_ns) and not recovery.lasts(now_ns)
    assert not recovery.died(was_ready=True, now_ns=now_ns), "nothing was wrong with the device"
    pauses_ns = []
    while True:
        assert recovery.is_too_early(now_ns)
        begin_ns = now_ns
        while recovery.is_too_early(now_ns):
            now_ns += S // 4
        pauses_ns.append(now_ns - begin_ns)
        if not recovery.died(was_ready=False, now_ns=now_ns):
            break
        assert recovery.lasts(now_ns)
    assert pauses_ns == [FIRST_PAUSE_NS << tried for tried in range(len(pauses_ns))]
    assert now_ns - 100 * S >= LASTS_NS, "a study that never starts is given up in the end"
    assert len(pauses_ns) > 3


def test_a_death_that_nothing_preceded_counts() -> None:
    recovery = Recovery()
    assert not recovery.died(was_ready=False, now_ns=100 * S)
    assert recovery.died(was_ready=False, now_ns=101 * S)
    assert not recovery.died(was_ready=True, now_ns=102 * S), "it had started"
