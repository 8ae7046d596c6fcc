"""How long a silence is borne."""

import pytest

from squeezer.daemon.silence import LONGEST_NS, Silence

PATIENCE_NS = 5_000_000_000
S = 1_000_000_000


def passes(silence: Silence, length_ns: int) -> list[int]:
    """Let a silence pass from 0 on. Returns when it was noticed, in whole seconds."""
    silence.broken(0)
    noticed = []
    for now_ns in range(0, length_ns, S):
        if silence.left_s(PATIENCE_NS, now_ns) == 0:
            silence.noticed(now_ns)
            noticed.append(now_ns // S)
    silence.broken(length_ns)
    return noticed


def test_a_silence_is_noticed_after_the_patience_and_again() -> None:
    assert passes(Silence(), 8 * S) == [5, 6, 7]


@pytest.mark.parametrize(("length_s", "borne_s"), [(8, 12), (30, 45), (300, LONGEST_NS // S)])
def test_after_one_that_nothing_ended_the_next_are_borne_longer(length_s: int, borne_s: int) -> None:
    silence = Silence()
    assert passes(silence, length_s * S)
    assert passes(silence, borne_s * S) == []
    assert passes(silence, (borne_s + 1) * S) == [borne_s]


def test_one_that_a_remedy_seems_to_have_ended_is_put_to_the_test_once() -> None:
    silence = Silence()
    assert passes(silence, 5 * S + S // 2) == [5]
    assert passes(silence, 8 * S) == [], "the job's own pauses of such a length"
    assert passes(silence, 9 * S + S // 2) == [9], "a lock: the remedy has ended this one again"
    for _ in range(3):
        assert passes(silence, 9 * S + S // 2) == [9]


def test_one_that_was_not_noticed_changes_nothing() -> None:
    silence = Silence()
    assert passes(silence, 4 * S) == []
    assert passes(silence, 6 * S) == [5]
