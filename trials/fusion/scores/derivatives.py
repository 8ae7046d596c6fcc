"""Refuses a loss that differentiates one of the model's outputs by another."""

from collections.abc import Iterator
from contextlib import contextmanager

from trials.fusion.errors import RefusedError


@contextmanager
def apart_from_others(name: str) -> Iterator[None]:
    """Enter it around the function called `name`, which gets one trial's outputs.

    Raises:
        RefusedError: it looks for a path from one of them to another. Both are parts of all trials' here.
    """
    try:
        yield
    except RuntimeError as error:
        if "appears to not have been used in the graph" not in str(error):
            raise
        raise RefusedError(
            f"{name} differentiates one of the model's outputs by another, which trials that train at once have as "
            "parts of one tensor; allowed: to differentiate in the forward, and to return the result"
        ) from error
