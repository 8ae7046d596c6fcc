"""Integers that know which axis they are the size of, so that a forward's own arithmetic shows what must be equal."""

from typing import Any

from trials.shrinking.axes.axis import Axis, is_free, keep, one, product, total
from trials.shrinking.axes.run import source_line


class Dim(int):
    """The size of an axis.

    Attributes:
        axis: the axis.
        quotients: what was divided so far, to be checked once all axes are known: dividend, divisor, quotient.
    """

    axis: Axis
    quotients: "list[tuple[Axis, Axis, Axis]]"

    def __new__(cls, axis: Axis, quotients: "list[tuple[Axis, Axis, Axis]]") -> "Dim":
        """Of an axis."""
        made = super().__new__(cls, axis.size)
        made.axis, made.quotients = axis, quotients
        return made

    def _of(self, axis: Axis) -> "Dim":
        return Dim(axis, self.quotients)

    def __mul__(self, other: Any) -> Any:
        """Sizes that are multiplied are those of flattened axes."""
        return self._of(product([self.axis, axis_of(other)])) if isinstance(other, int) else int(self) * other

    def __rmul__(self, other: Any) -> Any:
        """See `__mul__`."""
        return self._of(product([axis_of(other), self.axis])) if isinstance(other, int) else other * int(self)

    def __add__(self, other: Any) -> Any:
        """Sizes that are added are those of joined axes."""
        if isinstance(other, int) and (is_free(self.axis) or isinstance(other, Dim)):
            return self._of(total([self.axis, axis_of(other)]))
        return int(self) + other

    def __floordiv__(self, other: Any) -> Any:
        """What remains of an axis that is split: of one whose parts are counted, the size of a part, which is kept."""
        if not isinstance(other, int) or other <= 0 or int(self) % other or not is_free(self.axis):
            return int(self) // other
        divisor = axis_of(other)
        quotient = Axis(int(self) // int(other))
        if is_free(divisor):
            keep(quotient, f"the size of each of {int(other)} parts, whose number shrinks")
        self.quotients.append((self.axis, divisor, quotient))
        return self._of(quotient)

    def __float__(self) -> float:
        """A number that is computed from a width would be another one in the surrogate, so the axis stays."""
        if is_free(self.axis):
            reason = f"the code computes a number from it{source_line()}, which would be another in the surrogate"
            whole = Axis(int(self), reason)
            self.quotients.append((self.axis, one(), whole))
        return float(int(self))

    def __truediv__(self, other: Any) -> Any:
        """See `__float__`."""
        return float(self) / other

    def __rtruediv__(self, other: Any) -> Any:
        """See `__float__`."""
        return other / float(self)

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        """See `__float__`."""
        float(self)
        return pow(int(self), other, modulo)

    def __deepcopy__(self, memo: Any) -> "Dim":
        """The same: a copied module must refer to the same axis."""
        return self


PLAIN = "a plain number"


def axis_of(number: int) -> Axis:
    """The axis of a size; a plain number is one that does not shrink."""
    return number.axis if isinstance(number, Dim) else Axis(int(number), PLAIN)
