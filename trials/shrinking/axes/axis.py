"""Which axes of tensors must have equal sizes: classes of axes, joined by the operations of a forward.

A class is a leaf, which is kept or shrinks as a whole, or it is made of others: a product, where axes were flattened or
split, or a sum, where they were joined or cut. The first factor of a product is the outer one.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor


class Axis:
    """A class of axes of one size.

    Attributes:
        size: in the target.
        kept: why it does not shrink; empty: it may.
        parts: the classes it is made of; none: it is a leaf.
        form: how these make it.
    """

    __slots__ = ("form", "kept", "parent", "parts", "size")

    def __init__(self, size: int, kept: str = "") -> None:
        self.size = size
        self.kept = kept
        self.parent: Axis | None = None
        self.parts: tuple[Axis, ...] = ()
        self.form: Literal["product", "sum"] = "product"

    def find(self) -> "Axis":
        """The class that this one was joined with."""
        found = self
        while found.parent is not None:
            found = found.parent
        if found is not self:
            self.parent = found
        return found


UNIT = "size 1"


def one() -> Axis:
    """An axis of size 1."""
    return Axis(1, UNIT)


def leaves(axis: Axis) -> Iterator[Axis]:
    """The leaves of which an axis is made."""
    axis = axis.find()
    if not axis.parts:
        yield axis
    for part in axis.parts:
        yield from leaves(part)


def keep(axis: Axis, reason: str) -> None:
    """Let an axis stay as it is; the first reason counts."""
    for leaf in leaves(axis):
        leaf.kept = leaf.kept or reason


def is_free(axis: Axis) -> bool:
    """Whether any leaf of an axis may shrink."""
    return any(not leaf.kept for leaf in leaves(axis))


def product(axes: Sequence[Axis]) -> Axis:
    """The axis that flattening `axes` gives."""
    factors = factors_of(axes)
    if len(factors) == 1:
        return factors[0]
    return _made("product", factors) if factors else one()


def total(axes: Sequence[Axis]) -> Axis:
    """The axis that joining tensors along `axes` gives."""
    parts = [part for axis in axes for part in _terms(axis.find())]
    return parts[0] if len(parts) == 1 else _made("sum", parts)


def factors_of(axes: Sequence[Axis]) -> list[Axis]:
    """The factors of `axes` in order, without those of size 1."""
    found: list[Axis] = []
    for axis in axes:
        root = axis.find()
        if root.parts and root.form == "product":
            found += factors_of(root.parts)
        elif root.size != 1:
            found.append(root)
    return found


def join(one_axis: Axis, other: Axis, reason: str) -> None:
    """Let two axes be of one class. What cannot be matched is kept, for `reason`."""
    a, b = one_axis.find(), other.find()
    if a is b or a.size == b.size == 1:
        return
    if a.size != b.size:
        keep(a, reason)
        keep(b, reason)
    elif not a.parts or not b.parts:
        _join_leaf(*((a, b) if not a.parts else (b, a)), reason)
    elif a.form == b.form == "product":
        _join_products(factors_of([a]), factors_of([b]), reason)
    elif a.form == b.form == "sum":
        _join_sums(list(a.parts), list(b.parts), reason)
    else:
        by_product, by_sum = (a, b) if a.form == "product" else (b, a)
        _join_mixed(factors_of([by_product]), by_sum, reason)


def split(axis: Axis, outer: Axis, reason: str) -> Axis:
    """Divide a factor by `outer`, its outer part, and return the inner one.

    If `outer` may shrink, the inner one is kept: what the size of a head is, when the heads are counted.
    """
    root = axis.find()
    size = outer.size
    if size == 1:
        return root
    if root.parts and root.form == "sum" and len(root.parts) == size:
        inner = root.parts[0]
        for part in root.parts[1:]:
            join(inner, part, reason)
        keep(outer, f"a count of {size} alike parts")
        return inner
    if root.parts and root.form == "product":
        found = _split_product(factors_of([root]), outer, reason)
        if found is not None:
            return found
    if root.parts or root.size % size or outer.find() is root:
        keep(root, reason)
        keep(outer, reason)
        return Axis(root.size // size, reason)
    inner = Axis(root.size // size, root.kept)
    if root.kept:
        keep(outer, root.kept)
    elif is_free(outer):
        inner.kept = f"the size of each of {size} parts, whose number shrinks"
    root.parts, root.form = (outer.find(), inner), "product"
    return inner


def _split_product(factors: list[Axis], outer: Axis, reason: str) -> Axis | None:
    """See `split`; None: the sizes do not fit."""
    first, *rest = factors
    if first.size == outer.size:
        join(first, outer, reason)
        return product(rest)
    if first.size > outer.size and first.size % outer.size == 0:
        return product([split(first, outer, reason), *rest])
    if outer.size % first.size == 0 and not outer.find().parts:
        return split(product(rest), split(outer, first, reason), reason)
    return None


def cut(axis: Axis, sizes: Sequence[int], reason: str) -> list[Axis]:
    """The axes of the pieces into which an axis is cut."""
    root = axis.find()
    if len(sizes) == 1:
        return [root]
    if root.parts and root.form == "sum":
        pieces = _grouped(list(root.parts), sizes)
        if pieces is not None:
            return [total(piece) for piece in pieces]
    elif root.parts and len(set(sizes)) == 1:
        inner = split(root, Axis(len(sizes), f"a count of {len(sizes)} alike parts"), reason)
        if inner.size == sizes[0]:
            return [inner] * len(sizes)
    elif not root.parts:
        made = [Axis(size, root.kept) for size in sizes]
        if not root.kept:
            root.parts, root.form = tuple(made), "sum"
        return made
    keep(root, reason)
    return [Axis(size, reason) for size in sizes]


def new_size(axis: Axis, by: int) -> int:
    """An axis's size in the surrogate."""
    root = axis.find()
    if root.parts:
        sizes = [new_size(part, by) for part in root.parts]
        return prod(sizes) if root.form == "product" else sum(sizes)
    return root.size if root.kept else root.size // by


def index_of(axis: Axis, by: int) -> Tensor:
    """Which of the target's indices an axis of the surrogate takes: the first of each leaf."""
    root = axis.find()
    if not root.parts:
        return torch.arange(new_size(root, by))
    parts = [(part.find(), index_of(part, by)) for part in root.parts]
    if root.form == "product":
        made = torch.zeros(1, dtype=torch.long)
        for part, index in parts:
            made = (made[:, None] * part.size + index).flatten()
        return made
    pieces, begin = [], 0
    for part, index in parts:
        pieces.append(index + begin)
        begin += part.size
    return torch.cat(pieces)


def _made(form: Literal["product", "sum"], parts: Sequence[Axis]) -> Axis:
    sizes = [part.size for part in parts]
    axis = Axis(prod(sizes) if form == "product" else sum(sizes))
    axis.parts, axis.form = tuple(parts), form
    return axis


def _terms(axis: Axis) -> Sequence[Axis]:
    return axis.parts if axis.parts and axis.form == "sum" else (axis,)


def _join_leaf(leaf: Axis, other: Axis, reason: str) -> None:
    if any(leaf is each for each in leaves(other)):  # such as an axis that is joined with a part of itself
        keep(other, reason)
        return
    if leaf.kept:
        keep(other, leaf.kept)
    leaf.parent = other


def _join_products(a: list[Axis], b: list[Axis], reason: str) -> None:
    while a and b:
        one_factor, other = a[0].find(), b[0].find()
        if one_factor.size == other.size:
            join(one_factor, other, reason)
            a, b = a[1:], b[1:]
            continue
        if one_factor.size > other.size:
            a, b, one_factor, other = b, a, other, one_factor
        a, b = a[1:], factors_of([split(other, one_factor, reason), *b[1:]])
    for rest in (*a, *b):
        keep(rest, reason)


def _join_sums(a: list[Axis], b: list[Axis], reason: str) -> None:
    while a and b:
        one_part, other = a[0].find(), b[0].find()
        if one_part.size == other.size:
            join(one_part, other, reason)
            a, b = a[1:], b[1:]
            continue
        if one_part.size > other.size:
            a, b, one_part, other = b, a, other, one_part
        piece, rest = cut(other, [one_part.size, other.size - one_part.size], reason)
        join(one_part, piece, reason)
        a, b = a[1:], [rest, *b[1:]]
    for rest in (*a, *b):
        keep(rest, reason)


def _join_mixed(factors: list[Axis], by_sum: Axis, reason: str) -> None:
    """Join a product with a sum: of alike parts, if the outer factor counts them."""
    first, *rest = factors
    if first.size == len(by_sum.parts) and len({part.size for part in by_sum.parts}) == 1:
        keep(first, f"a count of {first.size} alike parts")
        for part in by_sum.parts:
            join(product(rest), part, reason)
        return
    for axis in (*factors, by_sum):
        keep(axis, reason)


def _grouped(parts: list[Axis], sizes: Sequence[int]) -> list[list[Axis]] | None:
    """`parts` in runs of these sizes; None: they do not fall into such runs."""
    found: list[list[Axis]] = []
    for size in sizes:
        run: list[Axis] = []
        while parts and sum(part.size for part in run) < size:
            run.append(parts[0])
            parts = parts[1:]
        if sum(part.size for part in run) != size:
            return None
        found.append(run)
    return None if parts else found
