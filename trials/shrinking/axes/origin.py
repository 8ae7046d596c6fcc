"""Which parameters a tensor shows that is made of parameters alone: a view of a weight, or a weight times its gains."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trials.shrinking.axes.axis import Axis


@dataclass(frozen=True, slots=True)
class Origin:
    """A parameter that a tensor shows.

    Attributes:
        name: the parameter's.
        axes: which of its axes each axis of the tensor is; None: none of them.
        is_whole: whether the tensor is zero where the parameter is, and follows it there.
    """

    name: str
    axes: tuple[int | None, ...]
    is_whole: bool = True


Shown = tuple[Origin, ...]


def of_parameter(name: str, ndim: int) -> Shown:
    """What a parameter itself shows."""
    return (Origin(name, tuple(range(ndim))),)


def rearranged(shown: Shown, axes: Sequence[Axis], made: Sequence[Axis], is_whole: bool) -> Shown:
    """What is shown by the result, with axes `made`, of a function of one tensor with `axes`."""
    found = []
    for each in shown:
        of = {id(axis): position for axis, position in zip(axes, each.axes, strict=True)}
        own = tuple(of.get(id(axis)) for axis in made)
        found.append(Origin(each.name, own, each.is_whole and is_whole))
    return tuple(found)


def broadcast(sources: Iterable[tuple[Shown, Sequence[Axis]]], made: Sequence[Axis]) -> Shown:
    """What is shown by the result, with axes `made`, of tensors that were broadcast to it."""
    found: dict[str, Origin] = {}
    for shown, axes in sources:
        for each in shown:
            missing = len(made) - len(axes)
            own = [None if axis.size == 1 else position for axis, position in zip(axes, each.axes, strict=True)]
            aligned = Origin(each.name, (*([None] * missing), *own), is_whole=False)
            if each.name not in found or _known(aligned) > _known(found[each.name]):  # a weight, and its own mean
                found[each.name] = aligned
    return tuple(found.values())


def fans_in_use(
    each: Origin, sizes: Sequence[int], out: Iterable[int], into: Iterable[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of a parameter that count outputs and inputs where a tensor that shows it is multiplied.

    Args:
        each: what is shown.
        sizes: of the tensor.
        out: the tensor's axes of outputs.
        into: of inputs.
    """
    outs, ins = (tuple(sorted(p for i in of if (p := each.axes[i]) is not None)) for of in (out, into))
    is_gain = any(position is None and size > 1 for position, size in zip(each.axes, sizes, strict=True))
    return (ins, ()) if is_gain and not outs else (outs, ins)


def _known(origin: Origin) -> int:
    return sum(1 for each in origin.axes if each is not None)
