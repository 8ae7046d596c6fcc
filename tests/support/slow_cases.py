"""Cases of one property, of which those that differ most run by default and the rest with the slow tests."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def others_slow(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """`cases` for `parametrize`: a tuple has a value for each name, and all but `quick` are slow.

    Raises:
        ValueError: something in `quick` is no case.
    """
    listed = list(cases)
    if unknown := [case for case in quick if case not in listed]:
        raise ValueError(f"no cases: {unknown}; allowed: {listed}")
    return [pytest.param(*_values(case), marks=() if case in quick else pytest.mark.slow) for case in listed]


def crossed(names: Iterable[Any], others: Iterable[Any], usual: Any) -> list[Any]:
    """Pairs for `parametrize`: each name is quick with the `usual` one of the others, every fourth with them all."""
    listed, rest = list(names), list(others)
    return others_slow(product(listed, rest), [*product(listed, [usual]), *product(listed[::4], rest)])


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
