"""What a study says about its surrogate."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

READOUTS = ("zero", "keep")
READOUTS_ALLOWED = " or ".join(map(repr, READOUTS))


@dataclass(frozen=True, slots=True)
class Shrink:
    """How a study's models are shrunk.

    Attributes:
        by: how many times narrower.
        depth: how many times shallower, for stacks of pre-norm residual blocks.
        readout: "zero" lets the last layers begin at zero, in the surrogate and in the target; "keep" leaves them.
        divide: names of integer attributes that count what shrinks, such as ``("n_head",)``.
        fans: axes of outputs and inputs of parameters whose use does not show them; see `trials.roles`.
        keep: patterns of names of parameters or modules that stay as they are.
        regularizers: whether weight decay and dropout may be searched, though their best values depend on the size.
        is_target: whether the target itself is trained, with readouts as the surrogate's.
    """

    by: int
    depth: int = 1
    readout: str = "zero"
    divide: Sequence[str] = ()
    fans: Mapping[str, Any] = field(default_factory=dict)
    keep: Sequence[str] = ()
    regularizers: bool = False
    is_target: bool = False


def as_shrink(given: Any) -> Shrink | None:
    """A study's attribute `shrink`: nothing, a factor of width, or all settings."""
    return given if given is None or isinstance(given, Shrink) else Shrink(given)


def problems_of(given: Any) -> Iterator[str]:
    """Yield what is wrong with a study's attribute `shrink`."""
    if given is None:
        return
    whole = isinstance(given, int) and not isinstance(given, bool)
    if not (whole or isinstance(given, Shrink)):
        yield f": shrink = {given!r}; allowed: None, a whole number, 2 or more, or trials.Shrink(...)"
        return
    settings = as_shrink(given)
    assert settings is not None  # it is given
    for name, least in (("by", 2), ("depth", 1)):
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            yield f": shrink has {name} = {value!r}; allowed: a whole number, {least} or more"
    if settings.readout not in READOUTS:
        yield f": shrink has readout = {settings.readout!r}; allowed: {READOUTS_ALLOWED}"
    for name in ("divide", "keep"):
        value = getattr(settings, name)
        if not isinstance(value, (tuple, list)) or not all(isinstance(each, str) for each in value):
            yield f": shrink has {name} = {value!r}; allowed: names, such as ('n_head',)"
