"""How many trials join at once, by what joining costs."""

from hypothesis import given
from hypothesis import strategies as st

from trials.side_task.refilling import Refilling


def test_until_something_is_known_a_quarter_must_wait() -> None:
    assert [Refilling().least(rows) for rows in (1, 4, 16)] == [1, 1, 4]


def test_a_single_trial_joins_where_an_epoch_is_long_and_a_quarter_where_it_is_short() -> None:
    refilling = Refilling()
    refilling.joined(5_000_000)
    refilling.trained(1_000_000_000)
    assert refilling.least(16) == 1, "a row for an epoch is worth 62 ms"
    for _ in range(50):
        refilling.trained(30_000_000)
    assert refilling.least(16) == 3, "and now 1.9 ms"
    refilling.joined(500_000_000)
    assert refilling.least(16) == 4


@given(st.integers(1, 256), st.integers(1, 10**9), st.integers(1, 10**9))
def test_what_begins_is_worth_more_than_joining_costs(rows: int, joining_ns: int, epoch_ns: int) -> None:
    refilling = Refilling()
    refilling.joined(joining_ns)
    refilling.trained(epoch_ns)
    least = refilling.least(rows)
    assert 1 <= least <= -(-rows // 4)
    assert least * epoch_ns >= rows * joining_ns or least == -(-rows // 4)
