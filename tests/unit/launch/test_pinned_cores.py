"""The cores that a rank has for itself."""

import os

import pytest

from launch import rank


@pytest.mark.parametrize("cores", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shares_of_cores_are_even_contiguous_and_disjoint(cores: int, ranks: int) -> None:
    all_cores = [10 + core for core in range(cores)]
    shares = [rank.core_share(all_cores, r, ranks) for r in range(ranks)]
    assert all(shares)
    if ranks <= cores:
        assert [core for share in shares for core in share] == all_cores
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert {core for share in shares for core in share} == set(all_cores)


def test_where_no_launcher_says_how_many_ranks_there_are_the_cores_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = os.sched_getaffinity(0)
    rank._pin_cores(local_rank=1, local_size=1)
    assert os.sched_getaffinity(0) == before and "OMP_NUM_THREADS" not in os.environ
