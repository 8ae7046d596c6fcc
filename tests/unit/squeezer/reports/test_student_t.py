"""Quantiles of Student's t against printed tables."""

import pytest

from squeezer.reports.student_t import t_quantile_975


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (11, 2.2010), (200, 1.9719)]
)
def test_t_quantile_is_that_of_the_tables(degrees: int, expected: float) -> None:
    assert t_quantile_975(degrees) == pytest.approx(expected, abs=1e-4)
