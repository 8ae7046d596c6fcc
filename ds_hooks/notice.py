"""What the hooks print for the user, on the main job's stderr."""

import os
import sys
from contextlib import suppress

_SAID: set[str] = set()
"""By this process."""
os.register_at_fork(after_in_child=_SAID.clear)


def notice(text: str) -> None:
    """Print `text`, with where it comes from, if this process has not yet: a script may build many engines.

    Where that fails, nothing is said: the terminal may be gone, and the script's own stderr may raise anything.
    """
    if text in _SAID:
        return
    _SAID.add(text)
    with suppress(Exception):
        if sys.stderr is not None:
            print(f"[ds_hooks] {text}", file=sys.stderr)
