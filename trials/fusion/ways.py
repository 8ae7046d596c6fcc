"""The ways to train K trials as one, from the fastest to the plainest."""

from typing import Literal

Way = Literal["rules", "vmap", "loop"]

WAYS: tuple[Way, ...] = ("rules", "vmap", "loop")
"""By rules for layers, losses and optimizers; all code of the user's under one `vmap`, with the user's own optimizers;
all of it once per trial."""

FOUND_UNEQUAL = "the audit found that a fused trial differs from the trial alone"
"""Why trials are not trained by rules, in the words of `trials explain`."""


def plainer(way: Way) -> Way | None:
    """Return the next way; None: there is none."""
    following = WAYS[WAYS.index(way) + 1 :]
    return following[0] if following else None
