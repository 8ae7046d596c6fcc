"""Classes of axes: what is joined has one size in the surrogate, and slices of it are the same units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.shrinking.axes.axis import Axis, cut, index_of, is_free, join, keep, leaves, new_size, product, split, total
from trials.shrinking.axes.sizes import Dim


def test_what_is_joined_shrinks_or_stays_together() -> None:
    a, b, c = Axis(8), Axis(8), Axis(8)
    join(a, b, "joined")
    assert new_size(b, 4) == 2
    keep(c, "the input")
    join(b, c, "joined")
    assert [new_size(axis, 4) for axis in (a, b, c)] == [8, 8, 8]
    assert {leaf.kept for leaf in leaves(a)} == {"the input"}


def test_a_flattened_axis_shrinks_by_its_free_factors() -> None:
    channels, places = Axis(8), Axis(3, "places")
    flat = product([channels, places])
    other = Axis(24)
    join(other, flat, "joined")
    assert new_size(other, 4) == 6
    assert index_of(other, 4).tolist() == [0, 1, 2, 3, 4, 5]
    assert index_of(product([places, channels]), 4).tolist() == [0, 1, 8, 9, 16, 17]


def test_an_axis_that_is_split_by_what_shrinks_keeps_the_rest() -> None:
    width, heads = Axis(24), Axis(6)
    size = split(width, heads, "a view")
    assert (size.size, is_free(size)) == (4, False)
    assert new_size(width, 3) == 8
    plain = Axis(24)
    rest = split(plain, Axis(6, "a plain number"), "a view")
    assert is_free(rest)
    assert new_size(plain, 4) == 6


def test_sums_are_cut_where_they_were_joined() -> None:
    a, b = Axis(8), Axis(16)
    whole = total([a, b])
    assert new_size(whole, 4) == 6
    assert index_of(whole, 4).tolist() == [0, 1, 8, 9, 10, 11]
    first, second = cut(whole, [8, 16], "a split")
    assert (first, second) == (a, b)
    three = Axis(24)
    parts = cut(three, [8, 8, 8], "a chunk")
    keep(parts[0], "kept")
    assert new_size(three, 4) == 8 + 2 + 2


def test_a_sum_of_alike_parts_is_a_product() -> None:
    part = Axis(8)
    whole = total([part, part, part])
    other = product([Axis(3), Axis(8)])
    join(whole, other, "a view")
    assert new_size(other, 4) == new_size(whole, 4) == 6


def test_what_does_not_fit_stays() -> None:
    a, b = product([Axis(4), Axis(6)]), product([Axis(3), Axis(8)])
    join(a, b, "a view")
    assert not is_free(a)
    assert not is_free(b)
    odd = Axis(9)
    split(odd, Axis(2), "a view")
    assert {leaf.kept for leaf in leaves(odd)} == {"a view"}


def test_an_axis_is_not_joined_with_a_part_of_itself() -> None:
    part = Axis(8)
    join(part, total([part]), "the same")
    assert is_free(part)
    whole = total([part, Axis(0)])
    join(part, whole, "a circle")
    assert not is_free(part)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_a_view_there_and_back_is_no_change(sizes: list[int], data: st.DataObject) -> None:
    axes = [Axis(4 * size, "" if data.draw(st.booleans()) else "kept") for size in sizes]
    whole = product(axes)
    opened = [Axis(axis.size) for axis in axes]
    join(product(opened), whole, "a view")
    assert [new_size(axis, 4) for axis in opened] == [new_size(axis, 4) for axis in axes]
    assert len(index_of(whole, 4)) == new_size(whole, 4)


def test_sizes_tell_of_which_axis_they_are() -> None:
    quotients: list[tuple[Axis, Axis, Axis]] = []
    width, heads = Dim(Axis(24), quotients), Dim(Axis(6), quotients)
    size = width // heads
    assert (size, is_free(size.axis)) == (4, False)
    assert len(quotients) == 1
    assert is_free((width * 2).axis)
    assert is_free((2 * width).axis)
    assert is_free((width + width).axis)
    assert not isinstance(Dim(Axis(5, "tokens"), quotients) + 1, Dim)
    assert not isinstance(width / 2, Dim)
    with pytest.raises(ZeroDivisionError):
        _ = width // 0
